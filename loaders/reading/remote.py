"""Read ranges of remote shards, with many requests at once over shards and batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache

import numpy as np

from twinfeed.loaders.index import Index
from twinfeed.loaders.index.paths import check_relative, stale_file_error
from twinfeed.loaders.reading.prefetch.buffer import RangeBuffer
from twinfeed.loaders.reading.prefetch.chunk_cache import ChunkCache
from twinfeed.loaders.reading.prefetch.read_plan import FileRanges, Rows, gap_of
from twinfeed.loaders.storage.download import describe_object
from twinfeed.loaders.storage.open_store import store_of
from twinfeed.loaders.storage.store import ObjectInfo
from twinfeed.loaders.storage.url import Location
from twinfeed.loaders.support.array_types import Int64s

_FILES = 1 << 14
"""The number of files whose path, size and ETag are cached."""


class RemoteFiles:
    """Read ranges of remote files. The ranges of a plan are in its buffer already, or requested.

    The size and the ETag of a file are compared with the index. If the store sends both with each
    range, they are compared for each range. Otherwise they are compared once for each file.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        assert isinstance(index.shards_root, Location)
        self.store = store_of(index.shards_root)
        cache = index.cache
        self.cache = None if cache is None else ChunkCache(index, cache, self._sizes, self._fetch)
        read, send = (self.cache.read, None) if self.cache else (self._fetch, self._send)
        self.buffer = RangeBuffer(read, gap_of(index), send)
        # As `PlannedFiles`, its ranges are those of the buffer.
        self.start_plan, self.apply = self.buffer.start_plan, self.buffer.apply
        self.release_before = self.buffer.release_before
        self._compared: set[int] = set()
        self._file = lru_cache(_FILES)(self._info_of)

    def read(self, rows: Rows, /, *, coalesce: bool = True) -> list[bytes]:
        """Return the bytes of each row of the index, fewer at the end of a file.

        The buffer has the ranges that were prefetched; others are requested now, and rows near each
        other by one request in any case. After an error, the ranges of these rows are dropped from
        the buffer, so that they are requested again.
        """
        self._check_shards_unchanged(rows)
        ranges = self.buffer.request_rows(rows)  # the range that each row lies in
        try:
            data = {buffered: buffered.data for buffered in dict.fromkeys(ranges)}  # waits for it
        except BaseException:
            self.buffer.drop(ranges)
            raise
        return [
            bytes(data[buffered][offset - buffered.start : offset - buffered.start + length])
            for buffered, (offset, length, *_) in zip(ranges, rows.tolist(), strict=True)
        ]

    def read_again(self, row: np.void, /) -> bytes:
        """Return the bytes of one row from the store, since those of a buffer or cache are wrong.

        Neither has them afterwards, so that a later read requests them again.
        """
        offset, length, file, _ = row.item()
        self.buffer.drop_containing(file, offset, offset + length)
        if self.cache is not None:
            self.cache.forget(file, offset, offset + length)
        return bytes(self._fetch(file, offset, offset + length))

    def are_cached(self, _: FileRanges, /) -> bool:
        """Return False: nothing remote is in the page cache."""
        return False

    def close(self) -> None:
        """Drop all ranges, and cancel the requests under way."""
        self.buffer.clear()

    def _info_of(self, number: int) -> tuple[str, ObjectInfo]:
        """Return the path of a file relative to the root, and its size and ETag in the index."""
        tag = None if self.index.container == "files" else self.index.tag(number)
        path = check_relative(self.index.files[number], is_object_key=True)
        return path, ObjectInfo(int(self._sizes[number]), tag)

    @cached_property
    def _sizes(self) -> Int64s:
        """The size in bytes of each file in the index, int64[files]."""
        index = self.index
        if index.container != "files":
            return index.shards["bytes"].astype(np.int64)
        sizes = np.zeros(len(index.files), np.int64)
        for rows in map(index.table, index.fields):
            # A damaged row is skipped here. Reading the row raises the error.
            valid = rows[(rows["file"] >= 0) & (rows["file"] < len(sizes)) & (rows["length"] >= 0)]
            sizes[valid["file"]] = valid["length"]
        return sizes

    def _fetch(self, file: int, start: int, stop: int) -> memoryview:
        """Return the bytes [start, stop) of a file from the store, which must be the file that was
        indexed.
        """
        path, _ = self._file(file)
        found = self.store.read(path, start, stop)
        if self.store.sends_info:  # the size and the ETag of the file, with each range
            self._compare(file, found.info)
        return found.data

    def _send(self, file: int, start: int, stop: int) -> Callable[[], memoryview | None] | None:
        """Do what `_fetch` does in two steps, as `Store.send`."""
        receive = self.store.send(self._file(file)[0], start, stop)
        if receive is None:
            return None

        def received() -> memoryview | None:
            found = receive()
            if found is None:
                return None
            self._compare(file, found.info)
            return found.data

        return received

    def _compare(self, file: int, found: ObjectInfo) -> None:
        """Raise StaleIndexError if the size or the ETag of a file, where both are known, is another
        than in the index.
        """
        path, expected = self._file(file)
        pairs = zip(expected, found, strict=True)
        if any(None not in pair and pair[0] != pair[1] for pair in pairs):
            tag = None if expected.tag is None else found.tag
            current = describe_object(ObjectInfo(found.bytes, tag))
            raise stale_file_error(self.store.url(path), describe_object(expected), current)

    def _check_shards_unchanged(self, rows: Rows) -> None:
        """Compare each shard of rows with the index once, by a request, unless the store sends size
        and ETag with each range. Loose files, which are many, are not compared.
        """
        if self.store.sends_info or self.index.container == "files":
            return
        new_files = set(rows["file"].tolist()) - self._compared  # not compared by an earlier call
        if not new_files:
            return
        infos = self.store.stat([self._file(file)[0] for file in new_files])
        for file, found in zip(new_files, infos, strict=True):
            self._compare(file, found)
        self._compared.update(new_files)
