"""Ranges of files to bytes: local shards through few open files, and loose files.

A fetcher takes rows of an index's tables, sorted by file and offset, and returns the checked bytes
of each row. Small neighbours are read in one piece. _remote.py has the fetcher of remote shards.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from io import FileIO

import numpy as np

from twinfeed.loaders.ahead.plan import Fetch, ReadPlan, Release
from twinfeed.loaders.ahead.ranges import (
    LOCAL_GAP,
    SMALL,
    Extents,
    Rows,
    extent_of,
    many_near,
    near_rows,
    pieces_of,
)
from twinfeed.loaders.errors import IndexFormatError, LoaderError
from twinfeed.loaders.formats.files import Places
from twinfeed.loaders.index import Index
from twinfeed.loaders.index.arrays import StringColumn
from twinfeed.loaders.index.paths import below, join, stale_file
from twinfeed.loaders.reading._handles import Handles
from twinfeed.loaders.reading.fetcher import Fetcher, WrongBytes, cut_rows
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.support.checksum import crc32c, crc32c_of_each
from twinfeed.loaders.support.regular import open_regular, read_at
from twinfeed.loaders.support.system import advise, cold

_PROBED = 16
"""Ranges that are probed for whether reading waits: a few may be in memory by chance."""

Opened = Callable[[Extents], Iterator[tuple[int, int, int]]]
"""Yield the descriptor, the start and the stop of each range whose file can be opened."""


class Advice:
    """Advise the kernel of what a plan will read, on a thread that ends after the last advice.

    The calls need a thread: each call takes memory for its pages, and waits for a busy disk.
    """

    def __init__(self) -> None:
        self._waiting: deque[Iterator[tuple[int, int, int]]] = deque()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def apply(self, opened: Opened, plan: ReadPlan, event: Fetch | Release, /) -> None:
        """Advise of the ranges of an event, or disable a probing plan that nothing would wait for.

        The page cache of the kernel needs no `Release`.
        """
        if isinstance(event, Release):
            return
        if plan.probing:
            some = event.ranges[:: max(1, len(event.ranges) // _PROBED)][:_PROBED]
            plan.enabled = any(cold(fd, stop - 1) for fd, _, stop in opened(some))
            plan.probing = False
        if plan.enabled:
            self.add(opened(event.ranges))

    def add(self, opened: Iterator[tuple[int, int, int]], /) -> None:
        """Advise of ranges of open files, after those that wait."""
        self._stopped = False
        self._waiting.append(opened)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="twinfeed-advice")
            self._thread.start()

    def close(self) -> None:
        """Stop the advice."""
        self._stopped = True
        self._waiting.clear()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with suppress(IndexError):  # nothing waits
            while not self._stopped:
                for fd, start, stop in self._waiting.popleft():
                    if self._stopped:
                        break
                    advise(fd, start, stop - start, "WILLNEED")


class LocalShards(Fetcher):
    """Read local shards with `os.pread`.

    Nothing is mapped: a mapped shard that shrinks kills the process. Here it raises an error.
    """

    def __init__(self, index: Index, checksums: bool, max_open_files: int) -> None:
        super().__init__(index, checksums)
        self.handles = Handles(partial(open_shard, index), max_open_files)
        self.most_held = max(1, max_open_files // 4)
        self._advice = Advice()

    def close(self) -> None:
        """Close the shards."""
        super().close()
        self._advice.close()
        self.handles.close()

    def fetch(self, rows: Rows, /, *, neighbours: bool = True) -> list[bytes]:
        """Return the bytes of each row."""
        files = rows["file"].tolist()
        numbers = dict.fromkeys(files)
        if len(numbers) > self.most_held:
            return self._by_file(rows)
        handles = self.handles.get(numbers)
        fds = [handles[file].fd for file in files]
        near = near_rows(rows, LOCAL_GAP, SMALL) if neighbours else None
        if near is None or not many_near(near):
            return self._each(rows, fds)
        out: list[bytes] = []
        for first, last in pieces_of(rows, near):
            offset, end = extent_of(rows[first:last])
            piece = read_at(fds[first], end - offset, offset)
            out += cut_rows(piece, rows[first:last], self.checksums, first)
        return out

    def _by_file(self, rows: Rows) -> list[bytes]:
        """Read rows of more files than may be open at once, in groups of files."""
        order = np.argsort(rows["file"], kind="stable")
        out = [b""] * len(rows)
        for places in self._groups(rows, order):
            try:
                data = self.fetch(rows[places])
            except WrongBytes as wrong:
                raise WrongBytes(int(places[wrong.place]), wrong.found) from None
            for place, item in zip(places.tolist(), data, strict=True):
                out[place] = item
        return out

    def _groups(self, rows: Rows, order: Int64s) -> list[Int64s]:
        """Cut `order`, sorted by file, so that each piece has few enough files to keep open."""
        files = rows["file"][order]
        changes = np.flatnonzero(files[1:] != files[:-1]) + 1
        return np.split(order, changes[self.most_held - 1 :: self.most_held])

    def before_read(self, plan: ReadPlan, step: int, /) -> None:
        """Advise the kernel of what coming batches read."""
        plan.enter(step, partial(self._advice.apply, self._opened, plan))

    def _opened(self, extents: Extents) -> Iterator[tuple[int, int, int]]:
        """Yield the descriptor, the start and the stop of each extent whose file can be read."""
        known, handle = -1, None
        for file, start, stop, *_ in extents.tolist():
            if file != known:
                known, handle = file, None
                with suppress(LoaderError, OSError):  # reading the file raises the error
                    handle = self.handles.get([file])[file]
            if handle is not None:
                yield handle.fd, start, stop

    def _each(self, rows: Rows, fds: list[int]) -> list[bytes]:
        """Read row by row: the loop that most reading happens in."""
        lengths = rows["length"].tolist()
        out = list(map(os.pread, fds, lengths, rows["offset"].tolist()))
        if list(map(len, out)) != lengths:  # cut at 2 GiB, or by the end of the file
            out = list(map(read_at, fds, lengths, rows["offset"].tolist()))
            if list(map(len, out)) != lengths:
                raise _first_wrong(out, map(len, out), lengths)
        if self.checksums:
            crcs = rows["crc"].tolist()
            found = crc32c_of_each(out)
            if found != crcs:
                raise _first_wrong(out, found, crcs)
        return out


def open_shard(index: Index, number: int) -> int:
    """Return the descriptor of a shard, which must have the size it was indexed with."""
    path = _path(index, index.shard_paths, number)
    below(index.root, index.shard_paths[number])
    return _descriptor(path, int(index.shards["bytes"][number]))


def _first_wrong(data: list[bytes], found: Iterable[int], expected: list[int]) -> WrongBytes:
    """Return the error of the first bytes with a wrong length or checksum."""
    pairs = enumerate(zip(found, expected, strict=True))
    place = next(place for place, (one, other) in pairs if one != other)
    return WrongBytes(place, data[place])


def _path(index: Index, paths: StringColumn, number: int) -> str:
    """Return the path of the file that a row names; raise IndexFormatError for a wrong number."""
    if number >= len(paths):
        raise IndexFormatError(
            "damaged index: a record lies in a file that it does not name",
            path=index.where,
            expected=f"a file below {len(paths)}",
            found=number,
        )
    return join(index.root, paths[number])


def _descriptor(path: str, length: int) -> int:
    """Open a file, which must be there and as long as when it was indexed."""
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        gone = "no such file any more: restore the file, or build the index again"
        raise FileNotFoundError(errno.ENOENT, gone, path) from None
    size = os.fstat(fd).st_size
    if size != length:
        os.close(fd)
        raise stale_file(path, length, size)
    return fd


class WholeFiles(Fetcher):
    """Read files one by one, each opened for one reading."""

    def __init__(self, index: Index, checksums: bool) -> None:
        super().__init__(index, checksums)
        self.places = Places(index.root)
        self._advice = Advice()

    def open(self, number: int, length: int) -> FileIO:
        """Open a file, which must be as long as when it was indexed."""
        _path(self.index, self.index.files, number)
        place = self.places.find(self.index.files[number])
        return FileIO(_descriptor(place, length))

    def fetch(self, rows: Rows, /, *, neighbours: bool = True) -> list[bytes]:
        """Return the bytes of each row."""
        out = []
        for place, (_, length, file, crc) in enumerate(rows.tolist()):
            with self.open(file, length) as opened:
                data = read_at(opened.fileno(), length, 0)
            if len(data) != length or (self.checksums and crc32c(data) != crc):
                raise WrongBytes(place, data)
            out.append(data)
        return out

    def before_read(self, plan: ReadPlan, step: int, /) -> None:
        """Advise the kernel of what coming batches read."""
        plan.enter(step, partial(self._advice.apply, self._opened, plan))

    def close(self) -> None:
        """Stop the advice."""
        super().close()
        self._advice.close()

    def _opened(self, extents: Extents) -> Iterator[tuple[int, int, int]]:
        """Yield the descriptor, the start and the stop of each extent whose file can be read."""
        for file, start, stop, *_ in extents.tolist():
            with suppress(LoaderError, OSError), self.open(file, stop - start) as opened:
                yield opened.fileno(), start, stop
