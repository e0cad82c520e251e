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
    assert "give Feed or Reader.read a value for it, missing={'txt': …}" in str(caught.value)


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
    for value in ([1.5], ["one"], 1):  # which an int64 does not hold, and no list
        with pytest.raises(TypeError, match="have a list of numbers for the field 'n'"):
            Feed(index, feed.sampler, missing={"x": [9], "n": value})


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
        feed(decode=DecodeImage(), missing="late"),
        KeyError,
        "decode reads the field 'image', but",
    ),
    (feed(decode=DecodeImage("jpeg"), missing="late"), KeyError, r"as in DecodeImage\('jpg'\)"),
    (feed(decode=DecodeImage(), fields=[]), KeyError, "but the feed reads .*: give decode one of"),
    (feed(fields=["jpg"], collate={"text": "pad"}), ValueError, r"collate names \['text'\]"),
    (
        feed(fields=["jpg"], spec={"text": ((), None)}),
        ValueError,
        r"spec has the fields \['text'\], but",
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
    with pytest.raises(ValueError, match="field 'words' holds lists of byte strings"):
        Feed(index, sampler)
    decoded = Feed(index, sampler, decode=lambda sample: {"n": len(sample["words"])})
    assert decoded[0, 0]["n"].tolist() == [2, 1]
