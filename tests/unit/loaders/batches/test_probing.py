"""The shapes and dtypes of a feed: of its first sample, or as spec= says."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.feeds import batch_of, request_of

from twinfeed.loaders import (
    DatasetSource,
    DecodeError,
    DecodeImage,
    Feed,
    FieldSpec,
    Index,
    NumpyLoader,
    pack,
)
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    RandomSampler,
    SequentialSampler,
)


@pytest.mark.parametrize("how", ["stack", "ragged"])
def test_batches_must_match_first_record_or_spec(
    index: Index, sampler: ExactOnceBatchSampler, how: Any
) -> None:
    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.zeros((2, len(sample["word"])))}

    with pytest.raises(DecodeError, match=r"record 3 .*shape \(2, 3\), but .* first record"):
        batch_of(Feed(index, sampler, decode=decode, collate=how), request_of(3))
    spec = {"x": FieldSpec((2, None), np.dtype(float))}
    feed = Feed(index, sampler, decode=decode, spec=spec, collate=how)
    made = batch_of(feed, request_of(3))["x"]
    assert (made if how == "stack" else made.values).shape[-1] == 3
    with pytest.raises(DecodeError, match=r"shape \(2, 3\), but \(.*2\).*with 'pad'"):
        batch_of(feed, request_of(2, 3))
    empty = batch_of(feed, request_of())["x"]
    assert (empty if how == "stack" else empty.values).shape[-1] == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_spec_comes_from_first_sample_of_the_stream(index: Index, rank: int) -> None:
    """Record 0 is broken. All ranks take the spec from the first sample of the whole stream."""
    tried: list[bytes] = []

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        tried.append(sample["word"])
        return {"x": {b"be": 1, b"or": 2, b"not": 3}[sample["word"]]}

    sampler = ExactOnceBatchSampler(len(index), batch_size=2, records=[1, 2, 3])
    feed = Feed(index, sampler.shard(rank, 2), decode=decode)
    assert feed.spec == {"x": ((), np.int64)}
    assert set(tried) == {b"be", b"not"}  # the first sample, and the last of the last batch
    seen = [one for batch in NumpyLoader(feed) for one in batch["x"].tolist()]
    assert seen == [[1, 3], [2]][rank]
    assert b"to" not in tried


def test_empty_stream_has_the_spec_of_record_0(index: Index) -> None:
    sampler = ExactOnceBatchSampler(len(index), batch_size=2, records=[])
    assert Feed(index, sampler, decode=lambda one: {"x": len(one["word"])}).spec.keys() == {"x"}


@pytest.mark.parametrize("own", [False, True])
def test_spec_makes_reading_record_0_unnecessary(tmp_path: Path, own: bool) -> None:
    """As on a machine that has the shards of its rank alone."""
    images = []
    for value in (1, 2):
        file = io.BytesIO()
        Image.new("RGB", (2, 2), (value,) * 3).save(file, "png")
        images.append({"x": file.getvalue()})
    two = pack(images, tmp_path, shard_records=1)["data"]
    min(tmp_path.glob("*.tfrecord")).unlink()
    decode: Any = DecodeImage("x") if own else DecodeImage("x").__call__
    sampler = BatchSampler(SequentialSampler(2), batch_size=1)
    spec = {"x": FieldSpec((2, 2, 3), np.dtype(np.uint8))}
    batch = Feed(two, sampler, decode=decode, spec=spec)[0, 1]
    assert batch["x"].max() == 2
    with pytest.raises(FileNotFoundError):
        Feed(two, sampler, decode=decode)[0, 1]


def test_lists_of_strings_may_start_with_an_empty_list(tmp_path: Path) -> None:
    """The index knows what they hold; a decode may hand them on."""
    tags = [np.array([b"a\0", b"b"][: n % 3], object) for n in range(9)]
    index = pack([{"tags": one} for one in tags], tmp_path)["data"]
    for seed in range(8):
        sampler = BatchSampler(RandomSampler(9, seed=seed), batch_size=9)
        for options in ({}, {"decode": dict}, {"decode": dict, "transform": dict}):
            feed: Any = Feed(index, sampler, collate={"tags": "ragged"}, **options)  # type: ignore[arg-type]
            found = feed[0, 0]
            wanted = [one for record in found["id"] for one in tags[record].tolist()]
            assert found["tags"].values.tolist() == wanted
    rows = DatasetSource([{"tags": one.tolist()} for one in tags])
    with pytest.raises(DecodeError, match=r"'ragged', and needs spec= if the first list is empty"):
        Feed(rows, BatchSampler(SequentialSampler(9), batch_size=9), collate="ragged")[0, 0]
    spec = {"tags": FieldSpec((None,), None)}
    assert len(Feed(rows, sampler, collate="ragged", spec=spec)[0, 0]["tags"].values) == 9
