"""Ranges of local files to bytes, through few open files."""

from __future__ import annotations

import errno
import operator
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.errors import IndexFormatError, LoaderError
from twinfeed.loaders.formats.files import PathResolver
from twinfeed.loaders.index import Index
from twinfeed.loaders.index.arrays import StringColumn
from twinfeed.loaders.index.paths import join, resolve_below, stale_file_error
from twinfeed.loaders.reading.checked import WrongBytes, cut_rows
from twinfeed.loaders.reading.handles import Handle, Handles, default_limit
from twinfeed.loaders.reading.prefetch.read_plan import (
    MOST_AT_ONCE,
    Extents,
    Fetch,
    ReadPlan,
    Release,
    Rows,
)
from twinfeed.loaders.support.checksum import crc32c_of_each
from twinfeed.loaders.support.regular import open_regular, read_at
from twinfeed.loaders.support.system import advise, is_uncached

_SMALL, _GAP = 1 << 14, 1 << 12
"""Rows of at most so many bytes, with a gap of at most so many bytes between two, are read by one
call. For longer rows the second copy costs more than the saved call.
"""

_PROBED = 16
"""Ranges that are probed for whether reading waits: a few may be in memory by chance."""


class LocalFiles:
    """Read local shards, or loose files, with `os.pread`.

    Shards stay open. Each loose file is opened for one reading. Nothing is mapped: a mapped shard
    that shrinks kills the process. Here it raises an error. For a plan, the kernel is advised of
    what will be read.
    """

    def __init__(self, index: Index, checksums: bool, max_open_files: int | None) -> None:
        self.index, self.checksums = index, checksums
        limit = max_open_files or default_limit()
        self.handles = Handles(partial(open_shard, index), limit)
        self._max_files = max(1, limit // 4)
        self.paths = PathResolver(index.root) if index.container == "files" else None
        self.advice = Advice()

    def close(self) -> None:
        """Stop the advice, and close the shards."""
        self.advice.close()
        self.handles.close()

    def read(self, rows: Rows, /, *, neighbours: bool = True) -> list[bytes]:
        """Return the bytes of each row. Small neighbours are read in one piece."""
        if self.paths is not None:
            return self._read_loose(rows)
        files = rows["file"].tolist()
        numbers = dict.fromkeys(files)
        if len(numbers) > self._max_files:
            return self._by_file(rows)
        handles = self.handles.get(numbers)
        fds = [handles[file].fd for file in files]
        if not neighbours or not many_near(near := near_rows(rows)):
            return self._read_rows(rows, fds)
        out: list[bytes] = []
        for first, last in _ranges_of(rows, near):
            offset = int(rows["offset"][first])
            end = int(rows["offset"][last - 1] + rows["length"][last - 1])
            data = read_at(fds[first], end - offset, offset)
            out += cut_rows(data, rows[first:last], self.checksums, first)
        return out

    def _by_file(self, rows: Rows) -> list[bytes]:
        """Read rows of more files than may be open at once, in groups of files."""
        order = np.argsort(rows["file"], kind="stable")
        out = [b""] * len(rows)
        changes = np.flatnonzero(np.diff(rows["file"][order])) + 1
        for numbers in np.split(order, changes[self._max_files - 1 :: self._max_files]):
            try:
                data = self.read(rows[numbers])
            except WrongBytes as error:
                raise WrongBytes(int(numbers[error.row]), error.found) from None
            for number, row_data in zip(numbers.tolist(), data, strict=True):
                out[number] = row_data
        return out

    def _read_loose(self, rows: Rows) -> list[bytes]:
        """Read loose files one by one."""
        out: list[bytes] = []
        for number, (_, length, file, _) in enumerate(rows.tolist()):
            handle = self._handle(file, length)
            data = read_at(handle.fd, length, 0)
            out += cut_rows(data, rows[number : number + 1], self.checksums, number)
        return out

    def _handle(self, file: int, length: int) -> Handle:
        """Return an open file. A loose file must be as long as when it was indexed."""
        if self.paths is None:
            return self.handles.get([file])[file]
        path_of(self.index, self.index.files, file)
        return Handle(open_unchanged(self.paths.resolve(self.index.files[file]), length))

    def apply(self, plan: ReadPlan, event: Fetch | Release, /) -> None:
        """Advise the kernel of the ranges of an event, or disable a probing plan that nothing would
        wait for. The page cache of the kernel needs no `Release`.
        """
        if isinstance(event, Release):
            return
        if plan.probing:
            probed = event.ranges[:: max(1, len(event.ranges) // _PROBED)][:_PROBED]
            plan.enabled = any(is_uncached(fd, stop - 1) for fd, _, stop in self.opened(probed))
            plan.probing = False
        if plan.enabled:
            self.advice.add(self.opened(event.ranges))

    def opened(self, extents: Extents, /) -> Iterator[tuple[int, int, int]]:
        """Yield the descriptor, the start and the stop of each extent whose file can be read."""
        for file, start, stop, *_ in extents.tolist():
            with suppress(LoaderError, OSError):  # reading the file raises the error
                handle = self._handle(file, stop - start)
                yield handle.fd, start, stop

    def _read_rows(self, rows: Rows, fds: list[int]) -> list[bytes]:
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


class Advice:
    """Advise the kernel of ranges of open files, on a thread that ends after the last advice.

    The calls need a thread: each call takes memory for its pages, and waits for a busy disk.
    """

    def __init__(self) -> None:
        self._waiting: deque[Iterator[tuple[int, int, int]]] = deque()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, ranges: Iterator[tuple[int, int, int]], /) -> None:
        """Advise of ranges (descriptor, start, stop), after those that wait."""
        self._stopped = False
        self._waiting.append(ranges)
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


def open_shard(index: Index, number: int) -> int:
    """Return the descriptor of a shard, which must have the size it was indexed with."""
    path = path_of(index, index.shard_paths, number)
    resolve_below(index.root, index.shard_paths[number])
    return open_unchanged(path, int(index.shards["bytes"][number]))


def _first_wrong(data: list[bytes], found: Iterable[int], expected: list[int]) -> WrongBytes:
    """Return the error of the first bytes with a wrong length or checksum."""
    row = [*map(operator.eq, found, expected)].index(False)
    return WrongBytes(row, data[row])


def path_of(index: Index, paths: StringColumn, number: int) -> str:
    """Return the path of the file that a row names; raise IndexFormatError for a wrong number."""
    if number >= len(paths):
        raise IndexFormatError(
            "damaged index: a record lies in a file that it does not name",
            path=index.where,
            expected=f"a file below {len(paths)}",
            found=number,
        )
    return join(index.root, paths[number])


def open_unchanged(path: str, length: int) -> int:
    """Open a file, which must be there and as long as when it was indexed."""
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        problem = "no such file any more: restore the file, or build the index again"
        raise FileNotFoundError(errno.ENOENT, problem, path) from None
    size = os.fstat(fd).st_size
    if size != length:
        os.close(fd)
        raise stale_file_error(path, length, size)
    return fd


def near_rows(rows: Rows, /) -> npt.NDArray[np.bool_]:
    """Return for each row but the first whether it is small, and soon after a small row."""
    offset, length, file = rows["offset"], rows["length"], rows["file"]
    gap = offset[1:] - (offset[:-1] + length[:-1])
    near: npt.NDArray[np.bool_] = (gap >= 0) & (gap <= _GAP) & (file[1:] == file[:-1])
    near &= (length[1:] <= _SMALL) & (length[:-1] <= _SMALL)
    return near


def many_near(near: npt.NDArray[np.bool_], /) -> bool:
    """Return whether enough rows lie close together to be read by ranges of several rows."""
    return 4 * int(np.count_nonzero(near)) > len(near)


def _ranges_of(rows: Rows, near: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of the rows that are read by one call."""
    offsets, ends = rows["offset"].tolist(), (rows["offset"] + rows["length"]).tolist()
    first = 0
    for last, is_near in enumerate(near.tolist(), 1):
        if not is_near or ends[last] - offsets[first] > MOST_AT_ONCE:
            yield first, last
            first = last
    yield first, len(offsets)
