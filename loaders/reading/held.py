"""Ranges of remote files that are fetched early, and held until they are read."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.remote import network
from twinfeed.loaders.remote.wire import wire

Read = Callable[[int, int, int, int], memoryview]
"""Return a range of a file, and the step of the batch that needs it: (file, start, stop, step)."""

_LOOK_BACK = 8
"""Ranges of a file that are tried for a row: the last so many that begin before the row."""

ROUNDS, ROWS = 16, 1 << 13
"""A range is out of use after `ROUNDS` rows for each held range, and `ROWS` more, were taken from
others. An open block gives a row every round or two. The planner tells a block again after a pause
half as long.
"""


class HeldRange:
    """Hold one range of a file: the requests for its pieces, and then its bytes."""

    def __init__(
        self, number: int, file: int, start: int, stop: int, *, uses: int, step: int
    ) -> None:
        self.number = number
        self.file = file
        self.start = start
        self.stop = stop
        self.uses = uses
        self.step = step
        self.plan = 0
        self.pins = 0
        self.touched: int | None = None  # how many rows had been taken when one was taken here
        self.pieces: list[Future[memoryview]] = []

    def begin(self, read: Read, *, soon: bool) -> None:
        """Ask for the pieces. Several pieces are brought to one buffer, as they come."""
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

    def hurry(self) -> None:
        """Let the pieces come before pieces that nobody waits for."""
        for piece in self.pieces:
            if not piece.running() and not piece.done():
                wire().hurry(piece)

    def data(self) -> memoryview:
        """Wait for the pieces, and return the bytes."""
        come = [piece.result() for piece in self.pieces]
        return come[0] if come else memoryview(b"")

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


class Ahead:
    """Fetch ranges in the order in which they are needed, and hold them until they are taken.

    - At most `NETWORK.held` bytes are fetched of which nothing was taken yet.
    - A range is dropped after all of its rows were taken.
    - Where more than `NETWORK.held` bytes are held in all, ranges that are out of use are dropped:
      those of a plan that was given up, and those that gave no row for long. A range in use stays,
      however much the stream has open. Otherwise each of its rows would be a request.

    Callers hold a lock.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._forget_all()

    def _forget_all(self) -> None:
        self._count = 0
        self._waiting: OrderedDict[int, HeldRange] = OrderedDict()
        self._held: OrderedDict[int, HeldRange] = OrderedDict()
        self._plan = self._rows = 0  # the number of the plan, and of the rows taken
        self._bytes = self._untouched = 0  # held; held for this plan and not taken from
        self._starts: dict[int, list[tuple[int, int]]] = {}

    def tell(self, extents: npt.NDArray[np.void], *, fresh: bool) -> None:
        """Add ranges that will be needed, in this order. A `fresh` plan ends the plan before."""
        if fresh:
            self._plan += 1
            self._untouched = 0
            while self._waiting:
                self._forget(self._waiting.popitem()[1])
        for file, start, stop, uses, step in extents.tolist():
            equal = [
                one for one in self._before(file, start) if (one.start, one.stop) == (start, stop)
            ]
            if equal:
                equal[0].uses += uses
                self._renew(equal[0])
                continue
            self._count += 1
            self._waiting[self._count] = one = HeldRange(
                self._count, file, start, stop, uses=uses, step=step
            )
            one.plan = self._plan
            places = self._starts.setdefault(file, [])
            places.insert(bisect_right(places, (start, self._count)), (start, self._count))
        self.begin()

    def find(self, file: int, start: int, stop: int) -> HeldRange | None:
        """Return the range that holds these bytes; of several ranges, the range told first."""
        found = [one for one in self._before(file, start) if one.stop >= stop]
        return min(found, key=lambda one: one.number, default=None)

    def _before(self, file: int, start: int) -> list[HeldRange]:
        """Return the last ranges that begin at or before a place."""
        places = self._starts.get(file, ())
        last = bisect_right(places, (start, self._count))
        numbers = [number for _, number in places[max(0, last - _LOOK_BACK) : last]]
        return [self._held.get(number) or self._waiting[number] for number in numbers]

    def need(self, ranges: Collection[HeldRange]) -> None:
        """Fetch these ranges now. None of these ranges is dropped to make room for another."""
        for one in ranges:
            one.pins += 1
            self._renew(one)
        for one in ranges:
            if one.number not in self._held:
                del self._waiting[one.number]
                self._hold(one, soon=True)
                continue
            self._held.move_to_end(one.number)
            if one.failed:  # before anybody needed it
                one.begin(self._read, soon=True)
            else:
                one.hurry()
        self._shed()

    def taken(self, one: HeldRange, rows: int) -> None:
        """Count rows that were taken from a range."""
        one.pins -= 1
        one.uses -= rows
        self._rows += rows
        if one.number in self._held:
            self._untouched -= self._size(one)
            one.touched = self._rows
        if one.uses <= 0 and not one.pins and one.number in self._held:
            self._drop(one)
        self.begin()

    def lost(self, one: HeldRange) -> None:
        """Forget a range that could not be read."""
        one.pins -= 1
        if one.number in self._held:
            self._drop(one)

    def begin(self) -> None:
        """Begin what there is room for."""
        while self._waiting:
            one = next(iter(self._waiting.values()))
            if self._untouched and self._untouched + one.stop - one.start > network.NETWORK.held:
                return
            del self._waiting[one.number]
            self._hold(one, soon=False)
        self._shed()

    def clear(self) -> None:
        """Give up everything."""
        for one in self._held.values():
            one.cancel()
        self._forget_all()

    def _hold(self, one: HeldRange, *, soon: bool) -> None:
        self._held[one.number] = one
        self._bytes += one.stop - one.start
        self._untouched += self._size(one)
        one.begin(self._read, soon=soon)

    def _size(self, one: HeldRange) -> int:
        """Return the bytes of a range of this plan from which nothing was taken, else 0."""
        return one.stop - one.start if one.plan == self._plan and one.touched is None else 0

    def _renew(self, one: HeldRange) -> None:
        """Make a range one of this plan."""
        if one.plan != self._plan:
            one.plan = self._plan
            if one.number in self._held:
                self._untouched += self._size(one)

    def _shed(self) -> None:
        """Drop ranges that are out of use for room, the range used longest ago first."""
        long_ago = self._rows - ROUNDS * len(self._held) - ROWS
        for one in list(self._held.values()) if self._bytes > network.NETWORK.held else ():
            given_up = one.plan != self._plan
            if not one.pins and (given_up or (one.touched is not None and one.touched < long_ago)):
                self._drop(one)
                if self._bytes <= network.NETWORK.held:
                    return

    def _drop(self, one: HeldRange) -> None:
        del self._held[one.number]
        self._bytes -= one.stop - one.start
        self._untouched -= self._size(one)
        one.cancel()
        self._forget(one)

    def _forget(self, one: HeldRange) -> None:
        places = self._starts[one.file]
        places.remove((one.start, one.number))
        if not places:
            del self._starts[one.file]
