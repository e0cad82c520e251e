"""An interleave whose weights change at some positions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.interleave import Interleave
from twinfeed.samplers.step_schedule import StepSchedule
from twinfeed.samplers.types import Int64s


class InterleaveSchedule:
    """Interleaves one after the other, such as of weights [3, 1], and of [1, 1] from position 100.
    Elements of a stream are counted from position 0, through all of these parts.
    """

    def __init__(self, weights: StepSchedule[Int64s], keys: list[int]) -> None:
        self.weights, self._keys = weights, keys
        self._cache: FifoCache[Interleave] = FifoCache(4)
        counts = [np.zeros_like(weights.values[0])]
        for part, (start, stop) in enumerate(pairwise(weights.starts)):
            counts.append(counts[-1] + self._interleave_of(part).num_before(stop - start))
        # How many elements of each stream come before each part: int64[parts, streams].
        self._counts_before: Int64s = np.array(counts)

    def _interleave_of(self, part: int) -> Interleave:
        """Return the interleave of part number `part`, from the cache if it is there."""
        weights, key = self.weights.values[part], self._keys[part]
        return self._cache.get(part, lambda: Interleave(weights, key, reshuffle=True))

    def elements_at(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the stream of the element at each position, and the element's index in it."""
        stream, index = np.empty_like(positions), np.empty_like(positions)
        for part, mask in self.weights.masks(positions):
            position_in_part = positions[mask] - self.weights.starts[part]
            stream[mask], index_in_part = self._interleave_of(part).elements_at(position_in_part)
            # Add the elements of the stream before the part.
            index[mask] = self._counts_before[part, stream[mask]] + index_in_part
        return stream, index

    def num_before(self, position: int) -> Int64s:
        """Return the number of elements of each stream before this position, int64[streams]."""
        part = self.weights.index_at(position)
        position_in_part = position - self.weights.starts[part]
        counts: Int64s = self._counts_before[part]
        return counts + self._interleave_of(part).num_before(position_in_part)

    def position_of(self, stream: int, index: int) -> int:
        """Return the position of element number `index` (from 0) of a stream, in all parts. The
        comments have element 5 of stream 0 in the parts 0 1 0 0 0 1 and 1 0 0 1, of weights 2 1 and
        1 1.
        """
        # `_counts_before` has the elements of each stream before each part: [[0, 0], [4, 2]]. Find
        # the last part that has at most 5 elements of stream 0 before it.
        part = int(np.searchsorted(self._counts_before[:, stream], index, side="right")) - 1  # 1
        index_in_part = index - int(self._counts_before[part, stream])  # 5 - 4 = 1
        position_in_part = self._interleave_of(part).position_of(stream, index_in_part)  # 2
        return self.weights.starts[part] + position_in_part  # 6 + 2 = 8
