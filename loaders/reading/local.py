"""Ranges of local files to bytes, through few open files."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial

import numpy as np

from twinfeed.loaders.errors import IndexFormatError, LoaderError
from twinfeed.loaders.formats.files import Places
from twinfeed.loaders.index import Index
from twinfeed.loaders.index.arrays import StringColumn
from twinfeed.loaders.index.paths import below, join, stale_file
from twinfeed.loaders.reading.checked import WrongBytes, cut_rows
from twinfeed.loaders.reading.handles import Handle, Handles, default_limit
from twinfeed.loaders.reading.prefetch.advice import Advice
from twinfeed.loaders.reading.prefetch.ranges import (
    LOCAL_GAP,
    SMALL,
    Extents,
    Rows,
    extent_of,
    many_near,
    near_rows,
    pieces_of,
)
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.support.checksum import crc32c_of_each
from twinfeed.loaders.support.regular import open_regular, read_at


class LocalFiles:
    """Read local shards, or loose files, with `os.pread`.

    Shards stay open. Each loose file is opened for one reading. Nothing is mapped: a mapped shard
    that shrinks kills the process. Here it raises an error.
    """

    def __init__(self, index: Index, checksums: bool, max_open_files: int | None) -> None:
        self.index, self.checksums = index, checksums
        limit = max_open_files or default_limit()
        self.handles = Handles(partial(open_shard, index), limit)
        self.most_held = max(1, limit // 4)
        self.places = Places(index.root) if index.container == "files" else None
        self.advice = Advice()

    def close(self) -> None:
        """Stop the advice, and close the shards."""
        self.advice.close()
        self.handles.close()

    def read(self, rows: Rows, /, *, neighbours: bool = True) -> list[bytes]:
        """Return the bytes of each row. Small neighbours are read in one piece."""
        if self.places is not None:
            return self._whole(rows)
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
                data = self.read(rows[places])
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

    def _whole(self, rows: Rows) -> list[bytes]:
        """Read loose files one by one."""
        out: list[bytes] = []
        for place, (_, length, file, _) in enumerate(rows.tolist()):
            handle = self._handle(file, length)
            data = read_at(handle.fd, length, 0)
            out += cut_rows(data, rows[place : place + 1], self.checksums, place)
        return out

    def _handle(self, file: int, length: int) -> Handle:
        """Return an open file. A loose file must be as long as when it was indexed."""
        if self.places is None:
            return self.handles.get([file])[file]
        path_of(self.index, self.index.files, file)
        return Handle(open_unchanged(self.places.find(self.index.files[file]), length))

    def opened(self, extents: Extents) -> Iterator[tuple[int, int, int]]:
        """Yield the descriptor, the start and the stop of each extent whose file can be read."""
        for file, start, stop, *_ in extents.tolist():
            with suppress(LoaderError, OSError):  # reading the file raises the error
                handle = self._handle(file, stop - start)
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
    path = path_of(index, index.shard_paths, number)
    below(index.root, index.shard_paths[number])
    return open_unchanged(path, int(index.shards["bytes"][number]))


def _first_wrong(data: list[bytes], found: Iterable[int], expected: list[int]) -> WrongBytes:
    """Return the error of the first bytes with a wrong length or checksum."""
    pairs = enumerate(zip(found, expected, strict=True))
    place = next(place for place, (one, other) in pairs if one != other)
    return WrongBytes(place, data[place])


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
        gone = "no such file any more: restore the file, or build the index again"
        raise FileNotFoundError(errno.ENOENT, gone, path) from None
    size = os.fstat(fd).st_size
    if size != length:
        os.close(fd)
        raise stale_file(path, length, size)
    return fd
