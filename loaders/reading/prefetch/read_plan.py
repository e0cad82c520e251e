"""Plan the reading of a stream: which ranges to fetch, and when to release them."""

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
from twinfeed.loaders.reading.prefetch.spans import Spans, prefetches_spans
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.samplers.drawing.chunks import steps_per_draw

Rows = npt.NDArray[Any]
"""Rows of an index: the offset, length, file and checksum of each."""

Extents = npt.NDArray[Any]
"""An array of `EXTENT`s."""

EXTENT = np.dtype([("file", "i4"), ("start", "i8"), ("stop", "i8"), ("span", "i8"), ("step", "i8")])
"""A range of a file that the batch of a `step`, counted over all epochs, reads. `span` is the first
record of the block that the range belongs to: later batches use the range until the block is
closed. With `NO_SPAN`, no later batch uses the range.
"""

NO_SPAN = -1

MAX_RANGE_BYTES = 1 << 23
"""The largest range that is read by one call."""

LOCAL_GAP = 1 << 16
"""Two rows of a local file with a gap of at most so many bytes are read as one range."""

_MIN_GAP, _MAX_GAP = 1 << 12, 1 << 20
"""The same for shards at a URL, where the gap is the mean size of a record within these limits."""

LIMIT = 1 << 26
"""The default of `limit`: bytes that are fetched before their batches need them."""


class Fetch(NamedTuple):
    """The event: fetch these `EXTENT`s, which no earlier step needs."""

    ranges: Extents


class Release(NamedTuple):
    """The event: blocks that are closed, each as (its first record, the last step that uses it)."""

    last_steps: Sequence[tuple[int, int]]


