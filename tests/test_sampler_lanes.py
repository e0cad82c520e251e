"""Lanes, and what stands on them: the shard-aware shuffle and the reuse of decoded records."""

from __future__ import annotations

import numpy as np
import pytest
import sampler_slow as slow
from hypothesis import given, settings
from hypothesis import strategies as st

from twinfeed.samplers import BatchSampler, ReuseSampler, ShardShuffleSampler
from twinfeed.samplers._lanes import Lanes, equal_bounds

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any)


def _whole(order: ShardShuffleSampler, epoch: int = 0) -> np.ndarray:
    """Return an epoch of an order."""
    return order.ids(epoch, np.arange(len(order)))


def _blocks_of(ids: np.ndarray, lengths: list[int], block: int) -> np.ndarray:
    """Return the block of each record: shard by shard, by consecutive records."""
    shard = np.repeat(np.arange(len(lengths)), lengths)
    within = np.concatenate([np.arange(n) for n in lengths])
    _, number = np.unique(np.stack([shard, within // block]), axis=1, return_inverse=True)
    return number.reshape(-1)[ids]


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7), data=st.data())
def test_lanes_emit_every_place_round_by_round(lengths: list[int], data: st.DataObject) -> None:
    """A round holds the next place of each lane that has one left; nothing else, nothing twice."""
    starts = np.array([data.draw(st.integers(0, n - 1)) for n in lengths])
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    for renew in (False, True):
        lanes = Lanes(bounds, starts, key=9, renew=renew)
        found = lanes.places(np.arange(sum(lengths))).tolist()
        for turn in range(max(lengths)):
            expected = {
                bounds[lane] + (turn - starts[lane]) % n
                for lane, n in enumerate(lengths)
                if turn < n
            }
            assert set(found[: len(expected)]) == expected
            del found[: len(expected)]


@given(size=st.integers(0, 1000), lanes=st.integers(1, 40))
def test_equal_bounds_differ_by_one_the_shorter_first(size: int, lanes: int) -> None:
    """Lengths are within one, do not fall, and sum to the whole."""
    lengths = np.diff(equal_bounds(size, lanes))
    assert lengths.sum() == size
    assert np.ptp(lengths) <= 1
    assert (np.diff(lengths) >= 0).all()


@settings(max_examples=120, deadline=None)
@given(
    lengths=LENGTHS,
    block=st.integers(1, 20),
    window=st.integers(1, 12),
    stored=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_shard_shuffle_is_a_permutation_that_reads_blocks_once(
    lengths: list[int], block: int, window: int, stored: bool, epoch: int
) -> None:
    """Laws 2 and 8: each record once; with W blocks held, at most W - 1 are read again."""
    order = ShardShuffleSampler(
        lengths,
        seed=1,
        block=block,
        window=window,
        order_within="stored" if stored else "random",
    )
    ids = _whole(order, epoch)
    assert np.array_equal(np.sort(ids), np.arange(sum(lengths)))
    blocks = _blocks_of(ids, lengths, block)
    assert len(slow.decodes(blocks.tolist(), window)) <= len(set(blocks.tolist())) + window - 1


@pytest.mark.parametrize("window", [1, 8, 16, 64])
@pytest.mark.parametrize("lengths", [[1000] * 64, [50_000, 7, 14_000], [977] * 60])
def test_shard_shuffle_has_no_seam(lengths: list[int], window: int) -> None:
    """Law 10: any W consecutive outputs come from 0.9 of the mean of blocks, the tail excepted."""
    order = ShardShuffleSampler(lengths, seed=1, block=100, window=window)
    ids = _whole(order)
    blocks = _blocks_of(ids, lengths, 100)
    seen = np.lib.stride_tricks.sliding_window_view(blocks, window)
    distinct = 1 + (np.diff(np.sort(seen, axis=1), axis=1) > 0).sum(axis=1)
    body = len(ids) - window * 2 * 100
    assert distinct[:body].min() >= 0.9 * distinct.mean()
    assert body > 0.75 * len(ids)


def test_lanes_change_blocks_one_by_one() -> None:
    """With equal shards and blocks, no stretch of outputs opens a burst of new blocks."""
    order = ShardShuffleSampler([1000] * 64, seed=1, block=100, window=16)
    blocks = _blocks_of(_whole(order), [1000] * 64, 100)
    _, first = np.unique(blocks, return_index=True)
    opened = np.histogram(first, bins=np.arange(0, 64_001, 320))[0][1:]
    assert opened.mean() == pytest.approx(3.1, abs=0.1)
    assert opened.max() <= 10


def test_records_of_a_block_are_shuffled_or_stay_in_stored_order() -> None:
    """``order_within`` decides about the inside of a block alone."""
    for within in ("stored", "random"):
        order = ShardShuffleSampler([400] * 5, seed=1, block=50, window=1, order_within=within)
        steps = np.diff(_whole(order).reshape(-1, 50), axis=1)
        assert (steps == 1).all() == (within == "stored")


def test_one_block_is_uniform_and_one_lane_is_sequential_by_block() -> None:
    """The two ends of the knob."""
    uniform = _whole(ShardShuffleSampler([5000], seed=1, block=1, window=64))
    assert np.abs(uniform - np.arange(5000)).mean() == pytest.approx(5000 / 3, rel=0.05)
    sequential = ShardShuffleSampler([5000], seed=1, block=5000, window=64, order_within="stored")
    assert np.array_equal(_whole(sequential), np.arange(5000))
    assert uniform.dtype == sequential.ids(0, np.empty(0, np.int64)).dtype == np.int64


@pytest.mark.parametrize("sections", [2, 4, 8])
@pytest.mark.parametrize("lengths", [[1000] * 20, [777, 3, 9000, 4100]])
def test_ranks_read_blocks_of_their_own(sections: int, lengths: list[int]) -> None:
    """Where world_size divides sections, no two ranks read a block, the end of an epoch apart."""
    order = ShardShuffleSampler(lengths, seed=1, block=64, window=16, sections=sections)
    stream = BatchSampler(order, batch_size=16)
    for epoch in (0, 1):
        short = int(np.diff(order._table(epoch).sections).min()) // (16 // sections)
        left = sum(lengths) - short * 16
        assert left <= 2 * 64 * sections
        for world_size in [w for w in (2, 4, 8) if sections % w == 0]:
            blocks = [
                set(_blocks_of(np.concatenate(rank.batches(epoch, 0, short)), lengths, 64).tolist())
                for rank in (stream.shard(r, world_size) for r in range(world_size))
            ]
            assert sum(map(len, blocks)) == len(set().union(*blocks))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), batch=st.integers(1, 6), reuse=st.integers(1, 15))
