"""The first and the last step at which a stream uses each block of records.

A block is a range of consecutive records of a shard that are read around the same time.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.samplers import BatchStream
from twinfeed.samplers.drawing.int_arrays import ranges

_MAX_CHUNK, _FIRST_CHUNK = 1 << 13, 1 << 8
"""The number of samples that are drawn and examined in one call, at most and in the first call."""

NO_STEP = int(np.iinfo(np.int64).max)
"""A sentinel in place of a step: no use is known. It is larger than every step."""


class Block(NamedTuple):
    """A block of records, [first, stop), and the step that is the first to use it."""

    first: int
    stop: int
    first_step: int


class BlockUses:
    """Find the step that uses each block of a stream first (opens it), and the one that does last.

    A block is a range of records that are read around the same time. For a stream that does not
    read blocks, a block is an image or a single record. A block is open from its first use to its
    last. The last use is only known afterwards: a block is closed when `_idle_limit` samples in
    a row are of other blocks, and at the end of an epoch. If a closed block is used again, it opens
    again. Steps are global steps.

    >>> from twinfeed.samplers import BatchSampler, ShardShuffleSampler
    >>> order = ShardShuffleSampler([6], block=3, window=1, seed=0)
    >>> block_uses = BlockUses(Schedule(BatchSampler(order, batch_size=2)), 0)
    >>> len(block_uses.first_used_before(2)), block_uses.last_steps_before(2)
    (2, [(3, 1), (0, 2)])
    """

    def __init__(self, schedule: Schedule, step: int, /) -> None:
        self._schedule, self._sampler = schedule, schedule.sampler
        self._epoch_steps = max(1, len(self._sampler))
        size = max(1, self._sampler.batch_size)
        self._chunk_steps = max(1, _FIRST_CHUNK // size)
        self._max_chunk_steps = max(1, _MAX_CHUNK // size)
        self._next_step = step  # all steps before this one were examined
        self._num_samples = 0  # that were examined
        # Of each open block, by its first record: the block, its last step and its last sample.
        self._open_blocks: dict[int, tuple[Block, int, int]] = {}
        self._new_blocks: deque[Block] = deque()  # that `first_used_before` has not returned yet
        # A heap of closed blocks: (first step, first record, last step).
        self._closed_blocks: list[tuple[int, int, int]] = []

    def first_used_before(self, stop: int, /) -> list[Block]:
        """Return the blocks whose first use is before step `stop`, each with its first step.

        A block that an earlier call has returned is not returned again.
        """
        while self._next_step < stop:
            self._examine_chunk()  # appends the blocks that it finds to `_new_blocks`
        blocks = []
        while self._new_blocks and self._new_blocks[0].first_step < stop:
            blocks.append(self._new_blocks.popleft())
        return blocks

    def new_records_before(self, stop: int, /) -> tuple[Int64s, Int64s, Int64s]:
        """Return all records of the blocks whose first use is before step `stop`.

        The records of a block that an earlier call has returned are not returned again.

        Returns:
            Three arrays, int64[records]: the id of each record, the first step that uses its block,
            and the first record of its block.
        """
        blocks = np.array(self.first_used_before(stop), np.int64).reshape(-1, 3)
        first, end, first_step = blocks.T
        return ranges(first, end), np.repeat(first_step, end - first), np.repeat(first, end - first)

    def last_steps_before(self, stop: int, /) -> list[tuple[int, int]]:
        """Return the last step of the blocks whose first use is before step `stop`.

        The caller releases the bytes of a block after this step. For example, if the blocks are the
        records 0 to 2 and 3 to 5, and the steps of an epoch draw [3, 5], [4, 2] and [1, 0]:
        `last_steps_before(1)` returns [(3, 1)], since block 3 is used first in step 0 and last in
        step 1. A call of `last_steps_before(2)` after it returns [(0, 2)].

        No block is returned twice. A block is returned once it is closed: when `_idle_limit`
        samples in a row are of other blocks, or at the end of the epoch. If it is still open now, a
        later call returns it.

        Returns:
            A pair for each block: (its first record, the last step that uses it).
        """
        epoch_end = ((stop - 1) // self._epoch_steps + 1) * self._epoch_steps  # of step `stop` - 1
        size = self._sampler.batch_size
        # Draw `_idle_limit` samples from step `stop` on, to close all blocks that they do not use.
        while self._next_step < epoch_end and (self._next_step - stop) * size < self._idle_limit:
            self._examine_chunk()
        last_steps = []
        # The heap has tuples (first step, first record, last step), the earliest first step on top.
        while self._closed_blocks and self._closed_blocks[0][0] < stop:
            _, first_record, last_step = heappop(self._closed_blocks)
            last_steps.append((first_record, last_step))
        return last_steps

    @property
    def _idle_limit(self) -> int:
        """A block is closed when this number of samples in a row are of other blocks.

        It must be large enough that a block is not closed between two of its samples. A shuffle of
        blocks draws in rounds, with one sample of each open block in a round: with 100 open blocks,
        two samples of a block are less than 200 samples apart. To be safe, allow four rounds, 400
        samples; and add a quarter of an epoch (at most `_MAX_CHUNK` samples), for when few blocks
        are open.
        """
        epoch_samples = self._epoch_steps * self._sampler.batch_size
        return min(_MAX_CHUNK, epoch_samples // 4) + 4 * len(self._open_blocks)

    def _examine_chunk(self) -> None:
        """Draw the samples of the next `_chunk_steps` steps, and open and close blocks by them.

        A block opens at its first sample. It closes when `_idle_limit` samples in a row are of
        other blocks, and at the end of an epoch. `_open_blocks` has for each open block,
        by its first record, a tuple: (the block, its last step, the number of its last sample).

        For example, the limit is 10 samples, and the chunk has the samples 100 to 119. Block 8 had
        its last sample at 95, and has one at 102, only 7 later: it stays open. Block 0 had its last
        sample at 92, and has one at 104, 12 later: it is closed, and opened again at 104.
        """
        epoch, step = divmod(self._next_step, self._epoch_steps)
        stop = min(step + self._chunk_steps, self._epoch_steps)
        records, steps = self._schedule.records(self._next_step, self._next_step + stop - step)
        # The block that each sample is in: the records [first_records[i], stops[i]).
        first_records, stops = self._sampler.spans(records, epoch)
        # `first_use` and `last_use` are the first and the last sample of a block in this chunk,
        # numbered from 0 in the chunk. Sample 4 of the chunk is sample `chunk_start` + 4 of all.
        chunk_start = self._num_samples
        for first_use, last_use in _uses_of_blocks(first_records, self._idle_limit):
            first = int(first_records[first_use])
            if first in self._open_blocks:
                block, _, last_sample = self._open_blocks[first]  # from an earlier chunk
                if chunk_start + first_use - last_sample > self._idle_limit:
                    self._close(first)  # it opens again below, as a block that is used anew
            if first not in self._open_blocks:
                block = Block(first, int(stops[first_use]), int(steps[first_use]))
                self._new_blocks.append(block)
            self._open_blocks[first] = block, int(steps[last_use]), chunk_start + last_use
        self._num_samples += len(records)
        self._next_step += stop - step
        self._chunk_steps = min(2 * self._chunk_steps, self._max_chunk_steps)
        # Close also the blocks that had no sample in this chunk, if they are idle for too long.
        for first, (_, _, last_sample) in list(self._open_blocks.items()):
            if stop == self._epoch_steps or self._num_samples - last_sample > self._idle_limit:
                self._close(first)

    def _close(self, first_record: int) -> None:
        """Move the open block with this first record to the heap of closed blocks."""
        block, last_step, _ = self._open_blocks.pop(first_record)
        heappush(self._closed_blocks, (block.first_step, first_record, last_step))


def _uses_of_blocks(first_records: Int64s, max_gap: int) -> list[tuple[int, int]]:
    """Return the lifetimes of blocks in memory, as pairs (number of first sample, of last sample).

    A block is loaded for its first sample, and dropped after its last one. If it has no sample for
    more than `max_gap` samples, it is dropped and loaded again: then it has several lifetimes. For
    example, samples of the blocks [8, 0, 8, 0, 0] need block 8 from sample 0 to sample 2, and block
    0 from sample 1 to sample 4: the result is [(0, 2), (1, 4)].

    Args:
        first_records: for each sample, the first record of its block, which names the block.
        max_gap: in samples.
    """
    # Sort the numbers of the samples by block. The comments follow the example.
    by_block = np.argsort(first_records, kind="stable")  # [1, 3, 4, 0, 2]
    is_other_block = np.diff(first_records[by_block]) != 0  # [False, False, True, False]
    is_after_gap = np.diff(by_block) > max_gap
    use_starts = np.flatnonzero(is_other_block | is_after_gap) + 1  # [3]
    uses = np.split(by_block, use_starts) if len(by_block) else []  # [1, 3, 4] and [0, 2]
    return sorted((int(samples[0]), int(samples[-1])) for samples in uses)


def prefetches_whole_blocks(sampler: BatchStream, /) -> bool:
    """Return whether records are prefetched by block: once for all steps that use the block.

    A block is a range of consecutive records of a shard that are used around the same time. Two
    kinds of samplers have blocks:

    - A sampler that shuffles within blocks soon draws all records of a block (`reads_blocks`).
    - A sampler that reuses decoded images soon draws an image again (`max_cached`). There a block
      is one record, which need not be fetched again, since its decoded image is cached.

    For any other sampler, a record is prefetched for each step that draws it.
    """
    return sampler.traits.reads_blocks or sampler.traits.max_cached is not None
