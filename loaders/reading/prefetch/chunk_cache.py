"""Read remote shards in aligned chunks, which are cached on disk."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from twinfeed.loaders.index import Index
from twinfeed.loaders.index.paths import join
from twinfeed.loaders.reading.prefetch.eviction import Eviction, NextUses
from twinfeed.loaders.reading.prefetch.read_plan import ReadPlan
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.storage.disk import Disk
from twinfeed.loaders.storage.disk_cache import DiskCache
from twinfeed.loaders.support.array_types import Int64s

FetchRange = Callable[[int, int, int, int], memoryview]
"""A function (shard, start, stop, step) that returns the bytes [start, stop) of a shard.

They come from the object store, and the batch of `step` needs them.
"""

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
    """Read the shards of an index in chunks of `size` bytes: a read-through disk cache.

    The chunks of all shards are numbered one after another: shard n has the chunks from
    `_first_chunks[n]` up to, but without, `_first_chunks[n + 1]`.

    The name of a cache entry begins with a digest of the URL, size and ETag of its shard. So a
    shard that has changed never hits old entries.

    Args:
        index: says where the shards lie.
        cache: the folder and the size limit.
        sizes: the size of each shard in bytes.
        fetch: reads a range of a shard from the object store.
    """

    def __init__(self, index: Index, cache: DiskCache, sizes: Int64s, fetch: FetchRange, /) -> None:
        self._index, self._disk, self._sizes, self._fetch = index, Disk(cache), sizes, fetch
        self.size = size = chunk_bytes(float(sizes.sum()) / max(1, len(index)), cache)
        self._first_chunks = np.concatenate([[0], np.cumsum(-(-sizes // size))])  # rounded up
        self._digests = [
            hashlib.sha256(f"{size} {content}".encode("utf-8", "surrogateescape")).hexdigest()[:24]
            for content in _identify_shards(index)
        ]
        self._eviction = Eviction(self._disk, set(self._digests))
        self._lock = threading.Lock()
        # The chunks that a thread is reading, each with the event that is set when it is done.
        self._claimed: dict[int, threading.Event] = {}
        self._uses: NextUses | None = None
        self._uses_key: tuple[Schedule, tuple[str, ...], bool] | None = None  # what `_uses` is of

    def advance(self, plan: ReadPlan, step: int, /) -> None:
        """Set the step that is read now, from which eviction looks for the next use of each chunk.

        A chunk is `size` bytes of a shard. To make room, the cache evicts the chunk whose next use
        is furthest in the future (Belady's algorithm). `NextUses` finds that use in the coming
        batches, of all ranks, since they may share the cache.
        """
        # With a limit of 0 bytes, the plan prefetches nothing.
        fields, is_prefetched = tuple(plan.fields), plan.limit > 0
        # Other batches or other fields than in the last call use other chunks.
        if self._uses is None or self._uses_key != (plan.schedule, fields, is_prefetched):
            self._uses_key = plan.schedule, fields, is_prefetched
            chunks_of = partial(self._find_chunks, fields)
            self._uses = NextUses(plan.schedule.all_ranks, chunks_of, prefetched=is_prefetched)
        self._eviction.set_step(self._uses, step, self._cached_chunks)

    def _cached_chunks(self) -> Iterator[int]:
        """Yield the numbers of the chunks of this index that are in the cache."""
        first_chunks = dict(zip(self._digests, self._first_chunks.tolist(), strict=False))
        for name, _ in self._disk.entries():
            digest, number_in_shard = name.split("-")
            if digest in first_chunks:
                yield first_chunks[digest] + int(number_in_shard)

    def _find_chunks(self, fields: Sequence[str], records: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return which chunks contain the nonempty fields of records.

        Three arrays, int64[nonempty fields]: the first chunk of each field, its last chunk, and the
        position of its record in `records`.
        """
        rows = self._index.rows(fields, records)
        nonempty = rows["length"] > 0
        positions = np.repeat(np.arange(len(records)), len(fields))[nonempty]
        rows = rows[nonempty]
        first_chunk = self._first_chunks[rows["file"]]  # of the shard of each row
        first = first_chunk + rows["offset"] // self.size
        last = first_chunk + (rows["offset"] + rows["length"] - 1) // self.size
        return first, last, positions

    def _chunks_of_range(self, shard: int, start: int, stop: int) -> range:
        """Return the numbers of the chunks that contain the bytes [start, stop) of a shard."""
        first_chunk = int(self._first_chunks[shard])
        return range(first_chunk + start // self.size, first_chunk + (stop - 1) // self.size + 1)

    def read(self, shard: int, start: int, stop: int, step: int, /) -> memoryview:
        """Return the bytes [start, stop) of a shard, from the cache or the store.

        `step` is that of the batch that needs them. If another thread is reading a chunk already,
        this waits for it. A range beyond the end of the shard, as in an index that was tampered
        with, is clipped.
        """
        start, stop = self._clipped(shard, start, stop)
        if start >= stop:
            return memoryview(b"")
        chunks = self._chunks_of_range(shard, start, stop)
        data: dict[int, bytes] = {}  # by chunk
        while missing := [chunk for chunk in chunks if chunk not in data]:
            done = threading.Event()
            with self._lock:  # claim the chunks that no other thread reads
                others_done = [self._claimed[n] for n in missing if n in self._claimed]
                claimed = [n for n in missing if n not in self._claimed]
                self._claimed |= dict.fromkeys(claimed, done)
            try:
                data |= self._read_claimed(shard, claimed, step)
            finally:
                with self._lock:
                    for chunk in claimed:
                        del self._claimed[chunk]
                done.set()
            for other_done in others_done:  # then look for their chunks in the cache
                other_done.wait()
        first_byte = start // self.size * self.size  # where the first of these chunks begins
        joined = memoryview(b"".join([data[n] for n in chunks]))
        return joined[start - first_byte : stop - first_byte]

    def forget(self, shard: int, start: int, stop: int, /) -> None:
        """Delete the chunks that contain the bytes [start, stop) of a shard from the cache."""
        for chunk in self._chunks_of_range(shard, *self._clipped(shard, start, stop)):
            self._disk.drop(*self._entry(chunk))

    def _clipped(self, shard: int, start: int, stop: int) -> tuple[int, int]:
        """Return the start and stop of a range, clipped to the size of its shard."""
        size = int(self._sizes[shard])
        return max(0, min(start, size)), max(0, min(stop, size))

    def _read_claimed(self, shard: int, chunks: list[int], step: int) -> dict[int, bytes]:
        """Return a dict from each of these chunks of a shard to its bytes, from cache or store.

        This thread has claimed the chunks, so no other thread reads them now. Those that are not in
        the cache are fetched from the store, consecutive ones by one request.
        """
        data: dict[int, bytes] = {}
        for chunk in chunks:
            cached = self._disk.get(*self._entry(chunk))
            if cached is not None:
                data[chunk] = cached
                self._eviction.record_use(chunk, step)
        missing = np.array([chunk for chunk in chunks if chunk not in data], np.int64)
        gaps = np.flatnonzero(np.diff(missing) != 1) + 1
        for consecutive in np.split(missing, gaps) if len(missing) else ():
            data |= self._fetch_chunks(shard, consecutive.tolist(), step)
        return data

    def _fetch_chunks(self, shard: int, chunks: list[int], step: int) -> dict[int, bytes]:
        """Fetch consecutive chunks of a shard by one request, cache them, and return their bytes.

        Chunks are numbered over all shards. For example, shard 0 has the chunks 0 to 3, so that
        shard 1 begins with chunk 4 (`_first_chunks[1]`). Its chunks 5 and 6 are the second and the
        third of the shard: the bytes from `size` to 3 * `size`.
        """
        start = (chunks[0] - int(self._first_chunks[shard])) * self.size
        start, stop = self._clipped(shard, start, start + len(chunks) * self.size)
        fetched = self._fetch(shard, start, stop, step)
        data: dict[int, bytes] = {}
        for offset, chunk in zip(range(0, stop - start, self.size), chunks, strict=True):
            name, length = self._entry(chunk)
            data[chunk] = bytes(fetched[offset : offset + length])
            if len(data[chunk]) == length:  # else the store returned too few bytes: do not cache
                # The entries that `put` may evict. `_entry` returns (name, length) of a chunk.
                victims = self._eviction.victims(chunk, step, lambda n: self._entry(n)[0])
                if self._disk.put(name, data[chunk], victims):
                    self._eviction.record_use(chunk, step)
        return data

    def _entry(self, chunk: int) -> tuple[str, int]:
        """Return the name of the cache entry of a chunk, and the length of the chunk in bytes.

        `chunk` counts the chunks of all shards. The name is f"{digest}-{number}": the digest of the
        shard, and the number of the chunk within the shard. All loose files have one digest, since
        there may be too many for a digest of each: their chunks are numbered over all files.
        """
        shard = int(np.searchsorted(self._first_chunks, chunk, side="right")) - 1
        number_in_shard = chunk - int(self._first_chunks[shard])
        # The last chunk of a shard may be shorter.
        length = min(self.size, int(self._sizes[shard]) - number_in_shard * self.size)
        if len(self._digests) == 1:  # a single shard, or loose files
            return f"{self._digests[0]}-{chunk}", length
        return f"{self._digests[shard]}-{number_in_shard}", length


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
