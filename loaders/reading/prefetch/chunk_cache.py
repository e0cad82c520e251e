"""Read remote shards in aligned chunks, which are cached on disk."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from itertools import groupby

import numpy as np

from twinfeed.loaders.index import Index
from twinfeed.loaders.index.paths import join
from twinfeed.loaders.storage.disk import Disk
from twinfeed.loaders.storage.disk_cache import DiskCache
from twinfeed.loaders.support.array_types import Int64s

FetchRange = Callable[[int, int, int], memoryview]
"""A function (file, start, stop) that returns the bytes [start, stop) of a file from the store."""

_MIN_BYTES, _MAX_BYTES = 1 << 16, 1 << 22
_RECORDS_PER_CHUNK = 4
"""A chunk has the size of about this many records, but not less than `_MIN_BYTES`. More than
`_MAX_BYTES` it has only in a cache so large that it would have more than `_MAX_ENTRIES` chunks.
"""

_MAX_ENTRIES = 1 << 18
"""The number of entries that a full cache has at most, about."""


def chunk_bytes(record_bytes: float, cache: DiskCache, /) -> int:
    """Return the size of a chunk in bytes, a power of two, for records of `record_bytes` each.

    >>> chunk_bytes(10_000, DiskCache("cache", bytes=10**9))
    65536
    """
    several_records = min(_MAX_BYTES, _RECORDS_PER_CHUNK * record_bytes)
    minimum = max(_MIN_BYTES, several_records, cache.bytes / _MAX_ENTRIES)
    return 1 << int(np.ceil(np.log2(minimum)))


class ChunkCache:
    """Read the files of an index in chunks of `size` bytes: a read-through disk cache.

    The name of a cache entry begins with a digest of the URL, size and ETag of its shard. So a
    shard that has changed never hits old entries. Once the cache is full, what it does not have is
    fetched without the rest of its chunk.

    Args:
        index: says where the shards lie.
        cache: the folder and the size limit.
        sizes: the size of each file in bytes.
        fetch: reads a range of a file from the object store.
    """

    def __init__(self, index: Index, cache: DiskCache, sizes: Int64s, fetch: FetchRange, /) -> None:
        self._sizes, self._fetch = sizes, fetch
        self._is_loose = index.container == "files"
        self.size = size = chunk_bytes(float(sizes.sum()) / max(1, len(index)), cache)
        self._digests = [
            hashlib.sha256(f"{size} {content}".encode("utf-8", "surrogateescape")).hexdigest()[:24]
            for content in _identify_shards(index)
        ]
        self._disk = Disk(cache, self._digests)
        self._claimed: set[tuple[int, int]] = set()  # (file, number) of chunks that are being read
        self._released = threading.Condition()  # the lock of `_claimed`; notified when it shrinks

    def read(self, file: int, start: int, stop: int, /) -> memoryview:
        """Return the bytes [start, stop) of a file, from the cache or the store.

        If another thread is reading one of the chunks, this waits for it, unless the cache is full.
        A range beyond the end of the file, as in an index that was tampered with, is clipped.
        """
        numbers = self._chunks_of_range(file, start, stop)
        if self._disk.full:
            return self._read_chunks(file, numbers, start, stop)
        chunks = {(file, number) for number in numbers}
        with self._released:
            self._released.wait_for(lambda: self._claimed.isdisjoint(chunks))
            self._claimed |= chunks
        try:
            return self._read_chunks(file, numbers, start, stop)
        finally:
            with self._released:
                self._claimed -= chunks
                self._released.notify_all()

    def forget(self, file: int, start: int, stop: int, /) -> None:
        """Delete the chunks that contain the bytes [start, stop) of a file from the cache."""
        for number in self._chunks_of_range(file, start, stop):
            self._disk.drop(self._entry(file, number)[0])

    def _chunks_of_range(self, file: int, start: int, stop: int) -> range:
        """Return the numbers of the chunks of a file that contain the bytes [start, stop)."""
        stop = min(stop, int(self._sizes[file]))
        return range(start // self.size, -(-stop // self.size)) if 0 <= start < stop else range(0)

    def _read_chunks(self, file: int, numbers: range, start: int, stop: int) -> memoryview:
        """Return the bytes [start, stop) of a file, which lie in the chunks `numbers`.

        What is not in the cache is fetched from the store, consecutive chunks by one request.
        """
        data: dict[int, memoryview] = {}
        for number in numbers:
            cached = self._disk.get(*self._entry(file, number))
            if cached is not None:
                first = number * self.size  # the first byte of the chunk
                data[number] = memoryview(cached)[max(0, start - first) : stop - first]
        uncached = [number for number in numbers if number not in data]
        for _, pairs in groupby(enumerate(uncached), lambda pair: pair[1] - pair[0]):
            data |= self._fetch_chunks(file, [number for _, number in pairs], start, stop)
        return memoryview(b"".join([data[number] for number in numbers]))

    def _fetch_chunks(
        self, file: int, numbers: list[int], start: int, stop: int
    ) -> dict[int, memoryview]:
        """Fetch consecutive chunks of a file by one request, and cache them.

        If the cache is full, only the bytes in [start, stop) are fetched, and nothing is cached.

        Returns:
            By chunk, its bytes in [start, stop).
        """
        is_full, size = self._disk.full, self.size
        first, end = numbers[0] * size, min((numbers[-1] + 1) * size, int(self._sizes[file]))
        if is_full:
            first, end = max(first, start), min(end, stop)
        fetched = self._fetch(file, first, end)
        data: dict[int, memoryview] = {}
        for number in numbers:
            chunk_start = max(first, number * size)
            chunk = fetched[chunk_start - first : (number + 1) * size - first]
            name, length = self._entry(file, number)
            if not is_full and len(chunk) == length:  # else the store returned too few bytes
                self._disk.put(name, chunk)
            data[number] = chunk[max(0, start - chunk_start) : stop - chunk_start]
        return data

    def _entry(self, file: int, number: int) -> tuple[str, int]:
        """Return the name of the cache entry of a chunk of a file, and the chunk's bytes.

        The name is f"{digest}/{number}": the digest of the shard, and the number of the chunk in
        it. All loose files have one digest, since there may be too many for a digest of each. The
        name is f"{digest}/{file}-{number}" then.
        """
        length = min(self.size, int(self._sizes[file]) - number * self.size)  # the last is shorter
        if self._is_loose:
            return f"{self._digests[0]}/{file}-{number}", length
        return f"{self._digests[file]}/{number}", length


def _identify_shards(index: Index) -> list[str]:
    """Return for each shard a string that changes if its content does, to name its cache entries.

    It has the URL of the shard, its size, the checksum of its record headers, and its ETag. All
    loose files, which may be many, share one string: the root and the fingerprint of the index.
    """
    if index.container == "files":
        return [f"{index.root} {index.fingerprint}"]
    shards = zip(index.shard_paths, index.shards.tolist(), strict=True)
    return [
        f"{join(index.root, path)} {size_and_checksum} {index.tag(shard)}"
        for shard, (path, size_and_checksum) in enumerate(shards)
    ]
