"""Fair groups: an endless sequence of groups of m distinct items out of n.

After any number of groups, the counts of any two items differ by at most 1. The groups are slices
of one stream of items: group t is entries `t * m` to `t * m + m`. The stream is a concatenation of
*cycles*; a cycle is a random permutation of the n items. A group that contains the end of a cycle
and the start of the next must still be distinct:

* `n >= 2m - 1`: entries at the head of the new cycle that the group already has from the old cycle
  are moved back, stably, after the next entries that it does not have. This changes only the first
  m entries of a cycle, and never the last m - 1, so it never cascades into the following cycle.
* `n < 2m - 1`: the same permutation is repeated for `n / gcd(n, m)` groups, whose end is the end of
  a cycle. Then a new permutation is drawn. This covers m > n too: a group has all n items, and then
  some again.
"""

from __future__ import annotations

import numpy as np

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.permutation import permute_rows
from twinfeed.samplers.drawing.random_words import random_words
from twinfeed.samplers.types import Int64s


class FairSubsets:
    """Fair groups of m items of many populations (classes) at once, each of its own size."""

    def __init__(self, sizes: Int64s, m: int, key: int) -> None:
        self._sizes, self._m, self._key = sizes, m, key

    def subsets(
        self, population: Int64s, group: Int64s, start: int = 0, stop: int | None = None
    ) -> Int64s:
        """Return items `start` to `stop` of each group (a row): int64[rows, stop - start].

        Row i is group number `group[i]` of population `population[i]`, whose groups of m items are
        cut from permutations of all its items, one after the other (cycles).
        """
        n, m = self._sizes[population], self._m
        stop = m if stop is None else stop
        cycle, offset = np.divmod(group * m, n)  # where the group starts
        position = offset[:, None] + np.arange(start, stop)
        permutation, entry = cycle.copy(), position.copy()
        # In a small population, m / gcd(n, m) cycles have the same permutation.
        repeats = n < 2 * m - 1
        permutation[repeats] //= m // np.gcd(n[repeats], m)
        crosses = offset + stop > n  # whether the items are of two cycles
        entry[crosses] %= n[crosses, None]
        items = self._entries(population, permutation, entry)
        # The first m entries of a cycle are in another order (see `_head`), so that no group has an
        # item of both cycles: replace those of the cycle in which a group starts, and of the next.
        in_head = np.flatnonzero(~repeats & (offset + start < m) & (cycle > 0))
        straddling = np.flatnonzero(~repeats & crosses)
        rows = np.append(in_head, straddling)
        if rows.size:
            next_cycle = np.arange(len(rows)) >= len(in_head)
            head = self._head(population[rows], cycle[rows] + next_cycle)
            index = position[rows] - (n[rows] * next_cycle)[:, None]
            reordered = np.take_along_axis(head, index.clip(0, m - 1), axis=1)
            items[rows] = np.where((index >= 0) & (index < m), reordered, items[rows])
        return items

    def _entries(self, population: Int64s, permutation: Int64s, positions: Int64s) -> Int64s:
        """Return entries of permutation number `permutation[i]` for each row i: int64[rows, m]."""
        keys = random_words(random_words(self._key, population), permutation)
        return permute_rows(self._sizes[population], keys, positions)

    def _head(self, population: Int64s, cycle: Int64s) -> Int64s:
        """Return the first m entries of each cycle in an order without duplicates: int64[rows, m].

        A cycle is a permutation of all n items. The group that has the end of the previous cycle
        and the start of this one must not have an item twice. So the items that it already has move
        back, after the next items.
        """
        n, m = self._sizes[population], self._m
        num_old = cycle * n % m  # entries of this group that are of the previous cycle
        first = np.broadcast_to(np.arange(m), (len(n), m))
        positions = np.concatenate([n[:, None] - 1 - first, first])
        # One call for both cycles: with few rows, the calls cost more than the entries. `tail` has
        # the last m entries of the previous cycle, the last entry first.
        both = self._entries(np.tile(population, 2), np.append(cycle - 1, cycle), positions)
        tail, head = np.split(both, 2)
        # Search the head of each row in the items that the group already has. One binary search for
        # all rows, each with an offset of its own: m * m comparisons would take seconds.
        row_offset = np.arange(len(n))[:, None] * int(n.max())
        used = np.append((row_offset + tail)[np.arange(m) < num_old[:, None]], validate.LIMIT)
        used.sort()
        # The first free items fill the group. All others follow, in their order.
        is_free = used[np.searchsorted(used, row_offset + head)] != row_offset + head
        stays = is_free & (np.cumsum(is_free, axis=1) <= (m - num_old)[:, None])
        return np.take_along_axis(head, np.argsort(~stays, axis=1, kind="stable"), axis=1)
