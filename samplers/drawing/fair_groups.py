"""Fair groups: an endless sequence of groups of m distinct items out of n.

After any number of groups, the counts of any two items differ by at most 1. The groups are slices
of one stream of items: group t is entries `t * m` to `t * m + m`. The stream is a concatenation of
*laps*; a lap is a random permutation of the n items. A group that contains the end of a lap and the
start of the next must still be distinct:

* `n >= 2m - 1`: entries at the head of the new lap that are in the same group's part of the old lap
  are moved back, stably, after the next entries that are not. This changes only the first m entries
  of a lap, and never the last m - 1, so it never cascades into the following lap.
* `n < 2m - 1`: the same permutation is repeated for `n / gcd(n, m)` groups, whose end is the end of
  a lap. Then a new permutation is drawn. This covers m > n too: a group has all n items, and then
  some again.
"""

from __future__ import annotations

import numpy as np

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.permutation import permute_rows
from twinfeed.samplers.drawing.random_words import random_words
from twinfeed.samplers.types import Int64s


class FairGroups:
    """Fair groups of m items of many populations (classes) at once, each of its own size."""

    def __init__(self, sizes: Int64s, m: int, key: int) -> None:
        self._sizes, self._m, self._key = sizes, m, key

    def groups(
        self, population: Int64s, number: Int64s, start: int = 0, stop: int | None = None
    ) -> Int64s:
        """Return items `start` to `stop` of each group (a row): int64[rows, stop - start].

        A group is given by its population and its number there. Only these items are computed,
        unless the group contains the end of a lap.
        """
        n, m = self._sizes[population], self._m
        stop = m if stop is None else stop
        first = number * m
        lap = first // n
        offset = first - lap * n  # of the group in its lap
        cyclic = n < 2 * m - 1
        position = offset[:, None] + np.arange(start, stop)
        permutation, entry = lap.copy(), position.copy()
        permutation[cyclic] //= m // np.gcd(n[cyclic], m)
        crosses = offset + stop > n
        entry[crosses] %= n[crosses, None]
        items = self._entries(population, permutation, entry)
        # The first m entries of a lap are its adjusted head: of this lap, or of the next.
        in_head = np.flatnonzero(~cyclic & (offset + start < m) & (lap > 0))
        straddling = np.flatnonzero(~cyclic & crosses)
        rows = np.append(in_head, straddling)
        if rows.size:
            next_lap = np.arange(len(rows)) >= len(in_head)
            head = self._head(population[rows], lap[rows] + next_lap)
            index = position[rows] - (n[rows] * next_lap)[:, None]
            adjusted = np.take_along_axis(head, index.clip(0, m - 1), axis=1)
            items[rows] = np.where((index >= 0) & (index < m), adjusted, items[rows])
        return items

    def _entries(self, population: Int64s, lap: Int64s, positions: Int64s) -> Int64s:
        """Return entries of the permutation of each row's population and lap: int64[rows, m]."""
        keys = random_words(random_words(self._key, population), lap)
        return permute_rows(self._sizes[population], keys, positions)

    def _head(self, population: Int64s, lap: Int64s) -> Int64s:
        """Return the first m entries of laps, after duplicates of the old lap are moved back."""
        n, m = self._sizes[population], self._m
        num_old = lap * n % m  # entries of the straddling group that are of the old lap
        first = np.broadcast_to(np.arange(m), (len(n), m))
        positions = np.concatenate([n[:, None] - 1 - first, first])
        # One call for the old and the new laps: with few rows, the calls cost more than the
        # entries.
        both = self._entries(np.tile(population, 2), np.append(lap - 1, lap), positions)
        tail, head = np.split(both, 2)
        # One binary search over all rows, each with an offset of its own: m * m comparisons would
        # take seconds.
        row = np.arange(len(n))[:, None] * int(n.max())
        used = np.append((row + tail)[np.arange(m) < num_old[:, None]], validate.LIMIT)
        used.sort()
        free = used[np.searchsorted(used, row + head)] != row + head
        chosen = free & (np.cumsum(free, axis=1) <= (m - num_old)[:, None])
        return np.take_along_axis(head, np.argsort(~chosen, axis=1, kind="stable"), axis=1)
