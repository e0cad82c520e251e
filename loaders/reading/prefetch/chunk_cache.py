"""Remote shards through a disk cache, in aligned chunks."""

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

_LEAST, _MOST = 1 << 16, 1 << 22
_RECORDS = 4
"""A chunk has about so many records, within its limits."""

_ENTRIES = 1 << 18
"""A full cache has at most about so many entries."""


def chunk_bytes(record: float, cache: DiskCache, /) -> int:
    """Return the bytes of a chunk, a power of two, for records of `record` bytes.

    >>> chunk_bytes(10_000, DiskCache("cache", bytes=10**9))
    65536
    """
    wanted = max(_LEAST, min(_MOST, _RECORDS * record), cache.bytes / _ENTRIES)
    return 1 << int(np.ceil(np.log2(wanted)))


class ChunkCache:
    """Read the shards of an index in chunks of `size` bytes, from its disk cache or through it.

    `fetch` reads from the store. The chunks of shard n are numbered from `starts[n]` to
    `starts[n + 1]`. The name of an entry begins with a digest of what identifies the content of its
    shard: URL, size and tag. So a shard that changed never hits old entries.
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
        self._stream: tuple[Schedule, tuple[str, ...], bool] | None = None

    def advance(self, plan: ReadPlan, step: int, /) -> None:
        """Find out when each chunk is used next, if the batch of a step of a plan is read now."""
        stream = plan.schedule, tuple(plan.fields), plan.limit > 0
        if self._uses is None or self._stream != stream:
            self._stream = schedule, fields, prefetched = stream
            chunks_of = partial(self._chunks_of, fields)
            self._uses = NextUses(schedule.all_ranks, chunks_of, prefetched=prefetched)
        self._eviction.advance(self._uses, step, self._cached)

    def _cached(self) -> Iterator[int]:
        """Yield the chunks that the cache has."""
        starts = dict(zip(self._digests, self.starts.tolist(), strict=False))
        for name, _ in self._disk.entries():
            digest, number = name.split("-")
            if digest in starts:
                yield starts[digest] + int(number)

    def _chunks_of(self, fields: Sequence[str], records: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return the first and the last chunk of each field, and the number of its record."""
        rows = self._index.rows(fields, records)
        nonempty = rows["length"] > 0
        rows, numbers = rows[nonempty], np.repeat(np.arange(len(records)), len(fields))[nonempty]
        starts, last = self.starts[rows["file"]], rows["offset"] + rows["length"] - 1
        return starts + rows["offset"] // self.size, starts + last // self.size, numbers

    def read(self, shard: int, start: int, stop: int, step: int, /) -> memoryview:
        """Return a range of a shard, which the batch of this step needs.

        What lies outside the shard, as the rows of a hostile index say, is left out.
        """
        start, stop = self._within(shard, start, stop)
        if start >= stop:
            return memoryview(b"")
        first, base = start // self.size, int(self.starts[shard])
        numbers = range(base + first, base - (-stop // self.size))
        found: dict[int, bytes] = {}
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
        """Delete the chunks of a range."""
        start, stop = self._within(shard, start, stop)
        base = int(self.starts[shard])
        for number in range(base + start // self.size, base - (-stop // self.size)):
            self._disk.drop(*self._entry(number))

    def _within(self, shard: int, start: int, stop: int) -> tuple[int, int]:
        """Return the part of a range that lies in its shard."""
        size = int(self._sizes[shard])
        return max(0, min(start, size)), max(0, min(stop, size))

    def _read_claimed(
        self, shard: int, chunks: list[int], found: dict[int, bytes], step: int
    ) -> None:
        """Read chunks from the cache, or else fetch them, neighbours together, and cache them."""
        for chunk in chunks:
            data = self._disk.get(*self._entry(chunk))
            if data is not None:
                found[chunk] = data
                self._eviction.note(chunk, step)
        missing = [chunk for chunk in chunks if chunk not in found]
        base = int(self.starts[shard])
        for run in np.split(missing, np.flatnonzero(np.diff(missing) != 1) + 1) if missing else ():
            start = (int(run[0]) - base) * self.size
            start, stop = self._within(shard, start, start + len(run) * self.size)
            run_data = self._fetch(shard, start, stop, step)
            for offset, chunk in zip(range(0, stop - start, self.size), run.tolist(), strict=True):
                name, length = self._entry(chunk)
                found[chunk] = data = bytes(run_data[offset : offset + length])
                if len(data) == length:
                    victims = self._eviction.victims(chunk, step, lambda n: self._entry(n)[0])
                    if self._disk.put(name, data, victims):
                        self._eviction.note(chunk, step)

    def _entry(self, chunk: int) -> tuple[str, int]:
        """Return the name and the length of a chunk."""
        shard = int(np.searchsorted(self.starts, chunk, side="right")) - 1
        length = int(self._sizes[shard]) - (chunk - int(self.starts[shard])) * self.size
        group = min(shard, len(self._digests) - 1)
        return f"{self._digests[group]}-{chunk - int(self.starts[group])}", min(self.size, length)


def _contents(index: Index) -> list[str]:
    """Return what identifies the content of each shard, or of all loose files together."""
    if index.container == "files":  # there may be too many for a digest of each
        return [f"{index.root} {index.fingerprint}"]
    return [
        f"{join(index.root, path)} {shard} {index.tag(number)}"
        for number, (path, shard) in enumerate(
            zip(index.shard_paths.tolist(), index.shards.tolist(), strict=True)
        )
    ]
