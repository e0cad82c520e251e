"""Batches: their fields, padding, threads and caches."""

import pickle
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.batches import made
from support.feeds import batch_of, measure, request_of
from support.inside import batcher_of

from twinfeed.loaders import (
    Feed,
    Index,
    Pad,
    pack,
)
from twinfeed.loaders.reading.prefetch.schedule import Request
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    RandomSampler,
    ReuseSampler,
    WeightedSampler,
)


def test_batch_without_callables_has_ids_columns_and_fields(
    index: Index, sampler: ExactOnceBatchSampler
) -> None:
    batch = batch_of(Feed(index, sampler), Request.of(sampler, 0, 1))
    assert list(batch) == ["id", "label", "word"]
    assert batch["id"].tolist() == [4, 5]
    assert batch["label"].tolist() == [1, 2]
    assert batch["word"] == [b"to", b"be"]


@pytest.fixture(scope="module")
def repeating() -> BatchSampler:
    """A sampler whose batches may hold a record several times."""
    return BatchSampler(WeightedSampler([1] * 6, seed=0), batch_size=4)


@pytest.mark.parametrize("threads", [0, 3])
def test_decode_runs_once_for_each_record_of_a_batch(
    index: Index, repeating: BatchSampler, threads: int
) -> None:
    calls: Counter[bytes] = Counter()

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        calls[sample["word"]] += 1
        return measure(sample)

    feed = Feed(index, repeating, decode=decode)
    assert feed.spec
    calls.clear()
    batch = batch_of(feed, request_of(3, 2, 3, 3), threads)
    assert batch["size"].tolist() == [3, 2, 3, 3]
    assert batch["size"].dtype == np.int32
    assert calls == {b"not": 1, b"or": 1}


def test_decoding_threads_are_reused_for_every_batch(
    index: Index, sampler: ExactOnceBatchSampler
) -> None:
    """Threads made anew for each batch cost more than what they do."""
    seen = set()

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        seen.add(threading.current_thread())
        return measure(sample)

    feed = Feed(index, sampler, decode=decode)
    assert feed.spec
    seen.clear()
    with batcher_of(feed, threads=2) as batcher:
        for _ in range(5):
            batcher(request_of(0, 1, 2, 3))
    assert 1 <= len(seen) <= 2


@pytest.mark.parametrize("decode", [None, measure])
def test_an_empty_batch_has_every_field(
    index: Index, sampler: ExactOnceBatchSampler, decode: Any
) -> None:
    feed = Feed(index, sampler, decode=decode, side={"weight": np.zeros((6, 2), np.float32)})
    full, empty = batch_of(feed, request_of(1, 2)), batch_of(feed, request_of())
    assert list(empty) == list(full)
    for name, value in empty.items():
        if isinstance(value, list):
            assert value == []
        else:
            assert (value.shape, value.dtype) == ((0, *full[name].shape[1:]), full[name].dtype)


@pytest.mark.parametrize("decode", [None, measure])
def test_padding_is_zeros_and_bytes_of_the_first_record(index: Index, decode: Any) -> None:
    sampler = ExactOnceBatchSampler(6, batch_size=4, last_batch="pad")
    batch = batch_of(Feed(index, sampler, decode=decode), Request.of(sampler, 0, 1))
    assert batch["id"].tolist() == [4, 5, -1, -1]
    assert batch["mask"].tolist() == [True, True, False, False]
    assert batch["label"].tolist() == [1, 2, 0, 0]
    if decode is None:
        assert batch["word"] == [b"to", b"be", b"to", b"to"]
    else:
        assert batch["size"].tolist() == [2, 2, 0, 0]


