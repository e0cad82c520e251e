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

    `weights` has the weights of the streams, int64[streams], by the position from which on they
    hold. Each has a key. The elements of a stream are counted from position 0: a stream goes on
    where the weights change, from the number of elements that it had before.
    """

    def __init__(self, weights: StepSchedule[Int64s], keys: list[int]) -> None:
        self._weights, self._keys = weights, keys
        self._cache: FifoCache[Interleave] = FifoCache(4)
        counts = [np.zeros_like(weights.values[0])]
        for num_changes, (start, stop) in enumerate(pairwise(weights.starts)):
            counts.append(counts[-1] + self._interleave_after(num_changes).num_before(stop - start))
        # How many elements of each stream come before each change of the weights.
        self._counts_at_changes: Int64s = np.array(counts)

    def _interleave_after(self, num_changes: int) -> Interleave:
        """Return the interleave (a sequence of streams in proportion to weights) after a change.

        `num_changes` is the number of changes of the weights up to then.
        """
        weights, key = self._weights.values[num_changes], self._keys[num_changes]
        return self._cache.get(num_changes, lambda: Interleave(weights, key, reshuffle=True))

    def num_changes(self, position: int) -> int:
        """Return how often the weights have changed up to this position."""
        return self._weights.index_at(position)

    def elements_at(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the stream of the element at each position, and the element's index in it.

        The sequence is divided at the positions where the weights of the streams change. Each part
        is an interleave, which counts positions and elements from the start of the part.
        """
        stream, index = np.empty_like(positions), np.empty_like(positions)
        for num_changes, mask in self._weights.split(positions):
            position_in_part = positions[mask] - self._weights.starts[num_changes]
            stream[mask], index_in_part = self._interleave_after(num_changes).elements_at(
                position_in_part
            )
            # Add the elements of the stream before the part.
            index[mask] = self._counts_at_changes[num_changes, stream[mask]] + index_in_part
        return stream, index

    def num_before(self, position: int) -> Int64s:
        """Return the number of elements of each stream before this position, int64[streams].

        It is the number before the last change of the weights, and the number since then.
        """
        num_changes = self.num_changes(position)
        position_in_part = position - self._weights.starts[num_changes]
        counts: Int64s = self._counts_at_changes[num_changes]
        return counts + self._interleave_after(num_changes).num_before(position_in_part)

    def position_of(self, stream: int, index: int) -> int:
        """Return the position of element number `index` (from 0) of a stream."""
        # The last change of the weights that has at most `index` elements of the stream before it.
        num_changes = (
            int(np.searchsorted(self._counts_at_changes[:, stream], index, side="right")) - 1
        )
        index_in_part = index - int(self._counts_at_changes[num_changes, stream])
        position_in_part = self._interleave_after(num_changes).position_of(stream, index_in_part)
        return self._weights.starts[num_changes] + position_in_part
