"""Read ranges of local files, with a bounded number of open files."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import ClassVar
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.errors import IndexFormatError, LoaderError
from twinfeed.loaders.formats.files import PathResolver
from twinfeed.loaders.index import Index
from twinfeed.loaders.index.arrays import StringColumn
from twinfeed.loaders.index.paths import join, resolve_below, stale_file_error
from twinfeed.loaders.reading.prefetch.kernel_readahead import KernelReadahead
from twinfeed.loaders.reading.prefetch.read_plan import (
    MAX_RANGE_BYTES,
    Fetch,
    FileRanges,
    PlannedFiles,
    Release,
    Rows,
)
from twinfeed.loaders.support.lock import Lock
from twinfeed.loaders.support.regular import open_regular, read_at
from twinfeed.loaders.support.system import file_limit, is_uncached

_SMALL_ROW, _MAX_GAP = 1 << 14, 1 << 12
"""Rows of at most `_SMALL_ROW` bytes are read by one call if at most `_MAX_GAP` bytes lie between
them. The bytes of each are then copied out of what was read, which for longer rows would cost more
than the call that is saved.
"""

_CHECKED_RANGES = 16
"""The number of ranges whose last byte is looked up in the page cache, before a plan is used."""


class Handle:
    """Own a file descriptor, which is closed with the last reference, so never during a read."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


class Handles:
    """An LRU cache of open files. `open_file(number) -> fd` opens a file.

    All caches of a process together have at most `open_limit()` files. So a reader that is never
    closed does not use up the file descriptors of others.
    """

    _caches: ClassVar[WeakSet[Handles]] = WeakSet()
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, open_file: Callable[[int], int]) -> None:
        self.limit = open_limit()
        self._open_file = open_file
        self._open: OrderedDict[int, Handle] = OrderedDict()
        with self._lock:
            self._caches.add(self)

    def __len__(self) -> int:
        return len(self._open)

    def get(self, numbers: Iterable[int], /) -> dict[int, Handle]:
        """Return the handle of each file by its number, opening files that are not open.

        The caller must keep a handle while it reads the file: another thread may evict it from the
        cache, and the file is closed with the last reference.
        """
        handles = {}
        for number in numbers:
            try:
                self._open.move_to_end(number)  # the most recently used file is the last one
                handles[number] = self._open[number]
            except KeyError:  # it is not open, or another thread has evicted it just now
                handles[number] = self._open_now(number)
        return handles

    def _open_now(self, number: int) -> Handle:
        """Return the handle of a file that was not open just now, and keep it in the cache."""
        with self._lock:
            if number not in self._open:
                if len(self) >= self.limit:  # a full cache need not count the files of all
                    self._open.popitem(last=False)
                elif sum(map(len, self._caches)) >= self.limit:
                    max(self._caches, key=len)._open.popitem(last=False)
                self._open[number] = Handle(self._open_or_evict(number))
            return self._open[number]

    def close(self) -> None:
        """Close every file that is not being read."""
        with self._lock:
            self._open.clear()

    def _open_or_evict(self, number: int) -> int:
        """Return the descriptor of a file that is opened now, closing others of this cache if the
        process has too many.
        """
        while True:
            try:
                return self._open_file(number)
            except OSError as error:
                if error.errno != errno.EMFILE or not self._open:
                    raise
                self._open.popitem(last=False)


