"""Fair groups of m distinct items out of n, and patterns of streams in exact proportion.

An item stream is a concatenation of laps. Each lap is a permutation of the n items, and group t is
the entries `t * m` to `t * m + m`. So counts differ by at most one after any number of groups. A
group that straddles two laps must still be distinct:

* `n >= 2m - 1`: entries at the head of the new lap that also end the old lap move, stably, after
  the next entries that do not. Only the first m entries of a lap can change, and the last m - 1
  never do. So no change goes on from lap to lap.
* `n < 2m - 1`: one permutation is walked cyclically for `n / gcd(n, m)` groups, then renewed. This
  covers m > n too: all n items first, then again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers import _validate
from twinfeed.samplers._bits import Int64, spread
from twinfeed.samplers._memo import TableCache
from twinfeed.samplers._permutation import permute


class FairGroups:
    """Fair groups of m over many populations (classes) at once, each of its own size."""

    def __init__(self, sizes: Int64, m: int, key: int) -> None:
        self._sizes, self._m = sizes, m
        self._laps = TableCache(sizes, key)

    def groups(
        self, population: Int64, number: Int64, low: int = 0, high: int | None = None
    ) -> Int64:
        """Return places low to high of these groups, int64[rows, high - low]; items from 0.

        Only these places are drawn, unless two laps meet in the group.
        """
        n, m = self._sizes[population], self._m
        high = m if high is None else high
        start = number * m
        lap = start // n
        offset = start - lap * n
        cyclic = n < 2 * m - 1
        position = offset[:, None] + np.arange(low, high)
        renewal = np.where(cyclic, lap // (m // np.gcd(n, m)), lap)
        out = self._laps.entries(population, renewal, position % n[:, None])
        self._patch(out, ~cyclic & (offset + low < m) & (lap > 0), population, lap, position)
        straddling = ~cyclic & (offset + high > n)
        self._patch(out, straddling, population, lap + 1, position - n[:, None])
        return out

    def _patch(
        self, out: Int64, rows: NDArray[np.bool_], population: Int64, lap: Int64, position: Int64
    ) -> None:
        """Overwrite places that lie within the first m of a lap by the lap's adjusted head."""
        if not rows.any():
            return
        head = self._head(population[rows], lap[rows])
        place = position[rows]
        inside = (place >= 0) & (place < self._m)
        entries = np.take_along_axis(head, place.clip(0, self._m - 1), axis=1)
        out[rows] = np.where(inside, entries, out[rows])

    def _head(self, population: Int64, lap: Int64) -> Int64:
        """Return the first m entries of laps, clashes with the lap before moved back."""
        n, m = self._sizes[population], self._m
        taken = lap * n % m  # entries of the straddling group that the old lap gave
        last = n[:, None] - 1 - np.arange(m - 1)
        tail = self._laps.entries(population, lap - 1, last)
        first = np.broadcast_to(np.arange(m), (len(n), m))
        head = self._laps.entries(population, lap, first)
        # One search over all rows, told apart by an offset: m * m comparisons would take seconds.
        row = np.arange(len(n))[:, None] * int(n.max())
        used = np.append((row + tail)[np.arange(m - 1) < taken[:, None]], _validate.LIMIT)
        used.sort()
        free = used[np.searchsorted(used, row + head)] != row + head
        chosen = free & (np.cumsum(free, axis=1) <= (m - taken)[:, None])
        return np.take_along_axis(head, np.argsort(~chosen, axis=1, kind="stable"), axis=1)


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
