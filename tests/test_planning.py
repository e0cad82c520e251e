"""The plan: what an epoch asks of its store, and what a cache would hold of it."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinfeed.loaders import Feed, Index, Plan, _system, pack, plan, planning, shuffled
from twinfeed.loaders.planning import found_again
from twinfeed.loaders.reading._fetch import REMOTE_GAP
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    Order,
    RandomSampler,
    ReuseSampler,
    SequentialSampler,
    ShardShuffleSampler,
)

RECORD = REMOTE_GAP + 1000
COUNT = 400


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Records that are never merged with any but a neighbour."""
    samples = ({"x": bytes(RECORD)} for _ in range(COUNT))
    return pack(samples, tmp_path_factory.mktemp("plan"), shard_records=100)["data"]


def planned(index: Index, order: Order, **options: Any) -> Plan:
    size = options.pop("batch_size", 10)
    return plan(Feed(index, BatchSampler(order, batch_size=size)), **options)


def test_blocks_are_few_requests_and_random_records_many(index: Index) -> None:
    order = ShardShuffleSampler(index.shard_lengths, seed=0, block=20, window=4)
    blocks = planned(index, order)
    single = planned(index, RandomSampler(COUNT, seed=0))
    assert blocks.batches == single.batches == 40
    assert blocks.samples == COUNT
    assert blocks.used_bytes == COUNT * RECORD
    assert 10 <= blocks.requests <= 20 < 250 < single.requests <= COUNT
    assert 1 <= blocks.amplification < 1.01
    assert 1 <= single.amplification < 1.3
    ahead = int(index.shards["bytes"].sum())  # less than is asked for ahead
    assert 4 * 20 * RECORD <= blocks.held_bytes - ahead <= 6 * 20 * RECORD
    assert single.held_bytes == ahead + RECORD
    assert blocks.exact


def test_reused_images_are_read_once_and_held_while_they_live(index: Index) -> None:
    reused = planned(index, ReuseSampler(COUNT, reuse=4, live=20, seed=0))
    assert reused.samples == 4 * COUNT
    assert reused.used_bytes == COUNT * RECORD
    assert COUNT * RECORD <= reused.read_bytes <= 1.2 * COUNT * RECORD
    assert 15 * RECORD <= reused.held_bytes - int(index.shards["bytes"].sum()) <= 24 * RECORD


def test_a_long_epoch_is_reckoned_from_a_part(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = ShardShuffleSampler(index.shard_lengths, seed=0, block=4, window=4)
    feed = Feed(index, BatchSampler(order, batch_size=10), readahead=1)
    whole = plan(feed, cache_bytes=100 * RECORD)
    monkeypatch.setattr(planning, "_MOST", COUNT // 2)
    part = plan(feed, cache_bytes=100 * RECORD)
    assert not part.exact
    assert part.samples == COUNT
    assert part.read_bytes == pytest.approx(whole.read_bytes, rel=0.2)
    assert part.requests == pytest.approx(whole.requests, rel=0.2)
    assert part.cache_hits == pytest.approx(0.25)
    assert part.cache_hits < whole.cache_hits < 1
    assert "about " in str(part)
    assert "at least 25%" in str(part)


@cache
def best(units: tuple[int, ...], place: int, held: frozenset[int], room: int, since: int) -> int:
    """The most hits of any cache from a place on, by trying everything."""
    if place == len(units):
        return 0
    hit = units[place] in held and place >= since
    after = held | {units[place]}
    some = [frozenset(after)] if len(after) <= room else [after - {one} for one in after]
    return hit + max(best(units, place + 1, frozenset(one), room, since) for one in some)


@settings(max_examples=60, deadline=None)
@given(
    first=st.lists(st.integers(0, 4), max_size=5),
    second=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    room=st.integers(0, 4),
)
def test_the_hits_are_those_of_the_best_cache(
    first: list[int], second: list[int], room: int
) -> None:
    found = found_again(
        np.array(first, np.int64), np.array(second, np.int64), np.ones(len(second)), room
    )
    most = best((*first, *second), 0, frozenset(), room, len(first))
    # The cache keeps what comes again in the first part too: no cache that is best for the whole
    # has fewer hits in all, and one that is best for the second part alone may have more there.
    assert found * len(second) <= most + 1e-9
    if not len(set(first)) < len(first):
        assert found * len(second) == pytest.approx(most)


def test_an_evaluation_in_order_finds_what_fits(index: Index) -> None:
    feed = Feed(index, ExactOnceBatchSampler(COUNT, batch_size=10))
    assert plan(feed, cache_bytes=COUNT * RECORD).cache_hits == 1
    assert plan(feed, cache_bytes=COUNT * RECORD // 2).cache_hits == pytest.approx(0.5, abs=0.01)
    assert plan(feed).cache_hits == 0


def test_ranks_that_read_every_block_are_told_of_sections(index: Index) -> None:
    def rank(sections: int) -> Plan:
        order = ShardShuffleSampler(
            index.shard_lengths, seed=0, block=10, window=4, sections=sections
        )
        return plan(Feed(index, BatchSampler(order, batch_size=8).shard(0, 2)))

    together, apart = rank(1), rank(2)
    assert together.amplification == pytest.approx(2, rel=0.1)
    assert "take sections= that 2 divides" in " ".join(together.advice)
    assert apart.amplification < 1.2
    assert not apart.advice


def test_small_random_reads_of_large_data_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = pack([{"x": bytes(900)} for _ in range(5000)], tmp_path, shards=50)["data"]
    order = RandomSampler(5000, seed=0)
    feed = Feed(small, BatchSampler(order, batch_size=10), readahead=1)
    assert not plan(feed).advice
    monkeypatch.setattr(_system, "memory", lambda: 1 << 20)
    advice = plan(feed).advice
    assert "take shuffled(index, seed=…)" in advice[0]
    monkeypatch.setattr(_system, "memory", lambda: 1 << 36)
    monkeypatch.setattr(planning, "is_url", lambda root: True)
    assert "take shuffled(index, seed=…)" in plan(feed).advice[0]
    blocks = Feed(small, BatchSampler(shuffled(small, seed=0), batch_size=10))
    assert not plan(blocks).advice  # of so little data blocks cannot be long
    monkeypatch.setattr(planning, "_LITTLE", 0)
    told = plan(blocks)
    assert told.requests < 250
    assert "take blocks of about 4 MB, and shards of many blocks" in told.advice[0]


def test_more_than_memory_at_once_is_warned_of(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = ShardShuffleSampler(index.shard_lengths, seed=0, block=20, window=20)
    monkeypatch.setattr(_system, "memory", lambda: 1 << 26)
    assert any("take a smaller window" in one for one in planned(index, order).advice)


def test_nothing_is_nothing(index: Index) -> None:
    feed = Feed(index, ExactOnceBatchSampler(COUNT, batch_size=10), fields=())
    assert (plan(feed).requests, plan(feed).read_bytes) == (0, 0)
    none = Feed(index, ExactOnceBatchSampler(COUNT, batch_size=10, records=np.zeros(0, np.int64)))
    assert plan(none, cache_bytes=5).samples == 0
    with pytest.raises(ValueError, match="cache_bytes must be at least 0"):
        plan(feed, cache_bytes=-1)
    assert planned(index, SequentialSampler(COUNT)).requests <= 10
