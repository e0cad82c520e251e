"""Remote shards through a disk cache: aligned chunks, and which of them make room."""

from __future__ import annotations

import hashlib
import heapq
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.ahead.uses import CURRENT_STEP, Kept, NextUses
from twinfeed.loaders.remote.cache import DiskCache
from twinfeed.loaders.remote.disk import Disk

Fetch = Callable[[int, int, int], memoryview]
"""Return a range of a shard from its store: (shard, start, stop)."""

_LEAST, _MOST = 1 << 16, 1 << 22
_RECORDS = 4
"""A chunk has about so many records, within its limits."""

_ENTRIES = 1 << 18
"""A full cache has at most about so many entries."""

_OTHERS, _AGAIN = 3600.0, 10.0
"""Seconds after which entries of data that nobody reads make room first, and seconds between two
searches where the first found none.
"""


def chunk_bytes(record: float, cache: DiskCache, /) -> int:
    """Return the bytes of a chunk, a power of two, for records of `record` bytes.

    >>> chunk_bytes(10_000, DiskCache("cache", bytes=10**9))
    65536
    """
    wanted = max(_LEAST, min(_MOST, _RECORDS * record), cache.bytes / _ENTRIES)
    return 1 << int(np.ceil(np.log2(wanted)))


class Chunks:
    """Read shards in chunks, from the cache or through it.

    `depends` says what the entries depend on, for each shard or for all together. `sizes` are the
    bytes of the shards, and `size` is the bytes of a chunk. The chunks of shard n are numbered from
    `starts[n]` to `starts[n + 1]`.

    If the coming uses are known (`follow`), entries of other data that nobody has read for an hour
    make room first, and then the entries of this data that are needed last. If the coming uses are
    not known, the entries used longest ago make room.
    """

    def __init__(
        self, cache: DiskCache, depends: Sequence[str], sizes: npt.NDArray[np.int64], size: int, /
    ) -> None:
        self._disk = Disk(cache)
        self._sizes = sizes
        self.size = size
        self.starts = np.concatenate([[0], np.cumsum(-(-sizes // size))])
        self._digests = [
            hashlib.sha256(f"{size} {one}".encode("utf-8", "surrogateescape")).hexdigest()[:24]
            for one in depends
        ]
        self._oldest = _oldest(self._disk, (), 0.0)
        self._oldest_others = _oldest(self._disk, set(self._digests), _OTHERS)
        self._lock = threading.Lock()
        self._claimed: dict[int, threading.Event] = {}
        self._uses: NextUses | None = None
        self._kept = Kept()
        self._due: list[tuple[int, int]] = []  # a heap by the step that needs the chunk

    def follow(self, uses: NextUses, step: int, /) -> None:
        """Find out when each chunk is used next, if this batch of a stream is read now."""
        with self._lock:
            present = list(self._kept.next)
            if uses is not self._uses:
                self._uses = uses
                starts = dict(zip(self._digests, self.starts.tolist(), strict=False))
                held = [name.split("-") for name, _ in self._disk.entries()]
                present = [starts[one] + int(n) for one, n in held if one in starts]
            if uses.reach(step):
                self._kept, self._due = Kept(), []
                for chunk in present:
                    self._hold(chunk, int(uses.next[chunk]))
            # A use that was served from memory is over too. Else its chunk would be kept for ever.
            while self._due and self._due[0][0] < uses.now:
                when, chunk = heapq.heappop(self._due)
                if self._kept.next.get(chunk) == when:
                    self._hold(chunk, uses.used(chunk, uses.now - 1))

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
                waits = [self._claimed[n] for n in wanted if n in self._claimed]
                mine = [n for n in wanted if n not in self._claimed]
                self._claimed |= {number: threading.Event() for number in mine}
            try:
                for number in mine:
                    data = self._disk.get(*self._entry(number))
                    if data is not None:
                        found[number] = data
                        self._used(number, step)
                missing = [n for n in mine if n not in found]
                self._fetch(shard, base, missing, found, fetch, step)
            finally:
                with self._lock:
                    for number in mine:
                        self._claimed.pop(number).set()
            for event in waits:
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
        self,
        shard: int,
        base: int,
        missing: list[int],
        found: dict[int, bytes],
        fetch: Fetch,
        step: int,
    ) -> None:
        """Fetch chunks, neighbours in one piece, and put them into the cache."""
        breaks = [n for n in range(1, len(missing)) if missing[n] != missing[n - 1] + 1]
        for first, last in zip([0, *breaks], [*breaks, len(missing)], strict=True):
            run = missing[first:last]
            if not run:
                continue
            start = (run[0] - base) * self.size
            stop = min((run[-1] - base + 1) * self.size, int(self._sizes[shard]))
            data = fetch(shard, start, stop)
            for place, number in enumerate(run):
                name, length = self._entry(number)
                piece = bytes(data[place * self.size : place * self.size + length])
                found[number] = piece
                if len(piece) == length:
                    with self._lock:
                        next_use = None if self._uses is None else self._uses.used(number, step)
                    if self._disk.put(name, piece, self._victims(next_use)):
                        self._used(number, step)

    def _entry(self, chunk: int) -> tuple[str, int]:
        """Return the name and the length of a chunk."""
        shard = int(np.searchsorted(self.starts, chunk, side="right")) - 1
        length = int(self._sizes[shard]) - (chunk - int(self.starts[shard])) * self.size
        group = min(shard, len(self._digests) - 1)
        return f"{self._digests[group]}-{chunk - int(self.starts[group])}", min(self.size, length)

    def _used(self, chunk: int, step: int) -> None:
        """Note that a chunk was read for a step, and is in the cache."""
        with self._lock:
            if self._uses is not None:
                self._hold(chunk, self._uses.used(chunk, step))

    def _hold(self, chunk: int, when: int) -> None:
        """Note the next use of a chunk that is in the cache; the lock is held."""
        self._kept.hold(chunk, when)
        heapq.heappush(self._due, (when, chunk))

    def _victims(self, next_use: int | None) -> Iterator[str]:
        """Yield the entries that make room for a chunk. Entries needed before the chunk stay."""
        # All calls share these generators. Callers hold the lock of the folder: without it, two
        # threads could advance one generator at once.
        oldest = self._oldest if next_use is None else self._oldest_others
        while (name := next(oldest, None)) is not None:
            yield name
        while next_use is not None:
            with self._lock:
                chunk = self._kept.furthest(next_use)
            if chunk is None:
                return
            yield self._entry(chunk)[0]


def _oldest(disk: Disk, digests: Collection[str], seconds: float) -> Iterator[str | None]:
    """Yield entries of other digests not used for `seconds`, those used longest ago first.

    None means that there are no more. When all entries found are yielded, the folder is searched
    again. A search that found nothing is repeated only after some seconds.
    """
    while True:
        now = time.time()
        found = sorted(
            (when, name)
            for name, when in disk.entries()
            if when <= now - seconds and name[:24] not in digests
        )
        for when, name in found:
            if disk.last_use(name) == when:
                yield name
        yield None
        while not found and time.time() <= now + _AGAIN:
            yield None
