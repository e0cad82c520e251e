"""A feed refuses fields that some record lacks, when it is made, and says the ways out."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from making_shards import write_tar, write_tfrecord

from twinfeed.loaders import (
    DecodeImage,
    Feed,
    Index,
    LoaderError,
    NumpyLoader,
    build_index,
)
from twinfeed.samplers import ExactOnceBatchSampler, PKBatchSampler


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """Ten records of a tar, of which record 7 lacks its text."""
    samples = [
        (f"{n:03d}", {"jpg": b"...", "cls": str(n % 2).encode(), "txt": f"text {n}".encode()})
        for n in range(10)
    ]
    del samples[7][1]["txt"]
    return build_index(write_tar(tmp_path / "a.tar", samples), tmp_path / "a.index", label="cls")


def test_a_missing_field_is_refused_before_training_with_the_ways_out(index: Index) -> None:
    with pytest.raises(ValueError, match=r"lack the field 'txt' \(1 of 10\)") as caught:
        Feed(index, ExactOnceBatchSampler(10, batch_size=4))
    for way in ("fields=['jpg']", "missing={'txt': b''}", "missing='late'"):
        assert way in str(caught.value)


def test_each_way_out_trains(index: Index) -> None:
    whole = ExactOnceBatchSampler(10, batch_size=4)
    for batch in NumpyLoader(Feed(index, whole, fields=["jpg"])):
        assert "txt" not in batch
    feed = pickle.loads(pickle.dumps(Feed(index, whole, missing={"txt": "nothing"})))
    texts = [text for batch in NumpyLoader(feed) for text in batch["txt"]]
    assert texts == [b"nothing" if n == 7 else f"text {n}".encode() for n in range(10)]
    some = PKBatchSampler(index.labels, p=2, k=2, seed=0, records=[0, 1, 2, 3])
    assert len(Feed(index, some, missing="late")[0, 0]["txt"]) == 4


def test_late_names_the_record_and_an_argument_of_the_feed(index: Index) -> None:
    feed = Feed(index, ExactOnceBatchSampler(10, batch_size=4), missing="late")
    batches = iter(NumpyLoader(feed, prefetch=0))
    next(batches)
    with pytest.raises(LoaderError, match=r"record 7 .*lacks the field 'txt'") as caught:
        next(batches)
    assert "give Feed or Reader.read a value for it, missing={'txt': …}" in str(caught.value)


def test_the_values_of_lists_and_repeated_records(tmp_path: Path) -> None:
    """A record that comes twice in a batch has the value twice; present records keep theirs."""
    rows = [{"x": np.arange(n % 3 + 1, dtype=np.float32), "n": n} for n in range(6)]
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


def test_an_index_of_empty_fields_is_taken(tmp_path: Path) -> None:
    samples = [("a", {"txt": b"..."}), ("b", {"jpg": b"..."})]
    index = build_index(
        write_tar(tmp_path / "a.tar", samples),
        tmp_path / "a.index",
        fields=["txt", "jpg"],
        missing="empty",
    )
    batch = Feed(index, ExactOnceBatchSampler(2, batch_size=2))[0, 0]
    assert batch["jpg"] == [b"", b"..."]


def test_values_that_do_not_fit_are_refused(index: Index) -> None:
    sampler = ExactOnceBatchSampler(10, batch_size=4)
    with pytest.raises(
        ValueError, match=r"missing names \['text'\], the index has the fields \['jpg', 'txt'\]$"
    ):
        Feed(index, sampler, missing={"text": b""})
    with pytest.raises(KeyError, match="no field 'caption'"):
        Feed(index, sampler, fields=["caption"], missing={"text": b""})
    assert Feed(index, sampler, fields=["jpg"], missing={"txt": b""}).missing == {}
    with pytest.raises(TypeError, match="bytes or a str for the field 'txt', got 0"):
        Feed(index, sampler, missing={"txt": 0})
    with pytest.raises(ValueError, match="one of 'error', 'late', got 'empty'"):
        Feed(index, sampler, missing="empty")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'error', 'late', got 'skip'"):
        Feed(index, sampler, missing="skip")  # type: ignore[arg-type]


def test_a_decode_of_an_unknown_field_is_refused_when_the_feed_is_made(index: Index) -> None:
    with pytest.raises(KeyError, match="decode reads the field 'image', and the feed has"):
        Feed(index, ExactOnceBatchSampler(10, batch_size=4), decode=DecodeImage(), missing="late")


def test_a_field_that_may_hold_images_is_named_to_decode(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "a.tar", [("a", {"cls": b"1", "jpg": b"...", "txt": b""})])
    index = build_index(shard, tmp_path / "a.index")
    with pytest.raises(KeyError, match=r"as in DecodeImage\('jpg'\)"):
        Feed(index, ExactOnceBatchSampler(1, batch_size=1), decode=DecodeImage("jpeg"))
    with pytest.raises(KeyError, match=r"and the feed has .*: name one of these"):
        Feed(
            index, ExactOnceBatchSampler(1, batch_size=1), decode=DecodeImage("jpg"), fields=["cls"]
        )


def test_lists_of_byte_strings_are_refused_when_the_feed_is_made(tmp_path: Path) -> None:
    shard = write_tfrecord(tmp_path / "a.tfrecord", [{"words": [b"a", b"b"]}, {"words": [b"c"]}])
    index, sampler = (
        build_index(shard, tmp_path / "a.index"),
        ExactOnceBatchSampler(2, batch_size=2),
    )
    with pytest.raises(ValueError, match="field 'words' holds lists of byte strings"):
        Feed(index, sampler)
    decoded = Feed(index, sampler, decode=lambda sample: {"n": len(sample["words"])})
    assert decoded[0, 0]["n"].tolist() == [2, 1]


def test_collate_and_spec_of_other_fields_are_refused_when_the_feed_is_made(index: Index) -> None:
    sampler = ExactOnceBatchSampler(10, batch_size=4)
    with pytest.raises(ValueError, match=r"collate names \['text'\]"):
        Feed(index, sampler, fields=["jpg"], collate={"text": "pad"})
    with pytest.raises(ValueError, match=r"spec names \['text'\], fields \['jpg'\]"):
        Feed(index, sampler, fields=["jpg"], spec={"text": ((), None)})  # type: ignore[dict-item]
