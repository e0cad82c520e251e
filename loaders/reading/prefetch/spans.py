"""Spans of a stream (blocks, images or single records): the steps that open and close each."""

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
"""Samples of the stream that are drawn and examined in one call, at most and at first."""

NO_STEP = int(np.iinfo(np.int64).max)
"""In place of a step: no use is known."""


class Span(NamedTuple):
    """The records [first, stop) of a block, and the step that reads the first sample of it."""

    first: int
    stop: int
    step: int


class Spans:
    """The spans of a stream: which step uses each span first (opens it), and which one last.

    A span is a block of records that are read around the same time, an image, or a single record.
    It counts as closed when no sample has come from it for `_idle_samples` samples: while a block
    is open, it has a sample in every round of the shuffle or two. All spans are closed at the end
    of an epoch. Steps are counted over all epochs.

    >>> from twinfeed.samplers import BatchSampler, ShardShuffleSampler
    >>> order = ShardShuffleSampler([6], block=3, window=1, seed=0)
    >>> spans = Spans(Schedule(BatchSampler(order, batch_size=2)), 0)
    >>> len(spans.opened_before(2)), spans.closed_before(2)
    (2, [(3, 1), (0, 2)])
    """

    def __init__(self, schedule: Schedule, step: int, /) -> None:
        self._schedule, self._sampler = schedule, schedule.sampler
        self._epoch_steps = max(1, len(self._sampler))
        size = max(1, self._sampler.batch_size)
        self._chunk_steps = max(1, _FIRST_CHUNK // size)
        self._max_chunk_steps = max(1, _MAX_CHUNK // size)
        self._next_step = step  # all steps before this one were examined
        self._samples = 0  # that were examined
        # Of each open span, by its first record: the span, its last step and its last sample.
        self._open: dict[int, tuple[Span, int, int]] = {}
        self._opened: deque[Span] = deque()  # that were not returned yet
        # A heap of closed spans: the step that opens the span, its first record, its last step.
        self._closed: list[tuple[int, int, int]] = []

    def opened_before(self, stop: int, /) -> list[Span]:
        """Return the spans that steps before `stop` are the first to use.

        Each span is returned once, so a later call returns those opened since.
        """
        while self._next_step < stop:
            self._read_chunk()
        spans = []
        while self._opened and self._opened[0].step < stop:
            spans.append(self._opened.popleft())
        return spans

    def records_before(self, stop: int, /) -> tuple[Int64s, Int64s, Int64s]:
        """Return the records of the spans that steps before `stop` open: see `opened_before`.

        Three arrays, int64[records]: the id of each record, the step that opens its span, and the
        first record of its span.
        """
        spans = np.array(self.opened_before(stop), np.int64).reshape(-1, 3)
        first, end, step = spans.T
        return ranges(first, end), np.repeat(step, end - first), np.repeat(first, end - first)

    def closed_before(self, stop: int, /) -> list[tuple[int, int]]:
        """Return (first record, last step) of spans that a step before `stop` opens, if closed.

        Each span is returned once. Spans that steps after `stop` still use may be missing, but no
        span that they do not use.
        """
        epoch_end = -(-stop // self._epoch_steps) * self._epoch_steps
        size = self._sampler.batch_size
        # Look so far ahead that each span without a use from `stop` on counts as closed.
        while self._next_step < epoch_end and (self._next_step - stop) * size < self._idle_samples:
            self._read_chunk()
        closed = []
        while self._closed and self._closed[0][0] < stop:
            closed.append(heappop(self._closed)[1:])
        return closed

    @property
    def _idle_samples(self) -> int:
        """The number of samples in a row from other spans after which a span counts as closed."""
        epoch_samples = self._epoch_steps * self._sampler.batch_size
        return min(_MAX_CHUNK, epoch_samples // 4) + 4 * len(self._open)

    def _read_chunk(self) -> None:
        """Draw the samples of the next `_chunk_steps` steps, and open and close spans by them."""
        epoch, step = divmod(self._next_step, self._epoch_steps)
        stop = min(step + self._chunk_steps, self._epoch_steps)
        records, steps = self._schedule.records(self._next_step, self._next_step + stop - step)
        firsts, stops = self._sampler.spans(records, epoch)  # the span of each sample
        for earliest, latest in _uses_of_spans(firsts, self._idle_samples):
            first = int(firsts[earliest])
            span, _, last_sample = self._open.get(first, (None, 0, 0))
            if span is not None and self._samples + earliest - last_sample > self._idle_samples:
                self._close(first)
                span = None
            if span is None:
                span = Span(first, int(stops[earliest]), int(steps[earliest]))
                self._opened.append(span)
            self._open[first] = span, int(steps[latest]), self._samples + latest
        self._samples += len(records)
        self._next_step += stop - step
        self._chunk_steps = min(2 * self._chunk_steps, self._max_chunk_steps)
        for first, (_, _, last_sample) in list(self._open.items()):
            if stop == self._epoch_steps or self._samples - last_sample > self._idle_samples:
                self._close(first)

    def _close(self, first: int) -> None:
        """Move the open span with this first record to the heap of closed spans."""
        span, last_step, _ = self._open.pop(first)
        heappush(self._closed, (span.step, first, last_step))


def _uses_of_spans(firsts: Int64s, max_gap: int) -> list[tuple[int, int]]:
    """Return where each span is used: (position of its first sample, position of its last one).

    `firsts` has the span of each sample, by its first record. If a span has no sample for more than
    `max_gap` positions, the samples after that are another use. For example, the samples of the
    spans [8, 0, 8, 0, 0] give [(0, 2), (1, 4)].
    """
    order = np.argsort(firsts, kind="stable")  # by span, and within a span by position
    is_new = (np.diff(firsts[order]) != 0) | (np.diff(order) > max_gap)
    uses = np.split(order, np.flatnonzero(is_new) + 1) if len(order) else []
    return sorted((int(positions[0]), int(positions[-1])) for positions in uses)


def prefetches_spans(sampler: BatchStream, /) -> bool:
    """Return whether the spans of this sampler's stream are prefetched as a whole.

    If not, each sample is prefetched by itself.
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