def test_reuse_keeps_few_live_and_brings_new_ones_steadily(
    data: st.DataObject, batch: int, reuse: int
) -> None:
    """Every use once; no record twice in a batch; L live; decodes n + L - 1; no bursts."""
    live = batch * data.draw(st.integers(1, 5))
    n = data.draw(st.integers(live, 8 * live))
    sampler = BatchSampler(ReuseSampler(n, reuse=reuse, live=live, seed=n), batch_size=batch)
    for epoch in (0, 1):
        batches = sampler.batches(epoch, 0, len(sampler))
        ids = np.concatenate(batches)
        assert np.array_equal(np.sort(ids), np.arange(n * reuse))
        assert all(len(np.unique(sampler.records(b))) == len(b) for b in batches)
        loads, most = slow.decodes_by_use(
            sampler.records(ids).tolist(), sampler.views(ids).tolist(), reuse
        )
        assert most <= live
        assert len(loads) <= n + live - 1
        each_round = np.histogram(loads, bins=np.arange(0, n * reuse + live, live))[0][1:]
        assert each_round.max(initial=0) <= 2 * -(-live // reuse) + 1


def test_uses_are_numbered_in_the_order_they_come() -> None:
    """Records that are not met at both ends of the epoch show use 0, 1, 2 … in turn."""
    sampler = BatchSampler(ReuseSampler(60, reuse=4, live=20, seed=0), batch_size=5)
    ids = np.concatenate(sampler.batches(0, 0, len(sampler)))
    in_order = sum(
        sampler.views(ids[sampler.records(ids) == record]).tolist() == [0, 1, 2, 3]
        for record in range(60)
    )
    assert in_order >= 60 - 19


def test_reuse_of_one_is_an_epoch_of_a_shuffle() -> None:
    """With one use each, it is a permutation."""
    sampler = BatchSampler(ReuseSampler(20, reuse=1, live=8, seed=0), batch_size=4)
    ids = np.concatenate(sampler.batches(0, 0, len(sampler)))
    assert np.array_equal(np.sort(ids), np.arange(20))
    assert sampler.live == 8


def test_a_drawing_names_records_and_uses() -> None:
    """``explain`` writes record.use where a sampler has uses, and columns for ranks."""
    sampler = BatchSampler(ReuseSampler(4, reuse=2, live=2, seed=0), batch_size=2)
    rows = [row.split() for row in sampler.explain(steps=2, world_size=2).splitlines()[2:]]
    for step, row in enumerate(rows):
        ids = sampler.batch(0, step)
        pairs = zip(sampler.records(ids), sampler.views(ids), strict=True)
        assert row == [str(step), *(f"{record}.{use}" for record, use in pairs)]