@pytest.mark.parametrize("how", ["pad", "ragged", Pad(value=9), {"numbers": Pad(value=9)}])
def test_padding_has_the_pad_value_and_no_values(how: Any) -> None:
    """And a batch of padding alone has the bytes of the stream's first record."""
    lengths = [3, 1, 2, 2, 1]
    data = {"numbers": [np.ones(n) for n in lengths], "word": [b"%d" % n for n in lengths]}
    sampler = ExactOnceBatchSampler(5, batch_size=4, last_batch="pad", records=[1, 2, 3])
    how = how if isinstance(how, dict) else {"numbers": how}
    padding = Feed(data, sampler.shard(3, 4), collate=how)[0, 0]
    assert (padding["mask"].tolist(), padding["word"]) == ([False], [b"1"])
    whole = Feed(data, sampler, collate=how)[0, 0]
    assert whole["mask"].tolist() == [True, True, True, False]
    assert whole["word"] == [b"1", b"2", b"2", b"1"]
    if how["numbers"] == "ragged":
        assert whole["numbers"].lengths.tolist() == [1, 2, 2, 0]
    else:
        fill = 0 if how["numbers"] == "pad" else 9
        assert whole["numbers"].tolist() == [[1, fill], [1, 1], [1, 1], [fill, fill]]
        assert whole["numbers_length"].tolist() == [1, 2, 2, 0]


def test_batcher_pickles_without_the_sampler(tmp_path: Path) -> None:
    """Workers need no copy of the labels."""
    many = pack([{"x": bytes(1), "label": n % 9} for n in range(3)], tmp_path)
    few = Feed(many["data"], BatchSampler(RandomSampler(3, seed=0), batch_size=1))
    sampler = BatchSampler(WeightedSampler(np.arange(1, 4), seed=0), batch_size=1)
    sizes = [len(pickle.dumps(batcher_of(feed))) for feed in (few, Feed(many["data"], sampler))]
    assert b"samplers" not in pickle.dumps(batcher_of(few))
    assert abs(sizes[0] - sizes[1]) < 200


@pytest.mark.parametrize(("reuse", "live"), [(3, 4), (2, 8), (5, 20), (1, 4)])
def test_reuse_sampler_decodes_each_record_once_while_live(
    tmp_path: Path, reuse: int, live: int
) -> None:
    n = 21
    index = pack([{"number": bytes([number])} for number in range(n)], tmp_path)["data"]
    sampler = BatchSampler(ReuseSampler(n, reuse=reuse, live=live, seed=0), batch_size=4)
    feed = Feed(index, sampler, decode=lambda sample: {"number": sample["number"][0]})
    batcher = batcher_of(feed)
    cache = batcher.cache
    assert cache is not None
    for epoch in range(3):
        before = cache.decodes
        for step in range(len(sampler)):
            batch = batcher(Request.of(sampler, epoch, step))
            assert batch["number"].tolist() == sampler.records(batch["id"]).tolist()
        assert n <= cache.decodes - before <= n + live - 1
    assert cache.peak <= live


@pytest.mark.usefixtures("readahead")
def test_passes_over_one_reuse_feed_have_separate_caches(index: Index) -> None:
    """Two passes that take turns would drop each other's images."""
    decoded = []

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        decoded.append(sample["word"])
        return measure(sample)

    sampler = BatchSampler(ReuseSampler(6, reuse=3, live=4, seed=0), batch_size=2)
    feed = Feed(index, sampler, decode=decode)
    assert feed.spec
    decoded.clear()
    list(made(feed))
    alone = len(decoded)
    decoded.clear()
    for _ in zip(made(feed), made(feed), strict=True):
        pass
    assert len(decoded) == 2 * alone


def test_padding_id_stays_minus_one_when_transform_returns_ids(index: Index) -> None:
    sampler = ExactOnceBatchSampler(6, batch_size=4, last_batch="pad")
    feed = Feed(index, sampler, transform=lambda sample: sample)
    assert batch_of(feed, Request.of(sampler, 0, 1))["id"].tolist() == [4, 5, -1, -1]


def test_numbers_have_native_byte_order(index: Index, sampler: ExactOnceBatchSampler) -> None:
    side = {"weight": np.arange(6, dtype=">f4")}
    feed = Feed(index, sampler, decode=lambda _: {"x": np.ones(2, ">i4")}, side=side)
    batch = batch_of(feed, request_of(2))
    assert batch["x"].dtype.isnative
    assert batch["weight"].dtype.isnative
    assert (batch["x"].tolist(), batch["weight"].tolist()) == ([[1, 1]], [2.0])