class ReadPlan:
    """The events of a stream from step `start` to the end of the epoch: `Fetch` and `Release`.

    Nothing is read here. Each span of the stream (a block of records that are read around the same
    time, or a single record) is fetched when the stream enters it. About `limit` bytes are fetched
    ahead of the batches that are read; the last batch may exceed the limit. `limit=0` disables
    prefetching. If no limit is given and the data fit in memory, the plan is `probing`: whoever
    receives the first event disables the plan if its ranges are in the page cache already.

    Consecutive epochs share a plan (`continues_at`), so that prefetching continues over the end of
    an epoch. After the last epoch, about `limit` bytes have been read that nobody uses. An
    evaluation has no next epoch. Steps are counted over all epochs.

    Several threads may read batches of the plan (`enter`, `leave`). The events are consumed by one
    thread at a time, which has the lock `applying`.

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
        self._sampler, self._epoch_steps = schedule.sampler, max(1, len(schedule.sampler))
        self._probes_first = limit is None and not index.remote and not exceeds_memory(index)
        self._spans = Spans(schedule, start) if prefetches_spans(self._sampler) else None
        # Ranges are only buffered for remote data. An image that a decoded cache has is read once.
        self._releases_spans = index.remote and self._sampler.traits.max_cached is None
        self.next, self._steps_per_fetch = start, 1  # the next step to fetch
        self._fetched: deque[tuple[int, int]] = deque()  # of each fetch, the last step and bytes
        self._bytes = 0  # of `_fetched`: what is prefetched and not read yet
        self._lock, self.applying = Lock(), Lock()
        self._start(start, epochs=1)

    def _start(self, start: int, *, epochs: int) -> None:
        """Set the plan to a pass that starts at this step and may prefetch from `epochs` epochs."""
        self.start = start
        self._epoch_end = (start // self._epoch_steps + 1) * self._epoch_steps
        self._end = self._epoch_end + (epochs - 1) * self._epoch_steps
        self.enabled, self.probing = self.limit > 0, self._probes_first
        self._steps_in_progress: set[int] = set()
        self._last_entered = start - 1

    def continues_at(self, start: int, /) -> bool:
        """Continue the plan with the next epoch, if the last pass has ended where it starts.

        Returns:
            Whether the plan continues. If not, the pass that starts here needs a new plan.
        """
        pass_ended_here = self._last_entered == self._epoch_end - 1 and start == self._epoch_end
        if not self.enabled or self.probing or not pass_ended_here:
            return False
        self._start(start, epochs=1 if self._sampler.evaluation else 2)
        return True

    def enter(self, step: int, /) -> None:
        """Record that the reading of the batch of a step begins."""
        with self._lock:
            self._steps_in_progress.add(step)
            self._last_entered = max(self._last_entered, step)

    def leave(self, step: int, /) -> int:
        """Record that the batch of a step was read.

        Returns:
            The first step that may still be read, so that ranges used before can be released.
            Several threads read batches, about in order.
        """
        with self._lock:
            self._steps_in_progress.discard(step)
            return min([*self._steps_in_progress, self._last_entered + 1])

    def until(self, step: int, /) -> Iterator[Fetch | Release]:
        """Yield the next events, to be applied while the batch of `step` is read.

        Fetches are planned ahead until about `limit` bytes are prefetched and not read yet. At most
        two are yielded by a call, since the batch of this step waits for the caller.
        """
        while self._fetched and self._fetched[0][0] <= step:  # all its batches were read
            self._bytes -= self._fetched.popleft()[1]
        for _ in range(2):
            below_limit = self._bytes < self.limit or self.next <= step + 1
            if self.enabled and below_limit and self.next < self._end:
                epoch_end = (self.next // self._epoch_steps + 1) * self._epoch_steps
                yield from self._events(min(self.next + self._steps_per_fetch, epoch_end))

    def _events(self, stop: int) -> Iterator[Fetch | Release]:
        """Yield the events of the steps [self.next, stop), which are of one epoch.

        The number of steps of the following fetch is halved or doubled, so that the bytes of a
        fetch are between an eighth and a quarter of the limit.
        """
        extents = self._extents(stop)
        yield Fetch(extents)
        if self._spans is not None and self._releases_spans:
            yield Release(self._spans.closed_before(stop))
        fetched_bytes = int((extents["stop"] - extents["start"]).sum())
        self._fetched.append((stop - 1, fetched_bytes))
        self._bytes += fetched_bytes
        self.next = stop
        if 4 * fetched_bytes > self.limit:
            self._steps_per_fetch = max(1, self._steps_per_fetch // 2)
        elif 8 * fetched_bytes < self.limit:
            self._steps_per_fetch = min(
                2 * self._steps_per_fetch, steps_per_draw(self._sampler.batch_size)
            )

    def _extents(self, stop: int) -> Extents:
        """Return the file ranges (`EXTENT`s) that steps [self.next, stop) are the first to use."""
        spans: Int64s | int = NO_SPAN
        if self._spans is None:
            records, steps = self.schedule.records(self.next, stop)
        else:
            records, steps, first_records = self._spans.records_before(stop)
            spans = first_records if self._releases_spans else NO_SPAN
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
    """Return the file ranges (`EXTENT`s) that contain fields of records, to prefetch them.

    Fields that are not within their shard are skipped: reading such a field raises the error.

    Args:
        index: says where each field lies.
        fields: their names.
        records: record ids.
        steps: the step that reads each record.
        spans: for each record the first record of its span, or `NO_SPAN`.
        gap: the longest gap, in bytes, between two fields that are fetched as one range.
    """
    rows = index.rows(fields, records)
    nonempty = rows["length"] > 0
    nonempty[outside(index, rows)] = False
    spans = np.repeat(np.broadcast_to(spans, len(records)), len(fields))[nonempty]
    return extents_of(rows[nonempty], spans, np.repeat(steps, len(fields))[nonempty], gap)


def extents_of(rows: Rows, spans: Int64s | int, steps: Int64s | int, gap: int, /) -> Extents:
    """Merge the byte ranges of rows of an index into `EXTENT`s, sorted by file and offset.

    Rows of one file and span with at most `gap` bytes between them share an extent, unless it would
    be longer than about `MAX_RANGE_BYTES`. Its step is the last step of these rows. For example,
    rows at offsets 0, 10 and 5000 of 10 bytes each, with a gap of 100, give [0, 20) and
    [5000, 5010).
    """
    order = np.lexsort((rows["offset"], rows["file"]))
    file, start = rows["file"][order], rows["offset"][order].astype(np.int64)
    stop = start + rows["length"][order]
    spans = np.broadcast_to(spans, len(rows))[order]
    steps = np.broadcast_to(steps, len(rows))[order]
    is_first = np.ones(len(order), bool)  # whether an extent begins with this row
    is_first[1:] = (
        (file[1:] != file[:-1]) | (start[1:] - stop[:-1] > gap) | (spans[1:] != spans[:-1])
    )
    # Divide long extents: `part` is the number of each row's part within its extent.
    first_row = np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))  # of each row
    part = (start - start[first_row]) // MAX_RANGE_BYTES
    is_first[1:] |= part[1:] != part[:-1]
    first = np.flatnonzero(is_first)
    extents = np.zeros(len(first), EXTENT)
    if len(first):
        extents["file"], extents["start"], extents["span"] = file[first], start[first], spans[first]
        extents["stop"] = np.maximum.reduceat(stop, first)
        extents["step"] = np.maximum.reduceat(steps, first)
    return extents


def outside(index: Index, rows: Rows, /) -> Int64s:
    """Return the positions of rows whose byte range is not within their shard, as int64[n]."""
    if index.container == "files":
        return np.zeros(0, np.int64)  # a row is a whole file, whose size is checked when it is read
    last_shard = len(index.shards) - 1
    sizes = index.shards["bytes"][np.minimum(rows["file"], last_shard)]
    inside = (rows["offset"] >= 0) & (rows["length"] >= 0)
    return np.flatnonzero(~inside | (rows["offset"] > sizes - rows["length"]))


def gap_of(index: Index, /) -> int:
    """Return the longest gap, in bytes, between two rows that are read as one range."""
    if not index.remote:
        return LOCAL_GAP
    mean_record_bytes = int(index.shards["bytes"].sum()) // max(1, len(index))
    return min(max(mean_record_bytes, _MIN_GAP), _MAX_GAP)
