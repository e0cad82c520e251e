"""When a stream uses each block of records: the first and the last step.

A block is a range of consecutive records of a shard that are read around the same time.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.samplers import BatchStream
from twinfeed.samplers.drawing.int_arrays import ranges

_MAX_CHUNK, _FIRST_CHUNK = 1 << 13, 1 << 8
"""The number of samples that are drawn and examined in one call, at most and in the first call."""

NO_STEP = int(np.iinfo(np.int64).max)
"""In place of a step: no use is known. It is larger than every step."""


class Block(NamedTuple):
    """A block of records, [first, stop), and the step that is the first to use it."""

    first: int
    stop: int
    first_step: int


class BlockUses:
    """Find the step that uses each block of a stream first (opens it), and the one that does last.

    A block is a range of records that are read around the same time. For a stream that does not
    read blocks, a block is an image or a single record. A block is open from its first use to its
    last. The last use is only known afterwards: a block is closed when the stream has had no
    sample of it for `_idle_samples` samples, and at the end of an epoch. If a closed block is used
    again, it opens again. Steps are counted over all epochs.

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
        self._open: dict[int, tuple[Block, int, int]] = {}
        self._opened: deque[Block] = deque()  # that `first_used_before` has not returned yet
        # A heap of closed blocks: (first step, first record, last step).
        self._closed: list[tuple[int, int, int]] = []

    def first_used_before(self, stop: int, /) -> list[Block]:
        """Return the blocks whose first use is before step `stop`.

        Each block is returned once: a later call returns only the blocks opened since.
        """
        while self._next_step < stop:
            self._examine_chunk()
        blocks = []
        while self._opened and self._opened[0].first_step < stop:
            blocks.append(self._opened.popleft())
        return blocks

    def new_records_before(self, stop: int, /) -> tuple[Int64s, Int64s, Int64s]:
        """Return all records of the blocks whose first use is before step `stop`.

        Each block is returned once: a later call returns only records of blocks opened since.

        Returns:
            Three arrays, int64[records]: the id of each record, the first step that uses its block,
            and the first record of its block.
        """
        blocks = np.array(self.first_used_before(stop), np.int64).reshape(-1, 3)
        first, end, first_step = blocks.T
        return ranges(first, end), np.repeat(first_step, end - first), np.repeat(first, end - first)

    def last_steps_before(self, stop: int, /) -> list[tuple[int, int]]:
        """Return the last step of closed blocks whose first use is before step `stop`.

        Each block is returned once, as a pair (first record, last step). A block that is not used
        from step `stop` on is always closed. A block that is used later may still be open; then a
        later call returns it.
        """
        epoch_end = -(-stop // self._epoch_steps) * self._epoch_steps  # of the epoch of stop - 1
        size = self._sampler.batch_size
        # Examine `_idle_samples` samples from `stop` on, so that every idle block is closed.
        while self._next_step < epoch_end and (self._next_step - stop) * size < self._idle_samples:
            self._examine_chunk()
        last_steps = []
        while self._closed and self._closed[0][0] < stop:
            _, first_record, last_step = heappop(self._closed)
            last_steps.append((first_record, last_step))
        return last_steps

    @property
    def _idle_samples(self) -> int:
        """After how many samples of other blocks a block counts as closed.

        A shuffle of blocks takes a sample from each open block at least once in two rounds.
        """
        epoch_samples = self._epoch_steps * self._sampler.batch_size
        return min(_MAX_CHUNK, epoch_samples // 4) + 4 * len(self._open)

    def _examine_chunk(self) -> None:
        """Draw the samples of the next `_chunk_steps` steps, and open and close blocks by them."""
        epoch, step = divmod(self._next_step, self._epoch_steps)
        stop = min(step + self._chunk_steps, self._epoch_steps)
        records, steps = self._schedule.records(self._next_step, self._next_step + stop - step)
        firsts, stops = self._sampler.spans(records, epoch)  # the block [first, stop) of each
        # Samples are numbered from the first that was ever examined; in this chunk, from 0.
        chunk_start = self._num_samples
        for first_use, last_use in _uses_of_blocks(firsts, self._idle_samples):
            first = int(firsts[first_use])
            if first in self._open:
                block, _, last_sample = self._open[first]
                if chunk_start + first_use - last_sample > self._idle_samples:
                    self._close(first)
            if first not in self._open:
                block = Block(first, int(stops[first_use]), int(steps[first_use]))
                self._opened.append(block)
            self._open[first] = block, int(steps[last_use]), chunk_start + last_use
        self._num_samples += len(records)
        self._next_step += stop - step
        self._chunk_steps = min(2 * self._chunk_steps, self._max_chunk_steps)
        for first, (_, _, last_sample) in list(self._open.items()):
            if stop == self._epoch_steps or self._num_samples - last_sample > self._idle_samples:
                self._close(first)

    def _close(self, first: int) -> None:
        """Move the open block with this first record to the heap of closed blocks."""
        block, last_step, _ = self._open.pop(first)
        heappush(self._closed, (block.first_step, first, last_step))


def _uses_of_blocks(firsts: Int64s, max_gap: int) -> list[tuple[int, int]]:
    """Return when each block is used: (position of its first sample, position of its last one).

    `firsts` has for each sample the first record of its block. If a block has no sample for more
    than `max_gap` positions, the samples after that are another use. For example, the samples of
    the blocks [8, 0, 8, 0, 0] give [(0, 2), (1, 4)]: block 8 is used at positions 0 to 2, and block
    0 at positions 1 to 4.
    """
    order = np.argsort(firsts, kind="stable")  # by block, and within a block by position
    is_new = (np.diff(firsts[order]) != 0) | (np.diff(order) > max_gap)
    uses = np.split(order, np.flatnonzero(is_new) + 1) if len(order) else []
    return sorted((int(positions[0]), int(positions[-1])) for positions in uses)


def prefetches_whole_blocks(sampler: BatchStream, /) -> bool:
    """Return whether all records of a block are prefetched when its first record is needed.

    This pays if the sampler draws the other records of the block soon: because it shuffles within
    blocks, or because it reuses the images of a decoded cache (`max_cached`). Otherwise each record
    is prefetched by itself.
    """
    return sampler.traits.reads_blocks or sampler.traits.max_cached is not None


def most_open(opened: Int64s, closed: Int64s, sizes: Array, /) -> int:
    """Return the largest total size of items that are open at the same time.

    Item n is open from step opened[n] until, but not in, step closed[n].

    >>> most_open(np.array([0, 1, 2]), np.array([2, 3, 3]), np.array([1, 1, 5]))
    6
    """
    steps, changes = np.concatenate([opened, closed]), np.concatenate([sizes, -sizes])
    by_step = np.lexsort((changes, steps))  # in a step, items are closed before others are opened
    return int(np.cumsum(changes[by_step]).max(initial=0))
