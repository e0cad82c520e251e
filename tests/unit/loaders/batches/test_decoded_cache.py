"""The cache of decoded images: each decoded once, before its batch, and few more kept than live."""

import pickle
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.batches import made
from support.threads import started_threads

from twinfeed.loaders import DecodeError, Feed, Index, NumpyLoader, pack
from twinfeed.loaders.batches._decoded_cache import DecodedCache, Fields
from twinfeed.loaders.reading.prefetch.schedule import Request, Schedule
from twinfeed.samplers import BatchSampler, ReuseSampler

N = 21


def decode(records: list[int]) -> list[Fields]:
    return [{"image": record} for record in records]


def asked(position: tuple[int, int], records: list[int], use: int) -> Request:
    ids = np.array(records, np.int64)
    return Request(*position, ids, ids, np.full_like(ids, use), np.zeros(len(ids), np.uint64))


def test_image_is_decoded_once_for_all_its_uses() -> None:
    cache = DecodedCache(3, decode)
    for use in range(3):
        batch = cache.get(asked((0, use), [4, 9], use))
        assert [sample["image"] for sample in batch] == [4, 9]
    assert (cache.decodes, cache.peak, len(cache)) == (2, 2, 0)


def test_seek_empties_the_cache() -> None:
    cache = DecodedCache(3, decode)
    cache.get(asked((0, 0), [4], 0))
    cache.get(asked((0, 5), [9], 1))
    assert (cache.decodes, len(cache)) == (2, 1)


def test_new_epoch_empties_the_cache() -> None:
    """An image that a segment boundary cuts has its first uses at an epoch's end; nothing stays."""
    cache = DecodedCache(2, decode)
    cache.get(asked((0, 0), [4], 0))
    cache.get(asked((1, 0), [9], 0))
    assert len(cache) == 1


@pytest.mark.parametrize("batches_per_epoch", [100, 25, 1])
def test_cache_holds_live_images_in_parts_of_an_epoch(batches_per_epoch: int) -> None:
    order = ReuseSampler(100, reuse=4, live=8, seed=0)
    sampler = BatchSampler(order, batch_size=4, batches_per_epoch=batches_per_epoch)
    cache = DecodedCache(4, decode)
    for epoch in range(300 // batches_per_epoch):
        for request in Schedule(sampler).requests(epoch):
            cache.get(request)
    assert cache.peak <= 8


def test_cache_pickles_empty() -> None:
    cache = DecodedCache(3, decode)
    cache.get(asked((0, 0), [4], 0))
    copy = pickle.loads(pickle.dumps(cache))
    assert (len(copy), copy.decodes) == (0, 0)
    assert copy.get(asked((0, 0), [4], 2)) == [{"image": 4}]
    assert len(copy) == 0


# Ahead of the batch


def reusing(reuse: int, live: int, batch_size: int = 4) -> BatchSampler:
    return BatchSampler(ReuseSampler(N, reuse=reuse, live=live, seed=0), batch_size=batch_size)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    samples = [{"number": bytes([number])} for number in range(N)]
    return pack(samples, tmp_path_factory.mktemp("numbers"))["data"]


def number(sample: dict[str, Any]) -> dict[str, Any]:
    return {"number": sample["number"][0]}


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("reuse", "live"), [(3, 4), (2, 8), (5, 20), (1, 4)])
def test_cache_holds_few_more_images_than_live(
    reuse: int, live: int, threads: int, start: int
) -> None:
    sampler = reusing(reuse, live)
    decoded: list[int] = []

    def noted(records: list[int]) -> list[Fields]:
        decoded.extend(records)
        return decode(records)

    plain, cache = DecodedCache(reuse, decode), DecodedCache(reuse, noted)
    cache.start_decoding(Schedule(sampler).requests(1, start), threads=threads)
    for request in Schedule(sampler).requests(1, start):
        assert cache.get(request) == plain.get(request)
        assert len(decoded) - cache.decodes <= threads - 1 + sampler.batch_size
    cache.close()
    assert len(decoded) == cache.decodes == plain.decodes
    assert cache.peak <= live + threads - 1 + sampler.batch_size
    assert started_threads() == []


def test_cache_holds_at_most_one_extra_image_per_thread() -> None:
    cache = DecodedCache(12, decode)
    sampler = reusing(12, 4)
    coming = Schedule(sampler).requests(0)
    new = [len(set(b.records) - set(a.records)) for a, b in pairwise(coming)]
    assert max(new) == 1
    cache.start_decoding(Schedule(sampler).requests(0), threads=2)
    for request in Schedule(sampler).requests(0):
        cache.get(request)
    cache.close()
    assert cache.peak <= 4 + 2


def test_image_is_decoded_before_its_batch_is_requested() -> None:
    """While the loop computes on the batches before."""
    third = threading.Event()

    def noted(records: list[int]) -> list[Fields]:
        if 3 in records:
            third.set()
        return decode(records)

    cache = DecodedCache(1, noted)
    coming = [asked((0, step), [step], 0) for step in range(9)]
    cache.start_decoding(iter(coming), threads=2)
    for request in coming[:2]:
        cache.get(request)
    assert third.wait(60)
    cache.close()


def test_search_for_next_image_is_bounded() -> None:
    """A search without end would draw the rest of an epoch before the second batch."""
    drawn = 0

    def coming() -> Iterator[Request]:
        nonlocal drawn
        for drawn in range(10**5):
            yield asked((0, drawn), [4], min(drawn, 1))

    cache = DecodedCache(10**9, decode)
    cache.start_decoding(coming(), threads=1)
    cache.get(asked((0, 0), [4], 0))
    assert drawn < 1000
    cache.close()


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_decode_error_is_raised_at_its_batch(index: Index, threads: int) -> None:
    sampler = reusing(5, 4)
    ids = [set(sampler.records(one).tolist()) for one in sampler.batches(0, 0, len(sampler))]
    record = next(iter(ids[len(ids) // 2] - set.union(*ids[: len(ids) // 2])))

    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["number"][0] == record:
            raise RuntimeError("no image")
        return number(sample)

    loader = NumpyLoader(Feed(index, sampler, decode=fail), threads=threads)
    with pytest.raises(DecodeError, match=rf"record {record} .*decode failed.*no image"):
        list(loader)
    assert loader.step == len(ids) // 2
    assert started_threads() == []


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_alternating_passes_each_decode_what_they_need(index: Index, threads: int) -> None:
    """Also if a pass is left early: its threads end, and its images are gone."""
    decoded = []

    def noted(sample: dict[str, Any]) -> dict[str, Any]:
        decoded.append(sample["number"][0])
        return number(sample)

    feed = Feed(index, reusing(5, 4), decode=noted)
    assert feed.spec
    decoded.clear()
    alone = [batch["number"].tolist() for batch in made(feed)]
    needed = len(decoded)
    decoded.clear()
    one, other, left = (NumpyLoader(feed, threads=threads) for _ in range(3))
    for expected, first, second in zip(alone, one, other, strict=True):
        assert first["number"].tolist() == second["number"].tolist() == expected
    ahead = 4 * (one.prefetch + 1) + threads + 4  # images of the next epoch
    assert 2 * needed <= len(decoded) <= 2 * (needed + ahead)
    one.close()
    other.close()
    for _ in left:
        break
    left.close()
    assert started_threads() == []
