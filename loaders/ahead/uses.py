"""When each chunk of the shards is used next, since a stream is known."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.ahead.schedule import IDS, Schedule
from twinfeed.loaders.ahead.spans import NO_STEP, Spans
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.samplers.drawing.bits import ranges

CURRENT_STEP = -1
"""The step of the batch that is read now."""

_SAMPLES, _LEAST, _EPOCHS = 1 << 20, 1 << 12, 4
"""How far ahead a stream is looked at: `_SAMPLES` or `_EPOCHS` epochs, whichever is less, but at
least `_LEAST` samples. A chunk that is not used there is needed later than every chunk that is.
"""

Where = Callable[[Int64s], tuple[Int64s, Int64s, Int64s]]


class NextUses:
    """Find the step of the next use of each chunk, some samples ahead.

    `chunks_of` gives for the fields of records (int64[n]) the first and the last chunk, and the
    place of the record in the array. The stream is that of all ranks. Steps are counted over all
    epochs. With `planned`, spans are read as a whole when they are entered, and then kept.
    """

    def __init__(
        self,
        schedule: Schedule,
        chunks: int,
        chunks_of: Where,
        /,
        *,
        planned: bool = False,
        samples: int = _SAMPLES,
    ) -> None:
        self._schedule, self._sampler = schedule, schedule.sampler
        self._chunks_of = chunks_of
        traits = self._sampler.traits
        self._once = planned and (traits.reads_blocks or traits.max_cached is not None)
        epoch = len(self._sampler) * self._sampler.batch_size
        self._samples = min(samples, max(_LEAST, _EPOCHS * epoch))
        self.next: npt.NDArray[np.int64] = np.full(chunks, NO_STEP)
        self._keys: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._begin = self._end = self.now = 0
        self._span = 1

    def reach(self, step: int, /) -> bool:
        """Go to a batch. Return whether the uses were computed anew."""
        self.now = step
        if self._begin <= self.now < self._begin + max(1, (self._end - self._begin) // 2):
            return False
        self._look_ahead()
        return True

    def used(self, chunk: int, step: int = CURRENT_STEP, /) -> int:
        """Note that a chunk is read for a step; return the step of its next use."""
        step = self.now if step == CURRENT_STEP else max(self._begin - 1, min(step, self._end - 1))
        place = int(np.searchsorted(self._keys, self._key(chunk, step), side="right"))
        later = place < len(self._keys) and self._keys[place] // self._span == chunk
        self.next[chunk] = self._begin + int(self._keys[place]) % self._span if later else NO_STEP
        return int(self.next[chunk])

    def _key(self, chunk: int, step: int) -> int:
        return chunk * self._span + step - self._begin

    def _look_ahead(self) -> None:
        """Sort the uses of the coming batches by chunk and step."""
        steps = max(1, -(-self._samples // self._sampler.batch_size))
        self._begin, self._end, self._span = self.now, self.now + steps, steps
        records, at = self._coming()
        pieces = range(0, len(records), IDS)
        keys = [self._keys_of(records[n : n + IDS], at[n : n + IDS]) for n in pieces]
        self._keys = _distinct(np.concatenate([np.zeros(0, np.int64), *keys]))
        self.next[:] = NO_STEP
        chunk, first_use = np.divmod(self._keys, self._span)
        begins = np.flatnonzero(np.diff(chunk, prepend=-1))
        self.next[chunk[begins]] = self._begin + first_use[begins]

    def _coming(self) -> tuple[Int64s, Int64s]:
        """Return the records that the coming steps read, and the step of each."""
        if self._once:
            entered = Spans(self._schedule, self._begin).opened_before(self._end)
            first, stop, step = np.array(entered, np.int64).reshape(-1, 3).T
            return ranges(first, stop), np.repeat(step, stop - first)
        return self._schedule.records(self._begin, self._end)

    def _keys_of(self, records: Int64s, at: Int64s) -> Int64s:
        """Return a key for each chunk of records that are read at these steps."""
        low, high, places = self._chunks_of(records)
        steps = np.repeat(at[places], high - low + 1)
        return _distinct(ranges(low, high + 1) * self._span + steps - self._begin)


def _distinct(keys: Int64s) -> Int64s:
    """Return the distinct keys, sorted. `np.unique` has a hash table, slow for a million keys."""
    rising = np.sort(keys)
    return rising[np.diff(rising, prepend=-1) > 0]


class Kept:
    """The entries of a cache, and which of them makes room first: the entry that is needed last."""

    def __init__(self) -> None:
        self.next: dict[int, int] = {}  # the step of the next use of each entry
        self._heap: list[tuple[int, int]] = []  # the same; some are out of date

    def hold(self, one: int, when: int, /) -> None:
        """Add an entry that is used next at a step."""
        self.next[one] = when
        heappush(self._heap, (-when, -one))

    def furthest(self, after: int, /) -> int | None:
        """Take out the entry needed last; None if it is not needed after this step."""
        while self._heap:
            when, one = -self._heap[0][0], -self._heap[0][1]
            valid = self.next.get(one) == when
            if valid and when <= after:
                return None
            heappop(self._heap)
            if valid:
                del self.next[one]
                return one
        return None
