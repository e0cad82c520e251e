"""Evict the cached chunks that are used furthest in the future (Belady's algorithm)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import heappop, heappush
from threading import Lock

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.reading.prefetch.block_uses import NO_STEP, BlockUses, prefetches_whole_blocks
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.storage.disk import Disk
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.samplers.drawing.chunks import MAX_IDS
from twinfeed.samplers.drawing.int_arrays import ranges

CURRENT_STEP = -1
"""The step of the batch that is read now."""

_MAX_SAMPLES, _MIN_SAMPLES, _MAX_EPOCHS = 1 << 20, 1 << 12, 4
"""The look-ahead: at most so many samples and epochs, and at least `_MIN_SAMPLES` samples. A chunk
without a use in this window is evicted before every chunk with one.
"""

_UNREAD_SECONDS, _SEARCH_SECONDS = 3600.0, 10.0
"""Entries of other data sets are evicted first if they were not read for so many seconds. If a
search for such entries finds none, the next search is so many seconds later.
"""

ChunksOfRecords = Callable[[Int64s], tuple[Int64s, Int64s, Int64s]]
"""A function of record ids, int64[n], that returns for each of their fields its first chunk, its
last chunk, and the position of its record in the array.
"""


class NextUses:
    """The step of the next use of each chunk (Belady's algorithm: the future is known).

    The uses are those of all ranks, within a window of steps. Steps are counted over all epochs.
    With `prefetched`, a span (a block of records that are read around the same time) is read as a
    whole when the stream enters it, and then buffered.
    """

    def __init__(
        self, schedule: Schedule, chunks_of: ChunksOfRecords, /, *, prefetched: bool
    ) -> None:
        self._schedule, sampler = schedule, schedule.sampler
        self._chunks_of = chunks_of
        self._prefetches_blocks = prefetched and prefetches_whole_blocks(sampler)
        epoch_samples = len(sampler) * sampler.batch_size
        samples = min(_MAX_SAMPLES, max(_MIN_SAMPLES, _MAX_EPOCHS * epoch_samples))
        self._window = max(1, -(-samples // sampler.batch_size))  # in steps
        self._keys: npt.NDArray[np.int64] = np.array([NO_STEP])  # sorted: see `_keys_of`
        self._start = self._stop = self._current = 0  # the window of steps, and the step read now

    def seek(self, step: int, /) -> bool:
        """Set the step that is read now, and move the window of known uses if this is needed.

        The window starts at the new step if that is in its second half or outside of it.

        Returns:
            Whether the window was moved, so that the next use of every chunk may be another.
        """
        self._current = step
        if self._start <= step < self._start + max(1, (self._stop - self._start) // 2):
            return False
        self._start, self._stop = step, step + self._window
        if self._prefetches_blocks:
            records, steps, _ = BlockUses(self._schedule, self._start).new_records_before(
                self._stop
            )
        else:
            records, steps = self._schedule.records(self._start, self._stop)
        starts = range(0, len(records), MAX_IDS)
        slices = [slice(start, start + MAX_IDS) for start in starts]  # to bound the memory
        keys = [self._keys_of(records[ids], steps[ids]) for ids in slices]
        self._keys = _sorted_unique(np.concatenate([*keys, [NO_STEP]]))
        return True

    def after(self, chunk: int, step: int, /) -> int:
        """Return the first step after `step` that uses a chunk.

        `CURRENT_STEP` stands for the step that is read now. Returns `NO_STEP` if no step within the
        window uses the chunk.
        """
        if step == CURRENT_STEP:
            step = self._current
        else:
            step = max(self._start - 1, min(step, self._stop - 1))
        key = chunk * self._window + step - self._start  # see `_keys_of`
        next_key = int(self._keys[np.searchsorted(self._keys, key, side="right")])
        next_chunk, next_step = divmod(next_key, self._window)
        return self._start + next_step if next_chunk == chunk else NO_STEP

    def _keys_of(self, records: Int64s, steps: Int64s) -> Int64s:
        """Return the sorted keys of all uses of chunks, where records[i] is read at steps[i].

        The key of a use is chunk * window + step, with the step counted from the start of the
        window. So the keys of a chunk are next to each other, in the order of their steps, and a
        binary search finds the next use.
        """
        first, last, positions = self._chunks_of(records)
        chunks = ranges(first, last + 1)  # all chunks of each field, one after another
        steps_of_chunks = np.repeat(steps[positions], last - first + 1)
        return _sorted_unique(chunks * self._window + steps_of_chunks - self._start)


def _sorted_unique(keys: Int64s) -> Int64s:
    """Return the distinct keys, sorted, like `np.unique` but faster for a million keys."""
    sorted_keys = np.sort(keys)
    return sorted_keys[np.diff(sorted_keys, prepend=-1) > 0]


class Eviction:
    """Choose the entries that a disk cache evicts. Thread-safe.

    If the stream is known (`advance`), entries of other data sets that were not read for an hour
    are evicted first, and then the chunks used furthest in the future (Belady's algorithm).
    Otherwise the least recently used entries are evicted. The names of the entries of this data set
    begin with one of `digests`.
    """

    def __init__(self, disk: Disk, digests: Collection[str]) -> None:
        self._oldest = _oldest(disk, (), 0.0)
        self._oldest_unread = _oldest(disk, digests, _UNREAD_SECONDS)
        self._lock = Lock()
        self._uses: NextUses | None = None
        self._next: dict[int, int] = {}  # the step of the next use of each cached chunk
        # Heaps of the same. An entry whose step is no longer that in `_next` is out of date.
        self._furthest: list[tuple[int, int]] = []
        self._soonest: list[tuple[int, int]] = []

    def advance(self, uses: NextUses, step: int, cached: Callable[[], Iterable[int]], /) -> None:
        """Set the step that is read now, and update the next use of each cached chunk.

        `uses` knows the next uses in this stream. If it is another stream than in the last call,
        `cached()` returns the chunks that are in the cache.
        """
        with self._lock:
            chunks = [*self._next] if uses is self._uses else [*cached()]
            self._uses = uses
            if uses.seek(step):
                self._next, self._furthest, self._soonest = {}, [], []
                for chunk in chunks:
                    self._push(chunk, uses.after(chunk, step - 1))
            # A use before this step is over, even if the buffer has served it without the cache.
            # Otherwise the chunk would never be evicted.
            while self._soonest and self._soonest[0][0] < step:
                next_use, chunk = heappop(self._soonest)
                if self._next.get(chunk) == next_use:
                    self._push(chunk, uses.after(chunk, step - 1))

    def note(self, chunk: int, step: int, /) -> None:
        """Record that a chunk is in the cache, and was used for this step: set its next use."""
        with self._lock:
            if self._uses is not None:
                self._push(chunk, self._uses.after(chunk, step))

    def victims(self, chunk: int, step: int, name: Callable[[int], str], /) -> Iterator[str]:
        """Yield the names of cache entries to evict, in order, to make room for a new chunk.

        Entries that are used again before the new chunk is are not yielded.

        Args:
            chunk: the new chunk, which was read at `step`.
            step: the step that the next use of `chunk` comes after.
            name: returns the name of the cache entry of a chunk.
        """
        # All calls share the two generators. Callers have the lock of the folder, so that no two
        # threads advance a generator at once.
        with self._lock:
            next_use = None if self._uses is None else self._uses.after(chunk, step)
        oldest = self._oldest if next_use is None else self._oldest_unread
        while (entry := next(oldest, None)) is not None:
            yield entry
        while next_use is not None and (victim := self._pop_furthest(next_use)) is not None:
            yield name(victim)

    def _push(self, chunk: int, next_use: int) -> None:
        """Set the step of the next use of a cached chunk."""
        self._next[chunk] = next_use
        heappush(self._furthest, (-next_use, -chunk))
        heappush(self._soonest, (next_use, chunk))

    def _pop_furthest(self, step: int) -> int | None:
        """Remove and return the cached chunk whose next use is furthest in the future.

        Returns None if that use is not after `step`.
        """
        with self._lock:
            while self._furthest:
                next_use, chunk = -self._furthest[0][0], -self._furthest[0][1]
                up_to_date = self._next.get(chunk) == next_use  # else the entry is just dropped
                if up_to_date and next_use <= step:
                    return None
                heappop(self._furthest)
                if up_to_date:
                    del self._next[chunk]
                    return chunk
        return None


def _oldest(disk: Disk, digests: Collection[str], seconds: float) -> Iterator[str | None]:
    """Yield the names of cache entries that were not used for `seconds`, the oldest use first.

    Entries whose names begin with one of `digests` are skipped. When there are no more, None is
    yielded, and the next item comes from a new search of the folder. If a search has found nothing,
    None is yielded for `_SEARCH_SECONDS` before the next search.
    """
    while True:
        now = time.time()
        found = sorted(
            (last_use, name)
            for name, last_use in disk.entries()
            if last_use <= now - seconds and name[:24] not in digests
        )
        for last_use, name in found:
            if disk.last_use(name) == last_use:  # else it was used after the search
                yield name
        yield None
        while not found and time.time() <= now + _SEARCH_SECONDS:
            yield None
