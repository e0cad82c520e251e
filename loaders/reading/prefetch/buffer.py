"""A buffer of ranges of remote files: fetched before they are used, released after."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.reading.prefetch.eviction import CURRENT_STEP
from twinfeed.loaders.reading.prefetch.read_plan import (
    NO_SPAN,
    Fetch,
    Release,
    Rows,
    extents_of,
)
from twinfeed.loaders.reading.prefetch.spans import NO_STEP
from twinfeed.loaders.storage import retries
from twinfeed.loaders.storage.request_pool import request_pool

Read = Callable[[int, int, int, int], memoryview]
"""Return a range of a file, and the step of the batch that needs it: (file, start, stop, step)."""

_MAX_CANDIDATES = 8
"""A row is searched in this many buffered ranges: the last ones that begin before the row."""


class BufferedRange:
    """A range of a remote file that is buffered: the requests for its parts, and then its bytes."""

    def __init__(self, number: int, file: int, start: int, stop: int, step: int) -> None:
        self.number = number
        self.file = file
        self.start = start
        self.stop = stop
        self.step = self.last = step  # the first and the last step that use the range
        self.parts: list[Future[memoryview]] = []
        self.failed = False  # whether a part could not be read

    def request(self, read: Read, *, urgent: bool) -> None:
        """Submit requests for the range, in parts of `part_bytes`, to the request pool.

        Several parts are copied to one buffer. `urgent` requests come before all that prefetch.
        """
        size = retries.NETWORK.part_bytes
        has_several_parts = self.stop - self.start > size
        buffer = np.empty(self.stop - self.start, np.uint8) if has_several_parts else None
        self.parts, self.failed = [], False
        for start in range(self.start, self.stop, size):
            stop = min(self.stop, start + size)
            call = partial(self._read_part, read, start, stop, buffer)
            self.parts.append(request_pool().submit(call, stop - start, urgent=urgent))

    def _read_part(
        self, read: Read, start: int, stop: int, buffer: npt.NDArray[np.uint8] | None
    ) -> memoryview:
        """Read the bytes [start, stop) of the file.

        Returns:
            The bytes; or, if the range has several parts, the buffer of the whole range, to which
            they were copied.
        """
        try:
            data = read(self.file, start, stop, self.step)
        except BaseException:
            self.failed = True
            raise
        if buffer is None:
            return data
        # numpy copies without the interpreter lock. Joining memoryviews would hold it.
        np.copyto(buffer[start - self.start : stop - self.start], np.frombuffer(data, np.uint8))
        return buffer.data

    def cancel(self) -> None:
        """Cancel those requests for the range that have not started."""
        for part in self.parts:
            part.cancel()

    @property
    def data(self) -> memoryview:
        """The bytes of the range; blocks until all parts have been read."""
        data = memoryview(b"")
        for part in self.parts:
            data = part.result()  # the single part, or the buffer of the whole range
        return data


_NUMBER = attrgetter("number")

_EMPTY = BufferedRange(0, 0, 0, 0, CURRENT_STEP)
"""The range of an empty field."""


class RangeBuffer:
    """The prefetched ranges of a `ReadPlan`, each kept until the last step that uses it is over.

    `gap` is the longest gap, in bytes, between two rows that are fetched by one request. A span is
    a block of records that the stream reads around the same time. While a span is open, its last
    step is not known: it is `NO_STEP` until a `Release` names it. Thread-safe.
    """

    def __init__(self, read: Read, gap: int) -> None:
        self._read, self._gap = read, gap
        self._lock = threading.Lock()
        self._ranges: dict[tuple[int, int, int], BufferedRange] = {}  # by file, start and stop
        self._count = 0  # of all ranges that were ever prefetched
        self._clear()

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Yield the file, the start and the stop of each range."""
        return iter([*self._ranges])

    def clear(self) -> None:
        """Cancel all requests, and drop all ranges."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        """Cancel all requests, and drop all ranges. The caller has the lock."""
        for entry in self._ranges.values():
            entry.cancel()
        self._bytes = 0
        self._ranges = {}
        self._sorted_keys: list[tuple[int, int, int]] = []  # of `_ranges`
        # Ranges of spans that are not closed yet, and ranges whose last step is known.
        self._by_open_span: defaultdict[int, list[BufferedRange]] = defaultdict(list)
        self._by_last_step: defaultdict[int, list[BufferedRange]] = defaultdict(list)

    def start_plan(self, step: int, previous_end: int | None, /) -> None:
        """Prepare the buffer for a new `ReadPlan` that starts at this step.

        The ranges that the previous plan has prefetched, up to its step `previous_end`, are kept
        until that step. They are dropped if `previous_end` is None, or if they take more memory
        than `buffer_bytes`.
        """
        with self._lock:
            if previous_end is None or self._bytes > retries.NETWORK.buffer_bytes:
                self._clear()
            self._close((span, previous_end or step) for span in list(self._by_open_span))

    def apply(self, event: Fetch | Release, /) -> None:
        """Do what an event of the plan says.

        `Fetch`: request its ranges. `Release`: store the last step that uses each of its spans.
        """
        with self._lock:
            if isinstance(event, Release):
                self._close(event.last_steps)
            else:
                for extent in event.ranges.tolist():
                    self._submit(*extent)

    def _submit(self, file: int, start: int, stop: int, span: int, step: int) -> None:
        """Request the bytes [start, stop) of a file, unless they are buffered.

        They are kept until the span (a block of records) is closed; or, without a span, until
        after `step`.
        """
        entry = self._ranges.get((file, start, stop))
        if entry is None:
            self._count += 1
            entry = BufferedRange(self._count, file, start, stop, step)
            self._ranges[file, start, stop] = entry
            self._bytes += stop - start
            insort(self._sorted_keys, (file, start, stop))
            entry.request(self._read, urgent=False)
        if span == NO_SPAN:
            entry.last = max(entry.last, step)
            self._by_last_step[step].append(entry)
        else:
            entry.last = NO_STEP
            self._by_open_span[span].append(entry)

    def _close(self, last_steps: Iterable[tuple[int, int]]) -> None:
        """Store the last step that uses each span; `last_steps` are pairs (span, last step).

        `release_before` drops the ranges of a span after its last step.
        """
        for span, last in last_steps:
            for entry in self._by_open_span.pop(span, ()):
                entry.last = last
                self._by_last_step[last].append(entry)

    def release_before(self, step: int, /) -> None:
        """Drop the ranges whose last use is before this step."""
        with self._lock:
            for last in [last for last in self._by_last_step if last < step]:
                for entry in self._by_last_step.pop(last):
                    if entry.last < step:  # else a later step has requested the range since
                        self._drop(entry)

    def of_rows(self, rows: Rows, /) -> list[BufferedRange]:
        """Return for each row of the index the range that its bytes lie in.

        A range that is not buffered, or whose prefetch has failed, is requested now. Requests that
        have not started are moved to the front of the queue.
        """
        with self._lock:
            found = [
                self._find(file, offset, offset + length) if length else _EMPTY
                for offset, length, file, _ in rows.tolist()
            ]
            buffered = [entry for entry in dict.fromkeys(found) if entry]  # without duplicates
            for entry in buffered:
                if entry.failed:
                    entry.request(self._read, urgent=True)
            waiting = [part for entry in buffered for part in entry.parts if not part.done()]
        if waiting:
            request_pool().promote(waiting)
        requested = iter(self._request_now(rows[[entry is None for entry in found]]))
        return [entry or next(requested) for entry in found]

    def _request_now(self, rows: Rows) -> list[BufferedRange]:
        """Request rows that were not prefetched, and return the range that each row lies in.

        Rows near each other share a range. The ranges are not kept in the buffer: only the batch
        that is read now uses them.
        """
        if not len(rows):
            return []
        extents = extents_of(rows, NO_SPAN, CURRENT_STEP, self._gap)
        ranges = [
            BufferedRange(0, file, start, stop, step)
            for file, start, stop, _, step in extents.tolist()
        ]
        # The range of a row is the last one that starts at or before the row.
        starts = [(entry.file, entry.start) for entry in ranges]
        range_of_rows = [
            ranges[bisect_right(starts, (file, offset)) - 1] for offset, _, file, _ in rows.tolist()
        ]
        for entry in dict.fromkeys(range_of_rows):
            entry.request(self._read, urgent=True)
        return range_of_rows

    def _find(self, file: int, start: int, stop: int) -> BufferedRange | None:
        """Return the buffered range that contains the bytes [start, stop) of a file, or None.

        If several ranges contain them, return the one that was requested first.
        """
        # The keys are (file, start, stop): search those that start last at or before `start`.
        end = bisect_right(self._sorted_keys, (file, start, NO_STEP))
        candidates = self._sorted_keys[max(0, end - _MAX_CANDIDATES) : end]
        found = [self._ranges[key] for key in candidates if key[0] == file and key[2] >= stop]
        return min(found, key=_NUMBER, default=None)

    def drop(self, ranges: Iterable[BufferedRange], /) -> None:
        """Drop ranges (whose bytes turned out to be wrong), so that they are requested again."""
        with self._lock:
            for entry in ranges:
                self._drop(entry)

    def _drop(self, entry: BufferedRange) -> None:
        """Remove a range from the buffer, if it is still there, and cancel its requests."""
        key = entry.file, entry.start, entry.stop
        if self._ranges.get(key) is entry:
            del self._ranges[key], self._sorted_keys[bisect_left(self._sorted_keys, key)]
            self._bytes -= entry.stop - entry.start
            entry.cancel()
