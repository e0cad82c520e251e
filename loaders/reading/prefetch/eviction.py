"""Evict the cached chunks that are used furthest in the future: Belady's algorithm.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 5(2), 1966.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import heappop, heappush
from math import inf
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
"""The look-ahead: the uses of chunks are known for a window of `_MAX_EPOCHS` epochs, but at most
`_MAX_SAMPLES` and at least `_MIN_SAMPLES` samples. A chunk without a use in this window is evicted
before all others.
"""

_UNREAD_SECONDS, _SEARCH_SECONDS = 3600.0, 10.0
"""Entries of other data sets are evicted first if they were not read for `_UNREAD_SECONDS`. If a
search for such entries finds none, the next search is `_SEARCH_SECONDS` later.
"""

ChunksOfRecords = Callable[[Int64s], tuple[Int64s, Int64s, Int64s]]
"""A function of record ids, int64[n], that returns three arrays with an element for each field of
these records: its first chunk, its last chunk, and the position of its record among the n ids.
"""


class NextUses:
    """The step of the next use of each chunk, as Belady's algorithm needs it: the future is known.

    The uses are those of all ranks, within a window of global steps.

    Each use is stored as one integer, chunk * window + step, where `window` is the number of steps
    and the step is counted from the start of the window. Sorted, these keys have the uses of a
    chunk next to each other in the order of their steps, so that a binary search finds the next
    use. For example, with a window of 100 steps, the key 4217 says that step 17 uses chunk 42.

    Args:
        schedule: the batches of all ranks.
        chunks_of: finds the chunks that contain the fields of records.
        prefetched: whether ranges are prefetched. Then a block (of records that are read around the
            same time) is read as a whole when its first record is needed, and not again.
    """

    def __init__(
        self, schedule: Schedule, chunks_of: ChunksOfRecords, /, *, prefetched: bool
    ) -> None:
        self._schedule, sampler = schedule, schedule.sampler
        self._chunks_of = chunks_of
        self._prefetches_blocks = prefetched and prefetches_whole_blocks(sampler)
        epoch_samples = len(sampler) * sampler.batch_size
        samples = min(_MAX_SAMPLES, max(_MIN_SAMPLES, _MAX_EPOCHS * epoch_samples))
        self._window = max(1, -(-samples // sampler.batch_size))  # in steps, rounded up
        # The sorted keys of all uses. The last one, larger than all keys, is found in place of a
        # next use that does not exist.
        self._keys: npt.NDArray[np.int64] = np.array([NO_STEP])
        self._start = self._stop = self._current_step = 0  # the window of steps, and the step now

    def move_to(self, step: int, /) -> bool:
        """Set the step that is read now, and move the window of known uses if this is needed.

        The uses of chunks are known for the steps of a window. It stays while the step is in its
        first half, so that about half a window of the future is always known. Otherwise it is moved
        to start at this step, and the uses are found again. For example, the window of the steps
        1000 to 1099 stays for step 1049; for step 1050, it becomes 1050 to 1149.

        Returns:
            Whether the window was moved. Then the next use of a chunk must be looked up again.
        """
        self._current_step = step
        if self._start <= step < self._start + max(1, (self._stop - self._start) // 2):
            return False
        self._start, self._stop = step, step + self._window
        # Which step reads which record. Without blocks, a record is read whenever it is drawn. With
        # blocks of records, all of a block are read at once, at its first use, and not again.
        if self._prefetches_blocks:
            records, steps, _ = BlockUses(self._schedule, step).new_records_before(self._stop)
        else:
            records, steps = self._schedule.records(self._start, self._stop)
        starts = range(0, len(records), MAX_IDS)
        slices = [slice(start, start + MAX_IDS) for start in starts]  # to bound the memory
        # Store each use of a chunk as one integer: step 1017 uses chunk 42 as 42 * 100 + 17 = 4217,
        # if the window has 100 steps and starts at 1000. `NO_STEP`, which is larger than all of
        # them, is added at the end: `next_use` finds it if there is no next use.
        keys = [self._keys_of_uses(records[part], steps[part]) for part in slices]
        self._keys = _sorted_unique(np.concatenate([*keys, [NO_STEP]]))
        return True

    def next_use(self, chunk: int, step: int, /) -> int:
        """Return the first step after `step` that uses a chunk, or `NO_STEP` if none is known.

        The uses are known for a window of steps, [_start, _stop). `CURRENT_STEP` means the
        step that is read now.

        For example, the window is the steps 1000 to 1099, and the steps 1017 and 1060 use chunk 42.
        Then `_keys` has 42 * 100 + 17 = 4217 and 4260. After step 1030, key 4230, the next larger
        key is 4260: chunk 42 is used next in step 1060. After step 1070, key 4270, the next larger
        key may be 4305, which is of chunk 43: no step is known.
        """
        if step == CURRENT_STEP:
            step = self._current_step
        else:  # a step outside the window would give a key of another chunk
            step = max(self._start - 1, min(step, self._stop - 1))
        # In the example, for chunk 42 after step 1030:
        key = chunk * self._window + step - self._start  # 4230
        next_key = int(self._keys[np.searchsorted(self._keys, key, side="right")])  # 4260
        next_chunk, next_step = divmod(next_key, self._window)  # 42, 60
        return self._start + next_step if next_chunk == chunk else NO_STEP

    def _keys_of_uses(self, records: Int64s, steps: Int64s) -> Int64s:
        """Return the sorted keys of the uses of chunks by records, where steps[i] reads records[i].

        The key of a use is chunk * window + step, with the step counted from the start of the
        window. A field may lie in several chunks, and a chunk may have several of the fields: each
        key is returned once. For example, step 3 of a window of 100 steps reads a record with two
        fields. One lies in the chunks 5 and 6, the other in chunk 6: the keys are 503 and 603.
        """
        # For each field of each record its first and its last chunk, and which of `records` it is.
        first, last, record_positions = self._chunks_of(records)
        chunks = ranges(first, last + 1)  # all chunks of each field, one field after another
        steps_of_chunks = np.repeat(steps[record_positions], last - first + 1)
        return _sorted_unique(chunks * self._window + steps_of_chunks - self._start)


def _sorted_unique(keys: Int64s) -> Int64s:
    """Return the distinct keys, sorted, like `np.unique` but faster for a million keys."""
    sorted_keys = np.sort(keys)
    return sorted_keys[np.diff(sorted_keys, prepend=-1) > 0]


class Eviction:
    """Choose the entries that a disk cache evicts. Thread-safe.

    Before `set_step` is called, the future uses are not known: the least recently used entries are
    evicted. After that, entries of other data sets that were not read for an hour are evicted
    first, and then the chunks used furthest in the future (Belady's algorithm). An entry is named
    f"{digest}-{number}", and `digests` has the digests of this data set.
    """

    def __init__(self, disk: Disk, digests: Collection[str]) -> None:
        self._all_entries = _UnusedEntries(disk, (), 0.0)
        self._other_entries = _UnusedEntries(disk, digests, _UNREAD_SECONDS)
        self._lock = Lock()
        self._uses: NextUses | None = None
        self._next_uses: dict[int, int] = {}  # the step of the next use of each cached chunk
        # Two heaps of the same: (-next use, -chunk), and (next use, chunk). A pair whose step is no
        # longer that in `_next_uses` is out of date, and is ignored.
        self._furthest: list[tuple[int, int]] = []
        self._soonest: list[tuple[int, int]] = []

    def set_step(self, uses: NextUses, step: int, cached: Callable[[], Iterable[int]], /) -> None:
        """Set the step that is read now, and update the next use of each cached chunk.

        To make room, the cache evicts the chunk that is used furthest in the future. So
        `_next_uses` stores for each cached chunk the step of its next use, and two heaps find the
        largest of these steps (`_furthest`, to evict) and the smallest (`_soonest`, to find uses
        that lie in the past by now). A heap also has old pairs (step, chunk), which no longer agree
        with `_next_uses`: they are skipped.

        Args:
            uses: computes the next use of a chunk from the coming batches.
            step: the step that is read now.
            cached: a function that lists the chunks in the cache. It is only called if `uses` is
                another object than in the last call.
        """
        with self._lock:
            chunks = [*self._next_uses] if uses is self._uses else [*cached()]
            self._uses = uses
            # The uses are known for a window of steps. If it was moved, find all next uses again:
            # the first use at this step or later, which is after `step` - 1.
            if uses.move_to(step):
                self._next_uses, self._furthest, self._soonest = {}, [], []
                for chunk in chunks:
                    self._push(chunk, uses.next_use(chunk, step - 1))
            # Replace the next uses that are before this step. (A chunk is not always read from the
            # cache at its use: its bytes may be in the buffer. Without this, its next use would
            # stay in the past, and the chunk would never be evicted.)
            while self._soonest and self._soonest[0][0] < step:
                next_use, chunk = heappop(self._soonest)
                if self._next_uses.get(chunk) == next_use:  # else the pair is out of date
                    self._push(chunk, uses.next_use(chunk, step - 1))

    def record_use(self, chunk: int, step: int, /) -> None:
        """Record that a chunk is in the cache, and was used for this step: set its next use."""
        with self._lock:
            if self._uses is not None:
                self._push(chunk, self._uses.next_use(chunk, step))

    def victims(self, chunk: int, step: int, name: Callable[[int], str], /) -> Iterator[str]:
        """Yield the names of cache entries to evict, in order, to make room for a new chunk.

        - If the coming uses of chunks are not known: all entries, the least recently used first.
        - If they are known: first the entries of other data sets that were not read for an hour.
          Then chunks of this data set, the one with the latest next use first; but no chunk that is
          needed again before the new one.

        Args:
            chunk: the new chunk, which was read for `step`.
            step: the step whose batch needs the new chunk, or `CURRENT_STEP`.
            name: returns the name of the cache entry of a chunk.
        """
        with self._lock:
            next_use = None if self._uses is None else self._uses.next_use(chunk, step)
        # Only one thread at a time is here: the caller has locked the folder.
        yield from (self._all_entries if next_use is None else self._other_entries).pop_each()
        while next_use is not None and (victim := self._pop_furthest(next_use)) is not None:
            yield name(victim)

    def _push(self, chunk: int, next_use: int) -> None:
        """Set the step of the next use of a cached chunk."""
        self._next_uses[chunk] = next_use
        heappush(self._furthest, (-next_use, -chunk))
        heappush(self._soonest, (next_use, chunk))

    def _pop_furthest(self, step: int) -> int | None:
        """Remove and return the cached chunk whose next use is furthest in the future.

        Returns None if that use is not after `step`.
        """
        with self._lock:
            while self._furthest:
                # The heap has the pairs (-next use, -chunk), so the latest use comes first.
                next_use, chunk = -self._furthest[0][0], -self._furthest[0][1]
                is_up_to_date = self._next_uses.get(chunk) == next_use  # else ignore the pair
                if is_up_to_date and next_use <= step:
                    return None
                heappop(self._furthest)
                if is_up_to_date:
                    del self._next_uses[chunk]
                    return chunk
        return None


class _UnusedEntries:
    """The cache entries that were not used for `seconds`.

    Entries of the shards with these `digests` are left out. The name of an entry is
    f"{digest}-{number}".
    """

    def __init__(self, disk: Disk, digests: Collection[str], seconds: float) -> None:
        self._disk, self._digests, self._seconds = disk, digests, seconds
        self._entries: deque[tuple[float, str]] = deque()  # found and not yielded: (last use, name)
        self._next_search = 0.0  # the time before which the folder is not searched

    def pop_each(self) -> Iterator[str]:
        """Yield the names of entries to evict, the oldest use first.

        If all entries that were found are evicted, search the folder. As this is slow, it is not
        done for `_SEARCH_SECONDS` after a search without a result, and never after an error.
        """
        now = time.time()
        if not self._entries and now > self._next_search:
            self._next_search = inf  # until the search has succeeded
            self._entries += sorted(
                (last_use, name)
                for name, last_use in self._disk.entries()
                if last_use <= now - self._seconds and name.partition("-")[0] not in self._digests
            )
            self._next_search = 0.0 if self._entries else now + _SEARCH_SECONDS
        while self._entries:
            last_use, name = self._entries.popleft()
            if self._disk.last_use(name) == last_use:  # else it was used after the search
                yield name
