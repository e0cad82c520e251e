"""A periodic pattern of streams in exact proportion."""

from __future__ import annotations

import numpy as np

from twinfeed.samplers._bits import Int64, spread
from twinfeed.samplers._permutation import permute


class Pattern:
    """Give stream i `weights[i]` of every `sum(weights)` consecutive turns, for ever."""

    def __init__(self, weights: Int64, key: int) -> None:
        self._weights, self._key = weights, key
        period = int(weights.sum())
        slots, places = spread(weights)
        slots = slots.astype(np.min_scalar_type(len(weights)))
        self._stream = slots[permute(period, key, np.arange(period))]
        self._place = np.empty(period, np.min_scalar_type(int(weights.max())))
        self._place[np.argsort(self._stream, kind="stable")] = places

    def __reduce__(self) -> tuple[type[Pattern], tuple[Int64, int]]:
        """Pickle without the pattern, which is made again."""
        return type(self), (self._weights, self._key)

    def turns(self, number: Int64) -> tuple[Int64, Int64]:
        """Return the stream of each turn, and how many turns that stream had before."""
        lap, slot = np.divmod(number, len(self._stream))
        stream = self._stream[slot].astype(np.int64)
        return stream, lap * self._weights[stream] + self._place[slot]

    def given(self, number: int) -> Int64:
        """Return how many of the first `number` turns each stream has, int64[streams]."""
        lap, rest = divmod(number, len(self._stream))
        partial = np.bincount(self._stream[:rest], minlength=len(self._weights))
        return lap * self._weights + partial
