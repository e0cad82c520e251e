"""When a stream enters and leaves its spans: blocks, images or single records."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from twinfeed.loaders.ahead.schedule import Schedule
from twinfeed.loaders.support.array_types import Array, Int64s

_SAMPLES, _FIRST = 1 << 13, 1 << 8
"""Samples that are looked at together, at most and at first."""

FAR = int(np.iinfo(np.int64).max)
"""The step of what is not known to come."""


class Span(NamedTuple):
    """A span from its first record to `stop`, and the step that enters the span."""

    first: int
    stop: int
    step: int


class Spans:
    """Say which spans of a stream are entered, in order, and by which step each is needed last.

    A span is left if no sample comes from the span for a quarter of an epoch, but at most for
    `_SAMPLES` samples, and for four more for each open span: an open block gives a sample every
    round or two. All spans are left at the end of an epoch. Steps are counted over all epochs.

    >>> from twinfeed.samplers import BatchSampler, ShardShuffleSampler
    >>> order = ShardShuffleSampler([6], block=3, window=1, seed=0)
    >>> spans = Spans(Schedule(BatchSampler(order, batch_size=2)), 0)
    >>> len(spans.entered(2)), spans.left(2)
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
        self._entered: deque[Span] = deque()
        self._left: list[tuple[int, int, int]] = []  # a heap: the step that enters, first, last

    def entered(self, stop: int, /) -> list[Span]:
        """Return the spans that the steps before `stop` enter; each span is returned once."""
        while self._looked < stop:
            self._look()
        found = []
        while self._entered and self._entered[0].step < stop:
            found.append(self._entered.popleft())
        return found

    def left(self, stop: int, /) -> list[tuple[int, int]]:
        """Return the first record and the last step of spans that the stream has left, each once.

        The spans were entered before step `stop`, and none that was left by then is missing.
        """
        end = -(-stop // self._steps) * self._steps
        while self._looked < end and (self._looked - stop) * self._sampler.batch_size < self._pause:
            self._look()
        found = []
        while self._left and self._left[0][0] < stop:
            found.append(heappop(self._left)[1:])
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
        begins = np.flatnonzero(np.concatenate([[True], new])[: len(order)])
        enters, leaves = order[begins], order[np.append(begins[1:], len(order))[: len(begins)] - 1]
        for place in np.argsort(enters).tolist():
            at, last = int(enters[place]), int(leaves[place])
            self._use(
                Span(int(firsts[at]), int(stops[at]), int(steps[at])), int(steps[last]), at, last
            )
        self._samples += len(records)
        self._looked += stop - step
        self._together = min(2 * self._together, self._most)
        done = stop == self._steps
        for span, _, sample in list(self._open.values()):
            if done or self._samples - sample > self._pause:
                self._leave(span.first)

    def _use(self, span: Span, last: int, begin: int, end: int) -> None:
        """Note that samples `begin` to `end` of this look come from a span."""
        before = self._open.get(span.first)
        if before is not None and self._samples + begin - before[2] > self._pause:
            self._leave(span.first)
            before = None
        if before is None:
            self._entered.append(span)
        self._open[span.first] = before[0] if before else span, last, self._samples + end

    def _leave(self, first: int) -> None:
        span, last, _ = self._open.pop(first)
        heappush(self._left, (span.step, first, last))


def most_open(opened: Int64s, closed: Int64s, sizes: Array, /) -> int:
    """Return the largest sum of `sizes` open at once; each is open from `opened` up to `closed`.

    >>> most_open(np.array([0, 1, 2]), np.array([2, 3, 3]), np.array([1, 1, 5]))
    6
    """
    changes = np.concatenate([sizes, -sizes])
    open_now = np.cumsum(changes[np.lexsort((changes, np.concatenate([opened, closed])))])
    return int(open_now.max(initial=0))