class LocalFiles(PlannedFiles):
    """Read local shards, or loose files, with `os.pread`.

    Shards stay open. A loose file, which has a field of one record, is opened for one read. No
    shard is mapped, since a mapped file that shrinks kills the process by SIGBUS; with `os.pread`
    there is an error. With a plan, the kernel is asked (`posix_fadvise`) to read ahead the ranges
    that coming batches need. It keeps and evicts their pages by itself.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.handles = Handles(partial(open_shard, index))
        # Several threads may read at once.
        self._max_files_per_read = max(1, self.handles.limit // 4)
        # Only for an index of loose files: resolves their paths. None for an index of shards.
        self.paths = PathResolver(index.root) if index.container == "files" else None
        self.kernel_readahead = KernelReadahead()

    def close(self) -> None:
        """Stop reading ahead, and close the shards."""
        self.kernel_readahead.close()
        self.handles.close()

    def read(self, rows: Rows, /, *, coalesce: bool = True) -> list[bytes]:
        """Return the bytes that each row of the index locates, fewer at the end of a file.

        A row says where a field of a record lies: (offset, length, file, checksum). With
        `coalesce`, the bytes of small rows near each other are read by one call. At most 2 GiB of a
        row are read: see `read_again`.
        """
        if self.paths is not None:
            return self._read_loose(rows)
        files = rows["file"].tolist()
        distinct_files = dict.fromkeys(files)
        if len(distinct_files) > self._max_files_per_read:
            return self._read_many_files(rows)
        handles = self.handles.get(distinct_files)
        fd_of = {file: handle.fd for file, handle in handles.items()}
        fds = list(map(fd_of.__getitem__, files))
        offsets, lengths = rows["offset"].tolist(), rows["length"].tolist()
        # `is_near` says for each row but the first whether it lies close behind the row before.
        if not coalesce or not should_coalesce(is_near := is_near_previous(rows)):
            return list(map(os.pread, fds, lengths, offsets))
        out: list[bytes] = []
        for first, stop in _coalesced(offsets, lengths, is_near.tolist()):
            start = offsets[first]
            data = os.pread(fds[first], offsets[stop - 1] + lengths[stop - 1] - start, start)
            out += [
                data[offset - start : offset - start + length]
                for offset, length in zip(offsets[first:stop], lengths[first:stop], strict=True)
            ]
        return out

    def read_again(self, row: np.void, /) -> bytes:
        """Return the bytes of one row, in as many calls as it takes: `pread` reads at most 2 GiB.

        A row of a loose file has no offset: it is the whole file.
        """
        offset, length, file, _ = row.item()
        handle = self._open_handle(file, length)  # a name, as the file is open while it exists
        return read_at(handle.fd, length, offset)

    def _read_many_files(self, rows: Rows) -> list[bytes]:
        """Return the bytes of rows in more files than may be open: those of `_max_files_per_read`
        files at a time.
        """
        order = np.argsort(rows["file"], kind="stable")
        out = [b""] * len(rows)
        # Where in `order` each file but the first starts. For example, with two files per read, the
        # sorted files [0, 0, 1, 2, 3] start at [2, 3, 4]; to take every second of these, [3],
        # splits the rows into those of the files 0 and 1, and those of the files 2 and 3.
        file_starts = np.flatnonzero(np.diff(rows["file"][order])) + 1
        split_points = file_starts[self._max_files_per_read - 1 :: self._max_files_per_read]
        for positions in np.split(order, split_points):
            data = self.read(rows[positions])
            for position, row_data in zip(positions.tolist(), data, strict=True):
                out[position] = row_data
        return out

    def _read_loose(self, rows: Rows) -> list[bytes]:
        """Return the bytes of each row, a whole loose file, which has a field of one record."""
        return list(map(self.read_again, rows))

    def _open_handle(self, file: int, length: int) -> Handle:
        """Return the handle of a shard, from the cache; or of a loose file, which is opened now,
        and has to have the length in the index.
        """
        if self.paths is None:  # the index is of shards
            return self.handles.get([file])[file]
        path = self.paths.resolve(relative_path(self.index, self.index.files, file))
        return Handle(open_unchanged(path, length))

    def are_cached(self, ranges: FileRanges, /) -> bool:
        """Return whether the last bytes of a few ranges are in the page cache."""
        interval = max(1, len(ranges) // _CHECKED_RANGES)
        checked = self.with_descriptors(ranges[::interval][:_CHECKED_RANGES])
        return not any(is_uncached(fd, stop - 1) for fd, _, stop in checked)

    def apply(self, event: Fetch | Release, /) -> None:
        """Advise the kernel (`posix_fadvise`) to read the file ranges of a `Fetch` ahead."""
        if isinstance(event, Fetch):
            self.kernel_readahead.add(self.with_descriptors(event.ranges))

    def with_descriptors(self, ranges: FileRanges, /) -> Iterator[tuple[int, int, int]]:
        """Yield (file descriptor, start, stop) for each file range, to ask the kernel about it.

        A range has the number of its file in the index, but system calls such as `posix_fadvise`
        need the descriptor of the open file. Ranges of files that cannot be opened are left out.
        """
        for file, start, stop, *_ in ranges.tolist():
            with suppress(LoaderError, OSError):  # raised again when the batch reads the file
                handle = self._open_handle(file, stop - start)
                yield handle.fd, start, stop


def open_shard(index: Index, number: int) -> int:
    """Open a shard of an index, and return its file descriptor.

    Raises:
        StaleIndexError: the shard has another size than in the index.
        UnsafeContentError: the path, or a symbolic link, leads out of the index's root.
    """
    path = relative_path(index, index.shard_paths, number)
    resolve_below(index.root, path)  # only to check: it raises UnsafeContentError
    return open_unchanged(join(index.root, path), int(index.shards["bytes"][number]))


def relative_path(index: Index, paths: StringColumn, file: int) -> str:
    """Return the path of a file, relative to the root of its index.

    `file` is its number in `paths`, the shards or the loose files of the index.

    Raises:
        IndexFormatError: there is no such number, as in a damaged index.
    """
    if file >= len(paths):
        raise IndexFormatError(
            "damaged index: a record lies in a file that is not in the index",
            path=index.where,
            expected=f"a file number below {len(paths)}",
            found=file,
        )
    return paths[file]


def open_unchanged(path: str, length: int) -> int:
    """Open a file that must still have this length, and return its descriptor.

    Raises:
        FileNotFoundError: there is no such file any more.
        StaleIndexError: the file has another length.
    """
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


def is_near_previous(rows: Rows, /) -> npt.NDArray[np.bool_]:
    """Return for each row but the first whether it can be read in one call with the row before.

    bool[len(rows) - 1]: True if both rows are small, in one file, and at most `_MAX_GAP` bytes
    apart.
    """
    offset, length, file = rows["offset"], rows["length"], rows["file"]
    gap = offset[1:] - (offset[:-1] + length[:-1])
    is_near: npt.NDArray[np.bool_] = (gap >= 0) & (gap <= _MAX_GAP) & (file[1:] == file[:-1])
    is_near &= (length[1:] <= _SMALL_ROW) & (length[:-1] <= _SMALL_ROW)
    return is_near


def should_coalesce(is_near: npt.NDArray[np.bool_], /) -> bool:
    """Return whether to read several rows in one call.

    This is faster if more than a quarter of the rows can be read together with the row before.
    `is_near` says this of each row but the first, bool[rows - 1].
    """
    return 4 * int(np.count_nonzero(is_near)) > len(is_near)


def _coalesced(
    offsets: list[int], lengths: list[int], is_near: list[bool]
) -> Iterator[tuple[int, int]]:
    """Yield (first, stop) for each series of rows [first, stop) that is read in one call: `is_near`
    [True, False] gives (0, 2) and (2, 3).
    """
    first = 0
    for row, is_near_previous_row in enumerate(is_near, 1):
        end = offsets[row] + lengths[row]
        if not is_near_previous_row or end - offsets[first] > MAX_RANGE_BYTES:
            yield first, row
            first = row
    yield first, len(offsets)


def open_limit() -> int:
    """Return the most shards that stay open: a quarter of the files that this process may open,
    but at most 1,024.
    """
    limit = file_limit()
    return 1024 if limit is None else max(1, min(1024, limit // 4))
