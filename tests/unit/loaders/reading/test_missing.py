"""A feed refuses fields that some record lacks, when it is made, and says the ways out."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.refusals import Call, Refused
from support.shards import write_tar, write_tfrecord

from twinfeed.loaders import (
    DatasetSource,
    DecodeError,
    DecodeImage,
    Feed,
    Index,
    LoaderError,
    NumpyLoader,
    build_index,
)
from twinfeed.samplers import ExactOnceBatchSampler, PKBatchSampler

WHOLE = ExactOnceBatchSampler(10, batch_size=4)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """Ten records of a tar, of which record 7 lacks its text."""
    samples = [
        (f"{n:03d}", {"jpg": b"...", "cls": str(n % 2).encode(), "txt": f"text {n}".encode()})
        for n in range(10)
    ]
    del samples[7][1]["txt"]
    return build_index(write_tar(tmp_path / "a.tar", samples), tmp_path / "a.index", label="cls")


def test_each_advice_for_missing_fields_lets_a_loop_run(index: Index) -> None:
    for batch in NumpyLoader(Feed(index, WHOLE, fields=["jpg"])):
        assert "txt" not in batch
    assert Feed(index, WHOLE, fields=["jpg"], missing={"txt": b""}).missing == {}
    feed = pickle.loads(pickle.dumps(Feed(index, WHOLE, missing={"txt": "nothing"})))
    texts = [text for batch in NumpyLoader(feed) for text in batch["txt"]]
    assert texts == [b"nothing" if n == 7 else f"text {n}".encode() for n in range(10)]
    some = PKBatchSampler(index.labels, p=2, k=2, seed=0, records=[0, 1, 2, 3])
    assert len(Feed(index, some, missing="late")[0, 0]["txt"]) == 4


def test_missing_late_raises_with_record_and_argument(index: Index) -> None:
    feed = Feed(index, WHOLE, missing="late")
    batches = iter(NumpyLoader(feed, prefetch=0))
    next(batches)
    with pytest.raises(LoaderError, match=r"record 7 .*lacks the field 'txt'") as caught:
        next(batches)
    assert "give Feed a value for it, missing={'txt': …}" in str(caught.value)


def test_missing_value_fills_lists_and_repeated_records(tmp_path: Path) -> None:
    """A record that comes twice in a batch has the value twice; present records keep theirs."""
    rows: list[dict[str, Any]] = [
        {"x": np.arange(n % 3 + 1, dtype=np.float32), "n": np.arange(n % 2 + 1)} for n in range(6)
    ]
    del rows[2]["x"]
    shard = write_tfrecord(tmp_path / "a.tfrecord", rows)
    index = build_index(shard, tmp_path / "a.index")
    feed = Feed(
        index,
        ExactOnceBatchSampler(6, batch_size=6),
        fields=["x"],
        collate="pad",
        missing={"x": [9]},
    )
    batch = feed[0, 0]
    assert batch["x"].tolist()[2] == [9, 0, 0]
    assert batch["x_length"].tolist() == [1, 2, 1, 1, 2, 3]
    for value in ([1.5], ["one"], 1.5, [[1]], 2**63):  # which an int64 does not hold, or no list
        with pytest.raises(TypeError, match="have a number or a list of numbers for the field 'n'"):
            Feed(index, feed.sampler, missing={"x": [9], "n": value})
    for number in (2**24 + 1, 1e300):
        with pytest.raises(TypeError, match=r"a list of numbers for the field 'x', got 1(677|e)"):
            Feed(index, feed.sampler, missing={"x": number, "n": 0})


def test_missing_number_gives_equal_batches_of_field_and_column(tmp_path: Path) -> None:
    """A number says that each record has one, whether a shard lacks some, or `lists` names it."""
    whole = [{"s": np.float32(n), "n": n} for n in range(4)]
    partial = [*whole[:2], {"n": 2}, whole[3]]
    batches = []
    for name, rows, lists in (("a", whole, ()), ("b", whole, ("s",)), ("c", partial, ())):
        shard = write_tfrecord(tmp_path / f"{name}.tfrecord", rows)
        index = build_index(shard, tmp_path / f"{name}.index", lists=lists)
        assert ("s" in index.columns) == (name == "a")
        assert index[0]["s"] == [0]  # `missing` of a feed alone makes a number of it
        feed = Feed(index, ExactOnceBatchSampler(4, batch_size=4), missing={"s": -1})
        batches.append(feed[0, 0]["s"])
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, -1, 3]]
    assert {(batch.dtype, batch.shape) for batch in batches} == {(np.dtype(np.float32), (4,))}
    two = write_tfrecord(tmp_path / "d.tfrecord", [*partial, {"s": [1.5, 2], "n": 4}])
    feed = Feed(
        build_index(two, tmp_path / "d.index"),
        ExactOnceBatchSampler(5, batch_size=5),
        missing={"s": -1},
    )
    with pytest.raises(LoaderError, match=r"(?s)number 4\) has 2 values in .* missing={'s': \[-1"):
        feed[0, 0]


def test_numbers_of_lists_are_a_field_in_every_shard(tmp_path: Path) -> None:
    """One decode serves a shard whose records have one box each, and a shard of several."""
    for name, counts in (("train", [2, 1, 3]), ("val", [1, 1, 1]), ("four", [4, 4, 4])):
        rows = [{"box": np.arange(count, dtype=np.float32)} for count in counts]
        shard = write_tfrecord(tmp_path / f"{name}.tfrecord", rows)
        index = build_index(shard, tmp_path / f"{name}.index", lists=["box"])
        assert (list(index.fields), list(index.columns)) == (["box"], [])
        feed = Feed(
            index,
            ExactOnceBatchSampler(3, batch_size=3),
            decode=lambda sample: {"box": sample["box"] + 1},
            collate={"box": "ragged"},
        )
        found = feed[0, 0]["box"]
        assert found.lengths.tolist() == counts
        assert found.values.tolist() == [1.0 + n for count in counts for n in range(count)]


def test_advice_for_a_column_that_was_taken_for_a_field(tmp_path: Path) -> None:
    shard = write_tfrecord(tmp_path / "a.tfrecord", [{"box": n, "x": b"."} for n in range(3)])
    index = build_index(shard, tmp_path / "a.index")
    advice = r"'box' is a column: `transform=` gets it, or build the index with lists=\['box'\]"
    whole = ExactOnceBatchSampler(3, batch_size=3)
    assert "box: column, int64[3]" in index.summary()
    with pytest.raises(LoaderError, match=r"KeyError\('box'\); it was given \['x'\]; " + advice):
        Feed(index, whole, decode=lambda sample: {"y": sample["box"]})[0, 0]
    with pytest.raises(ValueError, match=r"collate names \['box'\], .*; " + advice):
        Feed(index, whole, collate={"box": "ragged"})[0, 0]
    with pytest.raises(LoaderError, match=r"KeyError\('box'\); it was given \['x'\]; " + advice):
        Feed(index, whole, decode=DecodeImage("box"))[0, 0]
    source = DatasetSource({"x": np.arange(3), "label": np.arange(3)}, label="label")
    with pytest.raises(LoaderError, match=r"'label' is a column: `transform=` gets it\n"):
        Feed(source, whole, decode=lambda sample: {"y": sample["label"]})[0, 0]


def test_feed_accepts_index_built_with_missing_empty(tmp_path: Path) -> None:
    samples = [("a", {"txt": b"..."}), ("b", {"jpg": b"..."})]
    index = build_index(
        write_tar(tmp_path / "a.tar", samples),
        tmp_path / "a.index",
        fields=["txt", "jpg"],
        missing="empty",
    )
    batch = Feed(index, ExactOnceBatchSampler(2, batch_size=2))[0, 0]
    assert batch["jpg"] == [b"", b"..."]


def feed(**options: Any) -> Callable[[Index], object]:
    return lambda index: Feed(index, WHOLE, **options)


REFUSED: Refused = [
    (
        feed(),
        ValueError,
        r"(?s)'txt' \(1 of 10\).*fields=\['jpg'\].*missing={'txt': b''}.*missing='late'",
    ),
    (feed(missing={"a": b""}), ValueError, r"missing has the fields \['a'\], .* \['jpg', 'txt'\]$"),
    (feed(fields=["caption"], missing={"text": b""}), KeyError, "no field 'caption'"),
    (feed(missing={"txt": 0}), TypeError, "bytes or a str for the field 'txt', got 0"),
    (feed(missing="empty"), ValueError, "one of 'error', 'late', got 'empty'"),
    (
        lambda index: Feed(index, WHOLE, fields=["jpg"], decode=DecodeImage())[0, 0],
        DecodeError,
        r"KeyError\('image'\); it was given \['jpg'\]",
    ),
    (
        lambda index: Feed(index, WHOLE, fields=["jpg"], collate={"text": "pad"})[0, 0],
        ValueError,
        r"collate names \['text'\]",
    ),
]


@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_feed_refuses_missing_that_does_not_fit_its_index(
    index: Index, call: Call, kind: type[Exception], word: str
) -> None:
    with pytest.raises(kind, match=word):
        call(index)


def test_feed_refuses_lists_of_byte_strings(tmp_path: Path) -> None:
    shard = write_tfrecord(tmp_path / "a.tfrecord", [{"words": [b"a", b"b"]}, {"words": [b"c"]}])
    index, sampler = (
        build_index(shard, tmp_path / "a.index"),
        ExactOnceBatchSampler(2, batch_size=2),
    )
    with pytest.raises(DecodeError, match=r"record 0 .*'words' holds .*is collated with 'ragged'"):
        Feed(index, sampler)[0, 0]
    decoded = Feed(index, sampler, decode=lambda sample: {"n": len(sample["words"])})
    assert decoded[0, 0]["n"].tolist() == [2, 1]
