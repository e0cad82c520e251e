"""Segments, and the samplers that use them: the shard-aware shuffle and the reuse sampler."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import sampler_definitions as slow
from support.cases import mark_long

from twinfeed.samplers import BatchSampler, ReuseSampler, ShardShuffleSampler, diagnose
from twinfeed.samplers.drawing import blocks
from twinfeed.samplers.drawing.round_robin import (
    RoundRobin,
    ShuffledRoundRobin,
    desynchronized_bounds,
    equal_bounds,
)

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


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7), data=st.data())
def test_segments_emit_every_position_round_by_round(
    lengths: list[int], data: st.DataObject
) -> None:
    """A round has the next place of each segment that is not empty; nothing else, nothing twice."""
    starts = np.array([data.draw(st.integers(0, n - 1)) for n in lengths])
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(sum(lengths))
    constant, keys = RoundRobin(bounds, np.array([8, 9], np.uint64)), np.ones_like(positions)
    for start, found in (
        (starts, ShuffledRoundRobin(bounds, starts, key=9).indices_at(positions).tolist()),
        (np.zeros_like(starts), constant.indices_at(keys, positions).tolist()),
    ):
        for turn in range(max(lengths)):
            expected = {
                bounds[segment] + (turn - start[segment]) % n
                for segment, n in enumerate(lengths)
                if turn < n
            }
            assert set(found[: len(expected)]) == expected
            del found[: len(expected)]


@settings(max_examples=200)
@given(
    blocks=st.integers(1, 600), segments=st.integers(1, 70), block=st.integers(1, 9), data=st.data()
)
def test_constant_segments_end_together_and_stagger_their_blocks(
    blocks: int, segments: int, block: int, data: st.DataObject
) -> None:
    """Lengths differ by at most 1, or one of 16 segments is shorter, and all begin elsewhere."""
    size = blocks * block - data.draw(st.integers(0, block - 1))
    bounds = desynchronized_bounds(size, segments, block)
    lengths = np.diff(bounds)
    assert bounds[0] == 0
    assert bounds[-1] == size
    assert len(lengths) == segments
    assert np.ptp(lengths[:-1] if segments > 1 else lengths) <= 1
    if lengths.max() - lengths[-1] > 1:
        assert segments >= 16
        assert 2 * lengths[-1] >= lengths.max() - 1
        # No more segments start at the same offset of a block than must.
        offsets = np.sort(bounds[:-1] % block)
        assert np.diff(np.searchsorted(offsets, np.arange(block + 1))).max() <= -(
            -segments // block
        )


@given(size=st.integers(0, 1000), segments=st.integers(1, 40))
def test_equal_bounds_differ_by_one_the_shorter_first(size: int, segments: int) -> None:
    """Lengths are within one, do not fall, and sum to the whole."""
    lengths = np.diff(equal_bounds(size, segments))
    assert lengths.sum() == size
    assert np.ptp(lengths) <= 1
    assert (np.diff(lengths) >= 0).all()


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
    """Laws 2 and 8: each record once; with W blocks open, at most W - 1 are read again."""
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


BLOCK = 20
REGULAR = (10, 40, 49, 64, 100, 160, 333)  # blocks of an epoch


def _in_rows(order: ShardShuffleSampler, lengths: list[int], width: int) -> list[np.ndarray]:
    """Return the distinct blocks of each `width` consecutive outputs of each section."""
    sections = order._sections
    size = len(order) // sections
    ids = _whole(order)[: sections * size].reshape(size, sections)
    blocks = _blocks_of(ids, lengths, order.block)
    return [slow.distinct_in_a_row(blocks[:, one].tolist(), width) for one in range(sections)]


@pytest.mark.parametrize("sections", [1, 4])
@pytest.mark.parametrize("window", mark_long([1, 5, 16, 15, 17, 60], but_every=2))
@pytest.mark.parametrize(
    "lengths",
    [
        *([count * BLOCK] for count in REGULAR),
        *([count * BLOCK - 3] for count in REGULAR),
        [50 * BLOCK, 7, 14 * BLOCK],
        [95] * 12,
        [20, 33] * 40,
        list(range(1, 90)),
    ],
    ids=lambda lengths: f"{len(lengths)}-{sum(lengths)}",
)
def test_shard_shuffle_mixes_equally_at_both_ends(
    lengths: list[int], window: int, sections: int
) -> None:
    """Law 10: any W outputs in a row, the first and the last too, are of as many blocks as ever."""
    blocks = sum(-(-length // BLOCK) for length in lengths)
    if sections > 1 and blocks < 3 * sections:
        return
    for seed in range(2):
        order = ShardShuffleSampler(
            lengths, seed=seed, block=BLOCK, window=window * sections, sections=sections
        )
        width = len(order._segment_bounds) - 1
        assert width >= min(window, sum(lengths) // sections // (BLOCK + 2))
        least = 0.9 if blocks >= 3 * width * sections else 0.8
        for distinct in _in_rows(order, lengths, width):
            assert distinct.min() >= least * distinct.mean()
            if order._segment_bounds[1] >= BLOCK:  # no block is longer than a segment
                assert distinct.max() == width


def test_sorted_classes_are_mixed_equally_in_first_and_last_batch() -> None:
    """1,000 classes one after the other, batches of 128; 70,000 digits; with sections too."""
    for block, sections in ((256, 1), (1000, 1), (256, 8)):
        order = ShardShuffleSampler(
            [25_000] * 10, seed=0, block=block, window=128, sections=sections
        )
        found = diagnose(BatchSampler(order, batch_size=128), labels=np.arange(250_000) // 250)
        assert found.distinct["classes"].value > 120
        if sections == 1:  # else the last batch, which is smaller, has a part of each section
            assert found.worst["classes"][0].value >= 100
    digits = ShardShuffleSampler([70_000], seed=0, block=512, window=128)
    found = diagnose(BatchSampler(digits, batch_size=128), labels=np.arange(70_000) // 7000)
    assert found.worst["classes"][0].value >= 9


def test_segments_change_blocks_one_by_one() -> None:
    """With equal shards and blocks, blocks open one by one, every so many outputs."""
    for lengths, most in (([1000] * 64, 8), ([6400, 57_600], 5), ([640] * 100, 5)):
        order = ShardShuffleSampler(lengths, seed=1, block=80, window=16)
        blocks = _blocks_of(_whole(order), lengths, 80)
        _, first = np.unique(blocks, return_index=True)
        opened = np.histogram(first, bins=np.arange(0, 64_001, 320))[0][1:-9]
        assert opened.mean() == pytest.approx(4, abs=0.2)
        assert opened.max() <= most


@pytest.mark.parametrize("sections", [1, 2])
def test_first_round_reads_half_a_window_and_no_record_twice(sections: int) -> None:
    """What is read with the first batch, by the ranges that the order says: half of the blocks."""
    order = ShardShuffleSampler([10_000] * 8, seed=1, block=50, window=128, sections=sections)
    for epoch in (0, 3):
        ids = _whole(order, epoch)
        first, stop = order.spans(ids, epoch)
        assert ((first <= ids) & (ids < stop)).all()
        _, opened = np.unique(first, return_index=True)
        assert (stop - first)[opened].sum() == len(order)
        early = opened[opened < 128]
        assert len(early) == 128
        assert 128 * 50 * 0.4 <= (stop - first)[early].sum() <= 128 * 50 * 0.6
        # A range is read in one go: it is never left for longer than as many rounds.
        lasts = {range_: place for place, range_ in enumerate(first.tolist())}
        assert all(
            lasts[first[place]] - place <= 128 * (stop - first)[place] for place in opened.tolist()
        )


def test_records_of_a_block_are_shuffled_or_in_stored_order() -> None:
    """``order_within`` decides about the inside of a block alone."""
    for within in ("stored", "random"):
        order = ShardShuffleSampler([400] * 5, seed=1, block=50, window=1, order_within=within)
        steps = np.diff(_whole(order).reshape(-1, 50), axis=1)
        assert (steps == 1).all() == (within == "stored")


def test_one_block_is_uniform_and_one_segment_reads_block_by_block() -> None:
    """The two ends of the knob."""
    uniform = _whole(ShardShuffleSampler([5000], seed=1, block=1, window=64))
    assert np.abs(uniform - np.arange(5000)).mean() == pytest.approx(5000 / 3, rel=0.05)
    sequential = ShardShuffleSampler([5000], seed=1, block=5000, window=64, order_within="stored")
    assert np.array_equal(_whole(sequential), np.arange(5000))
    assert uniform.dtype == sequential.ids(0, np.empty(0, np.int64)).dtype == np.int64


@pytest.mark.parametrize("sections", [2, pytest.param(4, marks=pytest.mark.long), 8])
@pytest.mark.parametrize("lengths", [[1000] * 20, [777, 3, 9000, 4100]])
def test_ranks_read_mostly_their_own_blocks(sections: int, lengths: list[int]) -> None:
    """Where world_size divides sections, two ranks read the G - 1 blocks that bounds cut."""
    order = ShardShuffleSampler(lengths, seed=1, block=64, window=16, sections=sections)
    stream = BatchSampler(order, batch_size=16)
    full = sum(lengths) // 16
    sizes = [len(batch) for batch in stream.batches(0, 0, len(stream))]
    assert sizes == [16] * full + [sum(lengths) % 16] * (sum(lengths) % 16 > 0)
    for epoch in (0, 1):
        for world_size in [w for w in (2, 4, 8) if sections % w == 0]:
            blocks = [
                set(_blocks_of(np.concatenate(rank.batches(epoch, 0, full)), lengths, 64).tolist())
                for rank in (stream.shard(r, world_size) for r in range(world_size))
            ]
            assert sum(map(len, blocks)) <= len(set().union(*blocks)) + world_size - 1


@given(data=st.data(), batch=st.integers(1, 6), reuse=st.integers(1, 15))
def test_reuse_keeps_few_live_and_adds_new_ones_steadily(
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
    """Records that do not come at both ends of the epoch show use 0, 1, 2 … in turn."""
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
    assert sampler.traits.max_cached == 8


def test_explain_names_records_and_uses() -> None:
    """``explain`` writes record.use where a sampler has uses, and columns for ranks."""
    sampler = BatchSampler(ReuseSampler(4, reuse=2, live=2, seed=0), batch_size=2)
    rows = [row.split() for row in sampler.explain(num_steps=2, world_size=2).splitlines()[2:]]
    for step, row in enumerate(rows):
        ids = sampler.batch(0, step)
        pairs = zip(sampler.records(ids), sampler.views(ids), strict=True)
        assert row == [str(step), *(f"{record}.{use}" for record, use in pairs)]


@pytest.mark.parametrize("most", [pytest.param(1, marks=pytest.mark.long), 3, 16])
@given(lengths=LENGTHS, block=st.integers(1, 9), window=st.integers(1, 6), seed=st.integers(0, 9))
def test_blocks_beyond_the_table_are_found_by_arithmetic(
    most: int, lengths: list[int], block: int, window: int, seed: int
) -> None:
    """Without a table of all blocks the stream is the same, and so are the ranges it reads."""
    options = {"seed": seed, "block": block, "window": window}
    tabled = ShardShuffleSampler(lengths, **options)
    ids = [_whole(tabled, epoch) for epoch in (0, 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_MAX_ENTRIES", most)
        patch.setattr(blocks, "_CHUNK", 2)
        order = ShardShuffleSampler(lengths, **options)
        for epoch in (0, 1):
            assert np.array_equal(_whole(order, epoch), ids[epoch])
            for mine, theirs in zip(
                order.spans(ids[0], epoch), tabled.spans(ids[0], epoch), strict=True
            ):
                assert np.array_equal(mine, theirs)
