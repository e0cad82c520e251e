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

Fetch = Callable[[int, int, int, int], memoryview]
"""Return a range of a shard from its store, for a step: (shard, start, stop, step)."""

_MIN_BYTES, _MAX_BYTES = 1 << 16, 1 << 22
_RECORDS_PER_CHUNK = 4
"""About so many records, unless a chunk would be smaller or larger than its limits."""

_MAX_ENTRIES = 1 << 18
"""A full cache has at most about so many entries."""


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

    `fetch` reads from the object store. The chunks of shard n are numbered from `starts[n]` to
    `starts[n + 1]`. The name of an entry begins with a digest of the URL, size and ETag of its
    shard. So a shard that has changed never hits old entries.
    """

    def __init__(self, index: Index, cache: DiskCache, sizes: Int64s, fetch: Fetch, /) -> None:
        self._index, self._disk, self._sizes, self._fetch = index, Disk(cache), sizes, fetch
        self.size = size = chunk_bytes(float(sizes.sum()) / max(1, len(index)), cache)
        self.starts = np.concatenate([[0], np.cumsum(-(-sizes // size))])
        self._digests = [
            hashlib.sha256(f"{size} {content}".encode("utf-8", "surrogateescape")).hexdigest()[:24]
            for content in _contents(index)
        ]
        self._eviction = Eviction(self._disk, set(self._digests))
        self._lock = threading.Lock()
        self._claimed: dict[int, threading.Event] = {}
        self._uses: NextUses | None = None
        self._uses_key: tuple[Schedule, tuple[str, ...], bool] | None = None  # what `_uses` is of

    def advance(self, plan: ReadPlan, step: int, /) -> None:
        """Set the step of the plan that is read now.

        From it follows the next use of each chunk, by which chunks are evicted.
        """
        uses_key = plan.schedule, tuple(plan.fields), plan.limit > 0
        if self._uses is None or self._uses_key != uses_key:
            self._uses_key = schedule, fields, prefetched = uses_key
            chunks_of = partial(self._chunks_of, fields)
            self._uses = NextUses(schedule.all_ranks, chunks_of, prefetched=prefetched)
        self._eviction.advance(self._uses, step, self._cached)

    def _cached(self) -> Iterator[int]:
        """Yield the numbers of the chunks that are in the cache, for shards of this index."""
        first_chunk = dict(zip(self._digests, self.starts.tolist(), strict=False))  # of each shard
        for name, _ in self._disk.entries():
            digest, number = name.split("-")
            if digest in first_chunk:
                yield first_chunk[digest] + int(number)

    def _chunks_of(self, fields: Sequence[str], records: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return which chunks contain the nonempty fields of records.

        Three arrays, int64[nonempty fields]: the first chunk of each field, its last chunk, and the
        position of its record in `records`.
        """
        rows = self._index.rows(fields, records)
        nonempty = rows["length"] > 0
        positions = np.repeat(np.arange(len(records)), len(fields))[nonempty]
        rows = rows[nonempty]
        starts, last_byte = self.starts[rows["file"]], rows["offset"] + rows["length"] - 1
        return starts + rows["offset"] // self.size, starts + last_byte // self.size, positions

    def read(self, shard: int, start: int, stop: int, step: int, /) -> memoryview:
        """Return the bytes [start, stop) of a shard, from the cache or the store.

        `step` is that of the batch that needs them. If another thread is reading a chunk already,
        this waits for it. A range beyond the end of the shard, as in an index that was tampered
        with, is clipped.
        """
        start, stop = self._clipped(shard, start, stop)
        if start >= stop:
            return memoryview(b"")
        first, base = start // self.size, int(self.starts[shard])
        numbers = range(base + first, base - (-stop // self.size))  # of the chunks with the range
        found: dict[int, bytes] = {}  # by number
        while missing := [number for number in numbers if number not in found]:
            done = threading.Event()
            with self._lock:  # claim the chunks that no other thread reads
                claimed_by_others = [self._claimed[n] for n in missing if n in self._claimed]
                claimed = [n for n in missing if n not in self._claimed]
                self._claimed |= dict.fromkeys(claimed, done)
            try:
                self._read_claimed(shard, claimed, found, step)
            finally:
                with self._lock:
                    for number in claimed:
                        del self._claimed[number]
                done.set()
            for event in claimed_by_others:
                event.wait()
        data = b"".join([found[number] for number in numbers])
        return memoryview(data)[start - first * self.size : stop - first * self.size]

    def forget(self, shard: int, start: int, stop: int, /) -> None:
        """Delete the chunks that contain the bytes [start, stop) of a shard from the cache."""
        start, stop = self._clipped(shard, start, stop)
        base = int(self.starts[shard])
        for number in range(base + start // self.size, base - (-stop // self.size)):
            self._disk.drop(*self._entry(number))

    def _clipped(self, shard: int, start: int, stop: int) -> tuple[int, int]:
        """Return the start and stop of a range, clipped to the size of its shard."""
        size = int(self._sizes[shard])
        return max(0, min(start, size)), max(0, min(stop, size))

    def _read_claimed(
        self, shard: int, chunks: list[int], found: dict[int, bytes], step: int
    ) -> None:
        """Add the bytes of chunks of a shard to `found`, a dict by chunk number.

        Chunks that are not in the cache are fetched from the store, adjacent ones by one request,
        and cached. Only one thread at a time has claimed a chunk.
        """
        for chunk in chunks:
            data = self._disk.get(*self._entry(chunk))
            if data is not None:
                found[chunk] = data
                self._eviction.note(chunk, step)
        missing = [chunk for chunk in chunks if chunk not in found]
        base = int(self.starts[shard])
        gaps = np.flatnonzero(np.diff(missing) != 1) + 1 if missing else ()
        for adjacent in np.split(missing, gaps) if missing else ():  # consecutive numbers
            start = (int(adjacent[0]) - base) * self.size
            start, stop = self._clipped(shard, start, start + len(adjacent) * self.size)
            fetched = self._fetch(shard, start, stop, step)
            offsets = range(0, stop - start, self.size)
            for offset, chunk in zip(offsets, adjacent.tolist(), strict=True):
                name, length = self._entry(chunk)
                found[chunk] = data = bytes(fetched[offset : offset + length])
                if len(data) == length:  # else the store returned too few bytes
                    victims = self._eviction.victims(chunk, step, lambda n: self._entry(n)[0])
                    if self._disk.put(name, data, victims):
                        self._eviction.note(chunk, step)

    def _entry(self, chunk: int) -> tuple[str, int]:
        """Return the name of the cache entry of a chunk, and the length of the chunk in bytes.

        The name is the digest of the shard and the number of the chunk in it.
        """
        shard = int(np.searchsorted(self.starts, chunk, side="right")) - 1
        length = int(self._sizes[shard]) - (chunk - int(self.starts[shard])) * self.size
        owner = min(shard, len(self._digests) - 1)  # all loose files share the first digest
        return f"{self._digests[owner]}-{chunk - int(self.starts[owner])}", min(self.size, length)


def _contents(index: Index) -> list[str]:
    """Return a text that identifies the content of each shard, or one text for all loose files."""
    if index.container == "files":  # there may be too many for a digest of each
        return [f"{index.root} {index.fingerprint}"]
    return [
        f"{join(index.root, path)} {shard} {index.tag(number)}"
        for number, (path, shard) in enumerate(
            zip(index.shard_paths.tolist(), index.shards.tolist(), strict=True)
        )
    ]
