"""A buffer of ranges of remote files: fetched before they are used, released after."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.reading.prefetch.eviction import CURRENT_STEP
from twinfeed.loaders.reading.prefetch.ranges import (
    MOST_AT_ONCE,
    NO_SPAN,
    Rows,
    extent_of,
    near_rows,
    pieces_of,
)
from twinfeed.loaders.reading.prefetch.read_plan import Fetch, Release
from twinfeed.loaders.reading.prefetch.spans import NO_STEP
from twinfeed.loaders.storage import retries
from twinfeed.loaders.storage.request_pool import request_pool

Read = Callable[[int, int, int, int], memoryview]
"""Return a range of a file, and the step of the batch that needs it: (file, start, stop, step)."""

_LOOK_BACK = 8
"""Ranges of a file that are tried for a row: the last so many that begin before the row."""


class BufferedRange:
    """A range of a file: the requests for its pieces, and then its bytes."""

    def __init__(self, number: int, file: int, start: int, stop: int, step: int, last: int) -> None:
        self.number = number
        self.file = file
        self.start = start
        self.stop = stop
        self.step, self.last = step, last  # the first and the last step that use the range
        self.pieces: list[Future[memoryview]] = []

    def request(self, read: Read, *, urgent: bool) -> None:
        """Request the pieces. Several pieces are copied to one buffer, as they come."""
        size = retries.NETWORK.part_bytes
        several = self.stop - self.start > size
        buffer = np.empty(self.stop - self.start, np.uint8) if several else None
        self.pieces = []
        for start in range(self.start, self.stop, size):
            stop = min(self.stop, start + size)
            call = partial(self._piece, read, start, stop, buffer)
            self.pieces.append(request_pool().submit(call, stop - start, urgent=urgent))

    def _piece(
        self, read: Read, start: int, stop: int, buffer: npt.NDArray[np.uint8] | None
    ) -> memoryview:
        """Return a piece, or the buffer of the whole range, with the piece in it."""
        data = read(self.file, start, stop, self.step)
        if buffer is None:
            return data
        # numpy copies without the interpreter lock. Joining memoryviews would hold it.
        np.copyto(buffer[start - self.start : stop - self.start], np.frombuffer(data, np.uint8))
        return buffer.data

    @property
    def failed(self) -> bool:
        """Whether a piece could not be read."""
        for piece in self.pieces:
            if piece.done() and (piece.cancelled() or piece.exception()):
                return True
        return False

    def cancel(self) -> None:
        """Cancel the requests that have not begun."""
        for piece in self.pieces:
            piece.cancel()

    @property
    def data(self) -> memoryview:
        """The bytes, which this waits for."""
        data = memoryview(b"")
        for piece in self.pieces:
            data = piece.result()  # of several pieces, each is the buffer of the whole range
        return data


class RangeBuffer:
    """Fetch the ranges of a `ReadPlan`, and keep each until its last step is over.

    `gap` is the longest gap between two rows that are read in one piece. For a block that is still
    open, the last step is not known yet: it is `NO_STEP` until a `Release` names it. Several
    threads may call.
    """

    def __init__(self, read: Read, gap: int) -> None:
        self._read, self._gap = read, gap
        self._lock = threading.Lock()
        self._ranges: dict[int, BufferedRange] = {}
        self._count = 0  # of all ranges, so that no number comes twice
        self._clear()

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Yield the file, the start and the stop of each range."""
        return iter([(entry.file, entry.start, entry.stop) for entry in self._ranges.values()])

    def clear(self) -> None:
        """Cancel all requests, and drop all ranges."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        for entry in self._ranges.values():
            entry.cancel()
        self._bytes = 0
        self._ranges = {}
        # By file, sorted by start and number.
        self._starts: dict[int, list[tuple[int, int, BufferedRange]]] = {}
        # By the span that is not closed yet, and by the last step.
        self._open: defaultdict[int, list[BufferedRange]] = defaultdict(list)
        self._ending: defaultdict[int, list[BufferedRange]] = defaultdict(list)

    def start_plan(self, step: int, previous_end: int | None, /) -> None:
        """Start a plan at this step. Ranges of the plan before, up to step `previous_end`, are kept
        as long as that plan needs them; with None, or above `buffer_bytes`, they are dropped.
        """
        with self._lock:
            if previous_end is None or self._bytes > retries.NETWORK.buffer_bytes:
                self._clear()
            self._close((span, previous_end or step) for span in list(self._open))

    def apply(self, event: Fetch | Release, /) -> None:
        """Submit the requests of an event, or note the last step of its blocks."""
        with self._lock:
            if isinstance(event, Release):
                self._close(event.last_steps)
            else:
                for extent in event.ranges.tolist():
                    self._submit(*extent)

    def _submit(self, file: int, start: int, stop: int, span: int, step: int) -> None:
        """Fetch a range, unless it is here."""
        last = step if span == NO_SPAN else NO_STEP
        for _, _, entry in self._before(file, start):
            if (entry.start, entry.stop) == (start, stop):
                entry.last = max(entry.last, last)
                break
        else:
            self._count += 1
            entry = BufferedRange(self._count, file, start, stop, step, last)
            self._ranges[entry.number] = entry
            self._bytes += stop - start
            insort(self._starts.setdefault(file, []), (start, entry.number, entry))
            entry.request(self._read, urgent=False)
        (self._ending[last] if span == NO_SPAN else self._open[span]).append(entry)

    def _close(self, last_steps: Iterable[tuple[int, int]]) -> None:
        for span, last in last_steps:
            for entry in self._open.pop(span, ()):
                entry.last = last
                self._ending[last].append(entry)

    def release_before(self, step: int, /) -> None:
        """Drop the ranges that no batch from this step on needs."""
        with self._lock:
            for last in [last for last in self._ending if last < step]:
                for entry in self._ending.pop(last):
                    if entry.last < step:  # no later step has asked for it since
                        self._drop(entry)

    def of_rows(self, rows: Rows, /) -> list[BufferedRange]:
        """Return the range of each row: buffered, or requested now for rows near each other.

        A range that was fetched ahead and has failed is requested again.
        """
        nothing = BufferedRange(0, 0, 0, 0, CURRENT_STEP, CURRENT_STEP)  # of an empty field
        with self._lock:
            found = [
                self._find(file, offset, offset + length) if length else nothing
                for offset, length, file, _ in rows.tolist()
            ]
            missing = np.array([n for n, entry in enumerate(found) if entry is None], np.int64)
            lone = rows[missing]
            for first, last in pieces_of(lone, near_rows(lone, self._gap, MOST_AT_ONCE)):
                file = int(lone["file"][first])
                extent = extent_of(lone[first:last])
                entry = BufferedRange(0, file, *extent, CURRENT_STEP, CURRENT_STEP)
                entry.request(self._read, urgent=True)
                for place in missing[first:last].tolist():
                    found[place] = entry
            ranges = [entry for entry in found if entry is not None]
            buffered = [entry for entry in dict.fromkeys(ranges) if entry.number]
            for entry in buffered:
                if entry.failed:  # before a batch needed it
                    entry.request(self._read, urgent=True)
            request_pool().promote([piece for entry in buffered for piece in entry.pieces])
        return ranges

    def _find(self, file: int, start: int, stop: int) -> BufferedRange | None:
        """Return the range that these bytes lie in; of several, the range requested first."""
        found = None
        for _, number, entry in self._before(file, start):
            if entry.stop >= stop and (found is None or number < found.number):
                found = entry
        return found

    def _before(self, file: int, start: int) -> list[tuple[int, int, BufferedRange]]:
        """Return the last ranges that begin at or before a place."""
        places = self._starts.get(file, [])
        last = bisect_right(places, (start, self._count + 1))
        return places[max(0, last - _LOOK_BACK) : last]

    def drop(self, ranges: Iterable[BufferedRange], /) -> None:
        """Drop ranges, so that they are requested again."""
        with self._lock:
            for entry in ranges:
                self._drop(entry)

    def _drop(self, entry: BufferedRange) -> None:
        if self._ranges.pop(entry.number, None) is None:
            return
        self._bytes -= entry.stop - entry.start
        entry.cancel()
        places = self._starts[entry.file]
        places.remove((entry.start, entry.number, entry))
        if not places:
            del self._starts[entry.file]
