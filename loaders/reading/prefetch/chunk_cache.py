"""Remote shards through a disk cache, in aligned chunks."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from twinfeed.loaders.index import Index
from twinfeed.loaders.index.paths import join
from twinfeed.loaders.reading.prefetch.eviction import CURRENT_STEP, Eviction, NextUses
from twinfeed.loaders.reading.prefetch.read_plan import ReadPlan
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.storage.disk import Disk
from twinfeed.loaders.storage.disk_cache import DiskCache
from twinfeed.loaders.support.array_types import Int64s

Fetch = Callable[[int, int, int], memoryview]
"""Return a range of a shard from its store: (shard, start, stop)."""

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

    The chunks of shard n are numbered from `starts[n]` to `starts[n + 1]`. The name of an entry
    begins with a digest of what identifies the content of its shard: URL, size and tag. So a shard
    that changed never hits old entries.
    """

    def __init__(self, index: Index, cache: DiskCache, sizes: Int64s, /) -> None:
        self._index, self._disk, self._sizes = index, Disk(cache), sizes
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
            self._uses = NextUses(schedule.whole, chunks_of, prefetched=prefetched)
        self._eviction.advance(self._uses, step, self._cached)

    def _cached(self) -> Iterator[int]:
        """Yield the chunks that the cache has."""
        starts = dict(zip(self._digests, self.starts.tolist(), strict=False))
        for name, _ in self._disk.entries():
            digest, number = name.split("-")
            if digest in starts:
                yield starts[digest] + int(number)

    def _chunks_of(self, fields: Sequence[str], records: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return the first and the last chunk of each field, and the place of its record."""
        rows = self._index.rows(fields, records)
        nonempty = rows["length"] > 0
        rows, places = rows[nonempty], np.repeat(np.arange(len(records)), len(fields))[nonempty]
        starts, last = self.starts[rows["file"]], rows["offset"] + rows["length"] - 1
        return starts + rows["offset"] // self.size, starts + last // self.size, places

    def read(
        self, shard: int, start: int, stop: int, fetch: Fetch, /, *, step: int = CURRENT_STEP
    ) -> memoryview:
        """Return a range of a shard, which the batch of this step needs.

        What lies outside the shard, as the rows of a hostile index say, is left out.
        """
        start, stop = self._within(shard, start, stop)
        if start >= stop:
            return memoryview(b"")
        first = start // self.size
        base = int(self.starts[shard])
        numbers = list(range(base + first, base + -(-stop // self.size)))
        found: dict[int, bytes] = {}
        while len(found) < len(numbers):
            with self._lock:  # claim the chunks that no other thread reads
                wanted = [n for n in numbers if n not in found]
                others = [self._claimed[n] for n in wanted if n in self._claimed]
                claimed = [n for n in wanted if n not in self._claimed]
                self._claimed |= {number: threading.Event() for number in claimed}
            try:
                for number in claimed:
                    data = self._disk.get(*self._entry(number))
                    if data is not None:
                        found[number] = data
                        self._eviction.note(number, step)
                self._fetch(shard, [n for n in claimed if n not in found], found, fetch, step)
            finally:
                with self._lock:
                    for number in claimed:
                        self._claimed.pop(number).set()
            for event in others:
                event.wait()
        whole = found[numbers[0]] if len(numbers) == 1 else b"".join(map(found.get, numbers))  # type: ignore[arg-type]
        return memoryview(whole)[start - first * self.size : stop - first * self.size]

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

    def _fetch(
        self, shard: int, missing: list[int], found: dict[int, bytes], fetch: Fetch, step: int
    ) -> None:
        """Fetch chunks, neighbours in one piece, and put them into the cache."""
        base = int(self.starts[shard])
        runs = np.split(missing, np.flatnonzero(np.diff(missing) != 1) + 1) if missing else []
        for run in (numbers.tolist() for numbers in runs):
            start = (run[0] - base) * self.size
            data = fetch(shard, *self._within(shard, start, start + len(run) * self.size))
            for place, number in enumerate(run):
                name, length = self._entry(number)
                piece = bytes(data[place * self.size : place * self.size + length])
                found[number] = piece
                if len(piece) == length:
                    victims = self._eviction.victims(number, step, lambda n: self._entry(n)[0])
                    if self._disk.put(name, piece, victims):
                        self._eviction.note(number, step)

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
