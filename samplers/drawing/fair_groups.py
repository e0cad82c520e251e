"""Fair groups of m distinct items out of n.

An item stream is a concatenation of laps. Each lap is a permutation of the n items, and group t is
the entries `t * m` to `t * m + m`. So counts differ by at most 1 after any number of groups. A
group that straddles two laps must still be distinct:

* `n >= 2m - 1`: entries at the head of the new lap that also end the old lap move, stably, after
  the next entries that do not. Only the first m entries of a lap can change, and the last m - 1
  never do. So no change goes on from lap to lap.
* `n < 2m - 1`: one permutation is walked cyclically for `n / gcd(n, m)` groups, then renewed. This
  covers m > n too: all n items first, then again.
"""

from __future__ import annotations

import numpy as np

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.int_arrays import Int64
from twinfeed.samplers.drawing.permutation import permute_rows
from twinfeed.samplers.drawing.random_words import words


class FairGroups:
    """Fair groups of m over many populations (classes) at once, each of its own size."""

    def __init__(self, sizes: Int64, m: int, key: int) -> None:
        self._sizes, self._m, self._key = sizes, m, key

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
        renewal, wrapped = lap.copy(), position.copy()
        renewal[cyclic] //= m // np.gcd(n[cyclic], m)
        beyond = offset + high > n
        wrapped[beyond] %= n[beyond, None]
        out = self._entries(population, renewal, wrapped)
        # Places within the first m of a lap are of its adjusted head: of this lap, or of the next.
        begun = np.flatnonzero(~cyclic & (offset + low < m) & (lap > 0))
        straddling = np.flatnonzero(~cyclic & beyond)
        rows = np.append(begun, straddling)
        if rows.size:
            ahead = np.arange(len(rows)) >= len(begun)
            head = self._head(population[rows], lap[rows] + ahead)
            place = position[rows] - (n[rows] * ahead)[:, None]
            adjusted = np.take_along_axis(head, place.clip(0, m - 1), axis=1)
            out[rows] = np.where((place >= 0) & (place < m), adjusted, out[rows])
        return out

    def _entries(self, population: Int64, lap: Int64, positions: Int64) -> Int64:
        """Return entries of the permutations of a population and lap a row: int64[rows, m]."""
        keys = words(words(self._key, population), lap)
        return permute_rows(self._sizes[population], keys, positions)

    def _head(self, population: Int64, lap: Int64) -> Int64:
        """Return the first m entries of laps, clashes with the lap before moved back."""
        n, m = self._sizes[population], self._m
        taken = lap * n % m  # entries of the straddling group that the old lap gave
        first = np.broadcast_to(np.arange(m), (len(n), m))
        places = np.concatenate([n[:, None] - 1 - first, first])
        # One call for the old and the new laps: with few rows, the calls cost more than the
        # entries.
        both = self._entries(np.tile(population, 2), np.append(lap - 1, lap), places)
        tail, head = np.split(both, 2)
        # One search over all rows, each with an offset of its own: m * m comparisons would take
        # seconds.
        row = np.arange(len(n))[:, None] * int(n.max())
        used = np.append((row + tail)[np.arange(m) < taken[:, None]], validate.LIMIT)
        used.sort()
        free = used[np.searchsorted(used, row + head)] != row + head
        chosen = free & (np.cumsum(free, axis=1) <= (m - taken)[:, None])
        return np.take_along_axis(head, np.argsort(~chosen, axis=1, kind="stable"), axis=1)
