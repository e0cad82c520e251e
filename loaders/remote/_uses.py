"""When each chunk of the shards is used next, since a stream is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from twinfeed.loaders._checks import Int64s
from twinfeed.samplers import BatchStream

NEVER = np.iinfo(np.int64).max

_SAMPLES, _LEAST, _EPOCHS = 1 << 20, 1 << 12, 4
"""How far ahead a stream is looked at: `_SAMPLES` or `_EPOCHS` epochs, whichever is less, but at
least `_LEAST` samples. A chunk that is not used there is needed later than every chunk that is.
"""

_IDS = 1 << 15


class NextUses:
    """Tell the step of the next use of each chunk, as far as some samples ahead.

    `chunks_of` gives for records (int64[n]) the first and the last chunk of each. The stream is
    that of all ranks. Steps are counted over all epochs.
    """

    def __init__(
        self,
        sampler: BatchStream,
        chunks: int,
        chunks_of: Callable[[Int64s], tuple[Int64s, Int64s]],
        /,
        *,
        samples: int = _SAMPLES,
    ) -> None:
        self._sampler = sampler.shard(0, 1) if sampler.sharded else sampler
        self._chunks_of = chunks_of
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

    def used(self, chunk: int, /) -> int:
        """Note that a chunk is used now; return the step of its next use."""
        place = int(np.searchsorted(self._keys, self._key(chunk, self.now), side="right"))
        later = place < len(self._keys) and self._keys[place] // self._span == chunk
        self.next[chunk] = self._begin + int(self._keys[place]) % self._span if later else NEVER
        return int(self.next[chunk])

    def _key(self, chunk: int, step: int) -> int:
        return chunk * self._span + step - self._begin

    def _look_ahead(self) -> None:
        """Sort the uses of the coming batches by chunk and step."""
        sampler, per = self._sampler, len(self._sampler)
        steps, chunks, seen, step = [], [], 0, self.now
        while seen < self._samples:
            epoch, first = divmod(step, per)
            stop = min(per, first + max(1, _IDS // sampler.batch_size))
            for place, ids in enumerate(sampler.batches(epoch, first, stop), step):
                records = sampler.records(ids[ids >= 0])
                low, high = self._chunks_of(records)
                used = low if (low == high).all() else _all(low, high)
                used = np.unique(used)
                chunks.append(used)
                steps.append(np.full(len(used), place))
                seen += len(ids)
            step += stop - first
        self._begin, self._end, self._span = self.now, step, step - self.now
        keys = np.concatenate(chunks) * self._span + np.concatenate(steps) - self.now
        self._keys = np.sort(keys)
        self.next[:] = NEVER
        chunk, first_use = np.divmod(self._keys, self._span)
        begins = np.flatnonzero(np.diff(chunk, prepend=-1))
        self.next[chunk[begins]] = self._begin + first_use[begins]


def _all(low: Int64s, high: Int64s) -> Int64s:
    """Return the chunks from `low` to `high`, end to end."""
    counts = high - low + 1
    starts = np.cumsum(counts) - counts
    every: Int64s = np.arange(counts.sum()) - np.repeat(starts - low, counts)
    return every
