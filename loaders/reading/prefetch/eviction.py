"""Eviction of cached chunks: those used furthest in the future, since a stream is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import heappop, heappush
from threading import Lock

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.reading.prefetch.spans import NO_STEP, Spans, reads_spans
from twinfeed.loaders.storage.disk import Disk
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.samplers.drawing.chunks import MAX_IDS
from twinfeed.samplers.drawing.int_arrays import ranges

CURRENT_STEP = -1
"""The step of the batch that is read now."""

_SAMPLES, _LEAST, _EPOCHS = 1 << 20, 1 << 12, 4
"""The look-ahead: `_SAMPLES` samples or `_EPOCHS` epochs, whichever is less, but at least `_LEAST`
samples. A chunk without a use in this window is evicted before every chunk with one.
"""

_UNREAD, _AGAIN = 3600.0, 10.0
"""Seconds after which entries of data that nobody reads are evicted first, and seconds between two
searches where the first found none.
"""

ChunksOfRecords = Callable[[Int64s], tuple[Int64s, Int64s, Int64s]]


class NextUses:
    """The step of the next use of each chunk (Belady's algorithm: the future is known).

    `chunks_of` gives for the fields of records (int64[n]) the first and the last chunk, and the
    number of the record in the array. The stream is that of all ranks. Steps are counted over all
    epochs. With `prefetched`, spans are read as a whole when they are opened, and then buffered.
    """

    def __init__(
        self, schedule: Schedule, chunks_of: ChunksOfRecords, /, *, prefetched: bool
    ) -> None:
        self._schedule, sampler = schedule, schedule.sampler
        self._chunks_of = chunks_of
        self._reads_spans = prefetched and reads_spans(sampler)
        epoch = len(sampler) * sampler.batch_size
        samples = min(_SAMPLES, max(_LEAST, _EPOCHS * epoch))
        self._window = max(1, -(-samples // sampler.batch_size))  # steps of the window
        self._keys: npt.NDArray[np.int64] = np.array([NO_STEP])  # sorted: see `_keys_of`
        self._window_start = self._window_end = self._now = 0

    def seek(self, step: int, /) -> bool:
        """Advance to a batch. Return whether the uses were computed anew."""
        self._now = step
        if (
            self._window_start
            <= step
            < self._window_start + max(1, (self._window_end - self._window_start) // 2)
        ):
            return False
        self._window_start, self._window_end = step, step + self._window
        if self._reads_spans:
            records, steps, _ = Spans(self._schedule, self._window_start).records_before(
                self._window_end
            )
        else:
            records, steps = self._schedule.records(self._window_start, self._window_end)
        parts = range(0, len(records), MAX_IDS)
        keys = [self._keys_of(records[n : n + MAX_IDS], steps[n : n + MAX_IDS]) for n in parts]
        self._keys = _sorted_unique(np.concatenate([*keys, [NO_STEP]]))
        return True

    def after(self, chunk: int, step: int, /) -> int:
        """Return the step of the next use of a chunk after a step."""
        step = (
            self._now
            if step == CURRENT_STEP
            else max(self._window_start - 1, min(step, self._window_end - 1))
        )
        key = chunk * self._window + step - self._window_start
        later = int(self._keys[np.searchsorted(self._keys, key, side="right")])
        return (
            self._window_start + later % self._window if later // self._window == chunk else NO_STEP
        )

    def _keys_of(self, records: Int64s, steps: Int64s) -> Int64s:
        """Return a key for each chunk of records that are read at these steps."""
        low, high, numbers = self._chunks_of(records)
        steps = np.repeat(steps[numbers], high - low + 1)
        return _sorted_unique(ranges(low, high + 1) * self._window + steps - self._window_start)


def _sorted_unique(keys: Int64s) -> Int64s:
    """Return the distinct keys, sorted. `np.unique` has a hash table, slow for a million keys."""
    rising = np.sort(keys)
    return rising[np.diff(rising, prepend=-1) > 0]


class Eviction:
    """Eviction from a cache, for several threads.

    If the stream is known (`advance`), entries of other data that nobody has read for an hour are
    evicted first, and then the chunks used furthest in the future (Belady's algorithm). If it is
    not known, the entries used longest ago are evicted. `digests` begin the names of this data.
    """

    def __init__(self, disk: Disk, digests: Collection[str]) -> None:
        self._oldest = _oldest(disk, (), 0.0)
        self._oldest_unread = _oldest(disk, digests, _UNREAD)
        self._lock = Lock()
        self._uses: NextUses | None = None
        self._next: dict[int, int] = {}  # the step of the next use of each cached chunk
        self._furthest: list[tuple[int, int]] = []  # heaps of the same; some are out of date
        self._soonest: list[tuple[int, int]] = []

    def advance(self, uses: NextUses, step: int, cached: Callable[[], Iterable[int]], /) -> None:
        """Advance to a batch of a stream; `cached` returns the chunks that the cache has."""
        with self._lock:
            chunks = [*self._next] if uses is self._uses else [*cached()]
            self._uses = uses
            if uses.seek(step):
                self._next, self._furthest, self._soonest = {}, [], []
                for chunk in chunks:
                    self._push(chunk, uses.after(chunk, step - 1))
            # The buffer may have served a use without the cache. The next use counts all the same,
            # or the chunk would never be evicted.
            while self._soonest and self._soonest[0][0] < step:
                when, chunk = heappop(self._soonest)
                if self._next.get(chunk) == when:
                    self._push(chunk, uses.after(chunk, step - 1))

    def note(self, chunk: int, step: int, /) -> None:
        """Note that a chunk was read for a step, and is in the cache."""
        with self._lock:
            if self._uses is not None:
                self._push(chunk, self._uses.after(chunk, step))

    def victims(self, chunk: int, step: int, name: Callable[[int], str], /) -> Iterator[str]:
        """Yield entries to evict for a chunk read for a step, but none that is needed before it."""
        # All calls share these generators. Callers hold the lock of the folder: without it, two
        # threads could advance one generator at once.
        with self._lock:
            next_use = None if self._uses is None else self._uses.after(chunk, step)
        oldest = self._oldest if next_use is None else self._oldest_unread
        while (entry := next(oldest, None)) is not None:
            yield entry
        while next_use is not None and (victim := self._pop_furthest(next_use)) is not None:
            yield name(victim)

    def _push(self, chunk: int, when: int) -> None:
        self._next[chunk] = when
        heappush(self._furthest, (-when, -chunk))
        heappush(self._soonest, (when, chunk))

    def _pop_furthest(self, after: int) -> int | None:
        """Take out the chunk used last; None if it is not used after this step."""
        with self._lock:
            while self._furthest:
                when, chunk = -self._furthest[0][0], -self._furthest[0][1]
                valid = self._next.get(chunk) == when
                if valid and when <= after:
                    return None
                heappop(self._furthest)
                if valid:
                    del self._next[chunk]
                    return chunk
        return None


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
