"""Events of a stream in step order: ranges to fetch, and blocks to release."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.index import Index
from twinfeed.loaders.index.sizes import exceeds_memory
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.reading.prefetch.spans import Spans, reads_spans
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.samplers.drawing.chunks import steps_per_draw

Rows = npt.NDArray[Any]
"""Rows of an index: the offset, length, file and checksum of each."""

Extents = npt.NDArray[Any]
"""An array of `EXTENT`s."""

EXTENT = np.dtype([("file", "i4"), ("start", "i8"), ("stop", "i8"), ("span", "i8"), ("step", "i8")])
"""A range of a file that the batch of a `step` reads. Steps are counted over all epochs. A `span`
of the stream uses the range until the span is closed. With `NO_SPAN`, no later batch uses it.
"""

NO_SPAN = -1

MOST_AT_ONCE = 1 << 23
"""Most bytes of one range."""

AHEAD_GAP = 1 << 16
"""A gap of at most so many bytes between two rows is read ahead, not skipped."""

_LEAST_GAP, _MOST_GAP = 1 << 12, 1 << 20
"""The same of shards at a URL, where it is about a record."""

LIMIT = 1 << 26
"""Bytes that are fetched before their batches need them, unless a loader says how many."""


class Fetch(NamedTuple):
    """`EXTENT`s that no step before needs, in the order of their requests."""

    ranges: Extents


class Release(NamedTuple):
    """Blocks, each by its first record, and the last step that uses the block."""

    last_steps: Sequence[tuple[int, int]]


class ReadPlan:
    """The events of a stream from step `start` to the end of the epoch, in step order.

    Nothing is read here. Each span of the stream (a block, or a single record) is fetched when the
    stream enters it. About `limit` bytes are fetched ahead of the batches that are read. The last
    batch may go beyond the limit. With `limit=0` nothing is fetched early. Without a limit, data
    that fit in memory are `probing`: the consumer of the first event disables the plan if these
    ranges are in memory already.

    Consecutive epochs share a plan (`continues_at`), and the plan goes on over the end of the
    epoch. After the last epoch, about `limit` bytes were read in vain. An evaluation has no next
    epoch. Steps are counted over all epochs.

    Several threads may read batches of the plan (`enter`, `leave`). One at a time, which has the
    lock `applying`, takes events.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> from twinfeed.samplers import BatchSampler, SequentialSampler
    >>> index = pack([{"x": bytes(1000)} for _ in range(4)], mkdtemp())["data"]
    >>> stream = BatchSampler(SequentialSampler(4), batch_size=2)
    >>> plan = ReadPlan(index, ["x"], Schedule(stream), 0, limit=1)
    >>> [len(event.ranges) for event in plan.until(0)], plan.next
    ([1, 1], 2)
    """

    def __init__(
        self,
        index: Index,
        fields: Sequence[str],
        schedule: Schedule,
        start: int,
        /,
        *,
        limit: int | None,
    ) -> None:
        self.schedule, self.fields, self.limit = schedule, fields, LIMIT if limit is None else limit
        self._index, self._gap = index, gap_of(index)
        self._sampler, self._steps = schedule.sampler, max(1, len(schedule.sampler))
        self._probes = limit is None and not index.remote and not exceeds_memory(index)
        self._spans = Spans(schedule, start) if reads_spans(self._sampler) else None
        # An image is read once, and only remote ranges are kept for the samples that come later.
        self._keeps_spans = index.remote and self._sampler.traits.max_cached is None
        self.next, self._together = start, 1  # the next step to fetch, and how many at once
        self._fetched: deque[tuple[int, int]] = deque()  # last step and bytes of what is ahead
        self._bytes = 0  # the bytes in `_fetched`
        self._lock, self.applying = Lock(), Lock()
        self._start(start, epochs=1)

    def _start(self, start: int, *, epochs: int) -> None:
        """Begin a pass, which knows so many epochs."""
        self.start = start
        self._epoch_end = (start // self._steps + 1) * self._steps
        self._end = self._epoch_end + (epochs - 1) * self._steps
        self.enabled, self.probing = self.limit > 0, self._probes
        self._in_progress: set[int] = set()
        self._reached = start - 1

    def continues_at(self, start: int, /) -> bool:
        """Continue with a pass from this step if the last pass has ended there; return whether."""
        ended = self._reached == self._epoch_end - 1 and start == self._epoch_end
        if not self.enabled or self.probing or not ended:
            return False
        self._start(start, epochs=1 if self._sampler.evaluation else 2)
        return True

    def enter(self, step: int, /) -> None:
        """Begin to read the batch of a step."""
        with self._lock:
            self._in_progress.add(step)
            self._reached = max(self._reached, step)

    def leave(self, step: int, /) -> int:
        """End the reading of a step; return the step before which nothing is needed any more."""
        with self._lock:
            self._in_progress.discard(step)
            return min([*self._in_progress, self._reached + 1])  # batches are read about in order

    def until(self, step: int, /) -> Iterator[Fetch | Release]:
        """Yield the events to apply while the batch of `step` is read, each event once."""
        while self._fetched and self._fetched[0][0] <= step:
            self._bytes -= self._fetched.popleft()[1]
        for _ in range(2):  # not all at once: the batch of this step waits
            wanted = self._bytes < self.limit or self.next <= step + 1
            if self.enabled and wanted and self.next < self._end:
                epoch_end = (self.next // self._steps + 1) * self._steps
                yield from self._events(min(self.next + self._together, epoch_end))

    def _events(self, stop: int) -> Iterator[Fetch | Release]:
        """Yield the events of the batches up to step `stop`, all of one epoch."""
        extents = self._extents(stop)
        yield Fetch(extents)
        if self._spans is not None and self._keeps_spans:
            yield Release(self._spans.closed_before(stop))
        size = int((extents["stop"] - extents["start"]).sum())
        self._fetched.append((stop - 1, size))
        self._bytes += size
        self.next = stop
        if 4 * size > self.limit:
            self._together = max(1, self._together // 2)
        elif 8 * size < self.limit:
            self._together = min(2 * self._together, steps_per_draw(self._sampler.batch_size))

    def _extents(self, stop: int) -> Extents:
        """Return the ranges that these batches read, and no earlier batch reads."""
        spans: Int64s | int = NO_SPAN
        if self._spans is None:
            records, steps = self.schedule.records(self.next, stop)
        else:
            records, steps, firsts = self._spans.records_before(stop)
            spans = firsts if self._keeps_spans else NO_SPAN
        return extents_of_records(self._index, self.fields, records, steps, spans, gap=self._gap)


def extents_of_records(
    index: Index,
    fields: Sequence[str],
    records: Int64s,
    steps: Int64s,
    spans: Int64s | int = NO_SPAN,
    /,
    *,
    gap: int,
) -> Extents:
    """Return the `EXTENT`s in which records lie.

    Records outside their shards are left out. Reading such a record says what is wrong.
    """
    rows = index.rows(fields, records)
    nonempty = rows["length"] > 0
    nonempty[outside(index, rows)] = False
    spans = np.repeat(np.broadcast_to(spans, len(records)), len(fields))[nonempty]
    return extents_of(rows[nonempty], spans, np.repeat(steps, len(fields))[nonempty], gap)


def extents_of(rows: Rows, spans: Int64s | int, steps: Int64s | int, gap: int, /) -> Extents:
    """Return the `EXTENT`s of rows, by file and offset. Near neighbours of a span share an extent,
    which has the last of their steps.
    """
    order = np.lexsort((rows["offset"], rows["file"]))
    file, start = rows["file"][order], rows["offset"][order].astype(np.int64)
    stop = start + rows["length"][order]
    spans = np.broadcast_to(spans, len(rows))[order]
    steps = np.broadcast_to(steps, len(rows))[order]
    starts = np.ones(len(order), bool)
    starts[1:] = (file[1:] != file[:-1]) | (start[1:] - stop[:-1] > gap) | (spans[1:] != spans[:-1])
    range_start = start[np.maximum.accumulate(np.where(starts, np.arange(len(order)), 0))]
    part = (start - range_start) // MOST_AT_ONCE
    starts[1:] |= part[1:] != part[:-1]
    first = np.flatnonzero(starts)
    extents = np.zeros(len(first), EXTENT)
    if len(first):
        extents["file"], extents["start"], extents["span"] = file[first], start[first], spans[first]
        extents["stop"] = np.maximum.reduceat(stop, first)
        extents["step"] = np.maximum.reduceat(steps, first)
    return extents


def outside(index: Index, rows: Rows, /) -> Int64s:
    """Return the numbers of the rows that do not lie within their shard as it was indexed."""
    if index.container == "files":
        return np.zeros(0, np.int64)  # a row is a whole file, and its size is checked
    last = len(index.shards) - 1
    sizes = index.shards["bytes"][np.minimum(rows["file"], last)]
    inside = (rows["offset"] >= 0) & (rows["length"] >= 0)
    return np.flatnonzero(~inside | (rows["offset"] > sizes - rows["length"]))


def gap_of(index: Index, /) -> int:
    """Return the longest gap between two ranges that is read ahead, not skipped."""
    if not index.remote:
        return AHEAD_GAP
    mean = int(index.shards["bytes"].sum()) // max(1, len(index))
    return min(max(mean, _LEAST_GAP), _MOST_GAP)
