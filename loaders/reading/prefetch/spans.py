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

_SAMPLES, _FIRST = 1 << 13, 1 << 8
"""Samples that are looked at together, at most and at first."""

NO_STEP = int(np.iinfo(np.int64).max)
"""The step of a use that is not known to come."""


class Span(NamedTuple):
    """A span from its first record to `stop`, and the step that opens the span."""

    first: int
    stop: int
    step: int


class Spans:
    """The spans that a stream opens, in order, and the last step that uses each.

    A span counts as closed when no sample has come from it for `min(epoch / 4, _SAMPLES)` samples,
    and four more for each open span: an open block gives a sample every round or two. All spans are
    closed at the end of an epoch. Steps are counted over all epochs.

    >>> from twinfeed.samplers import BatchSampler, ShardShuffleSampler
    >>> order = ShardShuffleSampler([6], block=3, window=1, seed=0)
    >>> spans = Spans(Schedule(BatchSampler(order, batch_size=2)), 0)
    >>> len(spans.opened_before(2)), spans.closed_before(2)
    (2, [(3, 1), (0, 2)])
    """

    def __init__(self, schedule: Schedule, step: int, /) -> None:
        self._schedule, self._sampler = schedule, schedule.sampler
        self._steps = max(1, len(self._sampler))
        size = max(1, self._sampler.batch_size)
        self._together, self._most = max(1, _FIRST // size), max(1, _SAMPLES // size)
        self._looked = step  # all steps before this one were looked at
        self._samples = 0
        # Of each open span, by its first record: the span, its last step and its last sample.
        self._open: dict[int, tuple[Span, int, int]] = {}
        self._opened: deque[Span] = deque()
        self._closed: list[tuple[int, int, int]] = []  # a heap: the step that opens, first, last

    def opened_before(self, stop: int, /) -> list[Span]:
        """Return the spans that the steps before `stop` open; each span is returned once."""
        while self._looked < stop:
            self._look()
        found = []
        while self._opened and self._opened[0].step < stop:
            found.append(self._opened.popleft())
        return found

    def records_before(self, stop: int, /) -> tuple[Int64s, Int64s, Int64s]:
        """Return the records of the same, and of each the step and its span's first record."""
        first, high, step = np.array(self.opened_before(stop), np.int64).reshape(-1, 3).T
        return ranges(first, high), np.repeat(step, high - first), np.repeat(first, high - first)

    def closed_before(self, stop: int, /) -> list[tuple[int, int]]:
        """Return the first record and the last step of closed spans, each once.

        The spans were opened before step `stop`, and none that was closed by then is missing.
        """
        high = -(-stop // self._steps) * self._steps
        while (
            self._looked < high and (self._looked - stop) * self._sampler.batch_size < self._pause
        ):
            self._look()
        found = []
        while self._closed and self._closed[0][0] < stop:
            found.append(heappop(self._closed)[1:])
        return found

    @property
    def _pause(self) -> int:
        epoch = self._steps * self._sampler.batch_size
        return min(_SAMPLES, epoch // 4) + 4 * len(self._open)

    def _look(self) -> None:
        """Look at the next steps of an epoch."""
        epoch, step = divmod(self._looked, self._steps)
        stop = min(step + self._together, self._steps)
        records, steps = self._schedule.records(self._looked, self._looked + stop - step)
        firsts, stops = self._sampler.spans(records, epoch)
        order = np.argsort(firsts, kind="stable")
        new = (np.diff(firsts[order]) != 0) | (np.diff(order) > self._pause)
        uses = np.split(order, np.flatnonzero(new) + 1) if len(order) else []
        for low, high in sorted((int(samples[0]), int(samples[-1])) for samples in uses):
            first = int(firsts[low])
            span, _, sample = self._open.get(first, (None, 0, 0))
            if span is not None and self._samples + low - sample > self._pause:
                self._close(first)
                span = None
            if span is None:
                span = Span(first, int(stops[low]), int(steps[low]))
                self._opened.append(span)
            self._open[first] = span, int(steps[high]), self._samples + high
        self._samples += len(records)
        self._looked += stop - step
        self._together = min(2 * self._together, self._most)
        for first, (_, _, sample) in list(self._open.items()):
            if stop == self._steps or self._samples - sample > self._pause:
                self._close(first)

    def _close(self, first: int) -> None:
        span, last, _ = self._open.pop(first)
        heappush(self._closed, (span.step, first, last))


def reads_spans(sampler: BatchStream, /) -> bool:
    """Return whether the samples of a span are read together, where they are read ahead."""
    return sampler.traits.reads_blocks or sampler.traits.max_cached is not None


def most_open(opened: Int64s, closed: Int64s, sizes: Array, /) -> int:
    """Return the largest sum of `sizes` open at once; each is open from `opened` up to `closed`.

    >>> most_open(np.array([0, 1, 2]), np.array([2, 3, 3]), np.array([1, 1, 5]))
    6
    """
    changes = np.concatenate([sizes, -sizes])
    open_now = np.cumsum(changes[np.lexsort((changes, np.concatenate([opened, closed])))])
    return int(open_now.max(initial=0))
