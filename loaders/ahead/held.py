"""Ranges of remote files that are fetched early, and kept until they are read."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from heapq import heappop, heappush
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.ahead.ranges import ALONE, Rows
from twinfeed.loaders.ahead.spans import FAR
from twinfeed.loaders.ahead.uses import NOW
from twinfeed.loaders.remote import network
from twinfeed.loaders.remote.wire import wire

Read = Callable[[int, int, int, int], memoryview]
"""Return a range of a file, and the step of the batch that needs it: (file, start, stop, step)."""

_LOOK_BACK = 8
"""Ranges of a file that are tried for a row: the last so many that begin before the row."""


class HeldRange:
    """A range of a file: the requests for its pieces, and then its bytes."""

    def __init__(
        self, number: int, file: int, start: int, stop: int, *, step: int, last: int
    ) -> None:
        self.number = number
        self.file = file
        self.start = start
        self.stop = stop
        self.step, self.last = step, last  # the first and the last step that need the range
        self.pieces: list[Future[memoryview]] = []

    def begin(self, read: Read, *, soon: bool) -> None:
        """Request the pieces. Several pieces are copied to one buffer, as they come."""
        self.pieces = []
        size = network.NETWORK.piece
        if self.stop - self.start > size:
            read = partial(_read_into, np.empty(self.stop - self.start, np.uint8), self.start, read)
        for start in range(self.start, self.stop, size):
            stop = min(self.stop, start + size)
            call = partial(read, self.file, start, stop, self.step)
            self.pieces.append(wire().submit(call, stop - start, soon=soon))

    @property
    def failed(self) -> bool:
        """Whether a piece could not be read."""
        return any(one.done() and (one.cancelled() or one.exception()) for one in self.pieces)

    def cancel(self) -> None:
        """Cancel the requests that have not begun."""
        for piece in self.pieces:
            piece.cancel()


def _read_into(
    buffer: npt.NDArray[np.uint8],
    first: int,
    read: Read,
    file: int,
    start: int,
    stop: int,
    step: int,
) -> memoryview:
    """Read a piece into the buffer of its range, and return the buffer.

    numpy copies without the interpreter lock. Joining memoryviews would hold it.
    """
    np.copyto(
        buffer[start - first : stop - first], np.frombuffer(read(file, start, stop, step), np.uint8)
    )
    return buffer.data


def data_of(ranges: Iterable[HeldRange]) -> dict[HeldRange, memoryview]:
    """Wait for ranges, and return the bytes of each."""
    data: dict[HeldRange, memoryview] = {}
    for one in ranges:
        come = [piece.result() for piece in one.pieces]  # each is the buffer of the whole range
        data[one] = come[0] if come else memoryview(b"")
    return data


class Held:
    """Fetch ranges in the order in which they are needed, and keep them until they are passed.

    A range is dropped when the stream has passed the last step that needs the range. If the stream
    has not left a span yet, this step is not known. Callers hold a lock.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self.clear()

    def clear(self) -> None:
        """Cancel all requests, and drop all ranges."""
        for one in vars(self).get("_held", {}).values():
            one.cancel()
        self._count = 0
        self._bytes = 0
        self._held: dict[int, HeldRange] = {}
        self._starts: dict[int, list[tuple[int, int]]] = {}  # by file, sorted
        self._open: dict[int, list[HeldRange]] = {}  # by the span that is not left yet
        self._going: list[tuple[int, int]] = []  # a heap of the last step of each other range

    def begin(self, step: int, planned: int | None) -> None:
        """Begin a plan at this step, after a plan up to step `planned`; None drops its ranges."""
        if planned is None or self._bytes > network.NETWORK.held:
            self.clear()
        for span in list(self._open):
            self.left([(span, planned or step)])

    def tell(self, extents: npt.NDArray[np.void]) -> None:
        """Fetch ranges, in this order, unless they are here."""
        for file, start, stop, span, step in extents.tolist():
            last = step if span == ALONE else FAR
            equal = [
                one for one in self._before(file, start) if (one.start, one.stop) == (start, stop)
            ]
            if equal:
                one = equal[0]
                one.last = max(one.last, last)
            else:
                self._count += 1
                one = HeldRange(self._count, file, start, stop, step=step, last=last)
                self._held[one.number] = one
                self._bytes += stop - start
                insort(self._starts.setdefault(file, []), (start, one.number))
                one.begin(self._read, soon=False)
            if span == ALONE:
                heappush(self._going, (last, one.number))
            else:
                self._open.setdefault(span, []).append(one)

    def left(self, spans: Sequence[tuple[int, int]]) -> None:
        """Note the last step of each of these spans."""
        for span, last in spans:
            for one in self._open.pop(span, ()):
                one.last = last
                heappush(self._going, (last, one.number))

    def passed(self, step: int) -> None:
        """Drop the ranges that no batch from this step on needs."""
        while self._going and self._going[0][0] < step:
            one = self._held.get(heappop(self._going)[1])
            if one is not None and one.last < step:
                self.drop(one)

    def of_rows(self, rows: Rows) -> list[HeldRange | None]:
        """Return the range that each row lies in; a range of no bytes for an empty field."""
        nothing = HeldRange(0, 0, 0, 0, step=NOW, last=NOW)
        return [
            self.find(file, offset, offset + length) if length else nothing
            for offset, length, file, _ in rows.tolist()
        ]

    def find(self, file: int, start: int, stop: int) -> HeldRange | None:
        """Return the range that these bytes lie in; of several, the range requested first."""
        found = [one for one in self._before(file, start) if one.stop >= stop]
        return min(found, key=attrgetter("number"), default=None)

    def _before(self, file: int, start: int) -> list[HeldRange]:
        """Return the last ranges that begin at or before a place."""
        places = self._starts.get(file, [])
        last = bisect_right(places, (start, self._count))
        return [self._held[number] for _, number in places[max(0, last - _LOOK_BACK) : last]]

    def need(self, ranges: Collection[HeldRange]) -> None:
        """Fetch these ranges now."""
        for one in ranges:
            if one.failed:  # before anybody needed it
                one.begin(self._read, soon=True)
        wire().prefer([piece for one in ranges for piece in one.pieces])

    def drop(self, one: HeldRange) -> None:
        """Drop a range."""
        if self._held.pop(one.number, None) is None:
            return
        self._bytes -= one.stop - one.start
        one.cancel()
        places = self._starts[one.file]
        places.remove((one.start, one.number))
        if not places:
            del self._starts[one.file]
