"""When each chunk of the shards is used next, since a stream is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.support.checks import Int64s
from twinfeed.samplers import BatchStream

NEVER = np.iinfo(np.int64).max

NOW = -1
"""The step of the batch that is read now."""

_SAMPLES, _LEAST, _EPOCHS = 1 << 20, 1 << 12, 4
"""How far ahead a stream is looked at: `_SAMPLES` or `_EPOCHS` epochs, whichever is less, but at
least `_LEAST` samples. A chunk that is not used there is needed later than every chunk that is.
"""

_IDS = 1 << 15

Draw = Callable[[int, int, int], list[Int64s]]
"""Give the batches of an epoch from a step to another."""

Where = Callable[[Int64s], tuple[Int64s, Int64s, Int64s]]


class NextUses:
    """Tell the step of the next use of each chunk, as far as some samples ahead.

    `chunks_of` gives for the fields of records (int64[n]) the first and the last chunk, and the
    place of the record in the array. The stream is that of all ranks, and `draw` gives its batches.
    Steps are counted over all epochs.

    With `planned`, blocks are read as a whole when they are entered, and then held: the first use
    of a block counts, and a use after a pause of a quarter of an epoch.
    """

    def __init__(
        self,
        sampler: BatchStream,
        draw: Draw,
        chunks: int,
        chunks_of: Where,
        /,
        *,
        planned: bool = False,
        samples: int = _SAMPLES,
    ) -> None:
        self._sampler, self._draw = sampler, draw
        self._chunks_of = chunks_of
        self._once = planned and (sampler.in_blocks or sampler.live is not None)
        epoch = len(self._sampler) * self._sampler.batch_size
        self._samples = min(samples, max(_LEAST, _EPOCHS * epoch))
        self.next: npt.NDArray[np.int64] = np.full(chunks, NEVER)
        self._keys: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._begin = self._end = self.now = 0
        self._span = 1

    def reach(self, epoch: int, step: int, /) -> bool:
        """Go to a batch. Return whether the uses were computed anew."""
        self.now = epoch * len(self._sampler) + step
        if self._begin <= self.now < self._begin + max(1, (self._end - self._begin) // 2):
            return False
        self._look_ahead()
        return True

    def used(self, chunk: int, step: int = NOW, /) -> int:
        """Note that a chunk is read for a step; return the step of its next use."""
        step = self.now if step == NOW else max(self._begin - 1, min(step, self._end - 1))
        place = int(np.searchsorted(self._keys, self._key(chunk, step), side="right"))
        later = place < len(self._keys) and self._keys[place] // self._span == chunk
        self.next[chunk] = self._begin + int(self._keys[place]) % self._span if later else NEVER
        return int(self.next[chunk])

    def _key(self, chunk: int, step: int) -> int:
        return chunk * self._span + step - self._begin

    def _look_ahead(self) -> None:
        """Sort the uses of the coming batches by chunk and step."""
        sampler, per = self._sampler, len(self._sampler)
        drawn, steps, seen, step = [], [], 0, self.now
        while seen < self._samples:
            epoch, first = divmod(step, per)
            stop = min(per, first + max(1, _IDS // sampler.batch_size))
            for place, ids in enumerate(self._draw(epoch, first, stop), step):
                drawn.append(sampler.records(ids[ids >= 0]))
                steps.append(np.full(len(drawn[-1]), place))
                seen += len(ids)
            step += stop - first
        self._begin, self._end, self._span = self.now, step, step - self.now
        records, at = np.concatenate(drawn), np.concatenate(steps)
        if self._once:
            records, at = self._entered(records, at)
        pieces = range(0, len(records), _IDS)
        keys = [self._keys_of(records[n : n + _IDS], at[n : n + _IDS]) for n in pieces]
        self._keys = np.unique(np.concatenate([np.zeros(0, np.int64), *keys]))
        self.next[:] = NEVER
        chunk, first_use = np.divmod(self._keys, self._span)
        begins = np.flatnonzero(np.diff(chunk, prepend=-1))
        self.next[chunk[begins]] = self._begin + first_use[begins]

    def _entered(self, records: Int64s, at: Int64s) -> tuple[Int64s, Int64s]:
        """Return the records of all blocks that are entered, and the step of each."""
        epoch = at // len(self._sampler)
        first, stop = np.empty_like(records), np.empty_like(records)
        for number in np.unique(epoch).tolist():
            mine = epoch == number
            first[mine], stop[mine] = self._sampler.spans(records[mine], number)
        order = np.argsort(first, kind="stable")
        epoch = epoch[order]
        again = (np.diff(first[order]) == 0) & (np.diff(epoch) == 0)
        again &= np.diff(order) <= max(_LEAST, len(self._sampler) * self._sampler.batch_size // 4)
        enters = np.sort(order[np.concatenate([[True], ~again])[: len(order)]])
        first, stop = first[enters], stop[enters]
        return every(first, stop - 1), np.repeat(at[enters], stop - first)

    def _keys_of(self, records: Int64s, at: Int64s) -> Int64s:
        """Return a key for each chunk of records that are read at these steps."""
        low, high, places = self._chunks_of(records)
        steps = np.repeat(at[places], high - low + 1)
        return np.unique(every(low, high) * self._span + steps - self._begin)


def every(low: Int64s, high: Int64s, /) -> Int64s:
    """Return the numbers from each `low` to its `high`, end to end."""
    counts = high - low + 1
    starts = np.cumsum(counts) - counts
    every: Int64s = np.arange(counts.sum()) - np.repeat(starts - low, counts)
    return every
