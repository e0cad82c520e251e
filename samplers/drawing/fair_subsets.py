"""Fair subsets: an endless sequence of subsets of m distinct items out of n.

After any number of subsets, the counts of any two items differ by at most 1. The subsets are slices
of one endless sequence of items: subset t is entries `t * m` to `t * m + m - 1`. The sequence is a
concatenation of *traversals*. A traversal is a random permutation of the n items. With n = 5 items
and subsets of m = 2::

    traversals  3 0 4 1 2 | 1 4 2 0 3 | ...
    subsets     3 0, 4 1, 2   1, 4 2, 0 3, ...

A subset that has the end of a traversal and the start of the next must be distinct, too:

* `n >= 2m - 1`: items at the start of the new traversal that the subset already has from the old
  traversal move back, stably, after the next items that it does not have. This changes only the
  first m entries of a traversal, and never the last m - 1, so it never cascades into the traversal
  after it.
* `n < 2m - 1`: the same permutation is repeated for `m / gcd(n, m)` traversals, at whose end a
  subset ends. Then a new permutation is drawn. This covers m > n too: a subset then has all n
  items, and some of them again.
"""

from __future__ import annotations

import numpy as np

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.int_arrays import new_entries_first
from twinfeed.samplers.drawing.permutation import permute_rows
from twinfeed.samplers.drawing.random_words import random_words
from twinfeed.samplers.types import Bools, Int64s


class FairSubsets:
    """Fair subsets of m items from several populations (such as classes) of their own sizes."""

    def __init__(self, sizes: Int64s, m: int, key: int) -> None:
        self._sizes, self._m, self._key = sizes, m, key

    def subsets(
        self, population: Int64s, number: Int64s, start: int = 0, stop: int | None = None
    ) -> Int64s:
        """Return items `start` to `stop - 1` of subset `number[i]` of each `population[i]`,
        int64[rows, …]. The comments have subset 2 of n = 5 and m = 2, which begins in traversal 0
        and ends in 1.
        """
        n, m = self._sizes[population], self._m
        index = number[:, None] * m + np.arange(start, m if stop is None else stop)
        traversal, position = np.divmod(index, n[:, None])  # of each item: [[0, 1]] and [[4, 0]]
        # The first m items of a traversal may be reordered, so that they differ from the last m - 1
        # of the traversal before. In a population of n < m + (m - 1) items, the first m and the
        # last m - 1 overlap. There, m / gcd(n, m) traversals in a row have the same order instead:
        # any n consecutive items of these are distinct, and so are the m of a subset. A subset ends
        # where the order changes: with n = 4 and m = 3, three traversals are four subsets.
        is_small = n < 2 * m - 1
        num_equal = np.where(is_small, m // np.gcd(n, m), 1)
        items = self._permuted(population, traversal[:, 0] // num_equal, position)
        # In a large population, each traversal has an order of its own, and its first m items are
        # reordered. A subset has such items if a traversal starts in it.
        is_first = (position < m) & (traversal > 0) & ~is_small[:, None]  # [[False, True]]
        rows = np.flatnonzero(is_first.any(axis=1))
        if rows.size:
            first_items = self._first_items(population[rows], traversal[rows, -1])
            # Clip the positions of other items, which are not replaced.
            replacements = np.take_along_axis(first_items, position[rows].clip(max=m - 1), axis=1)
            items[rows] = np.where(is_first[rows], replacements, items[rows])
        return items

    def _permuted(self, population: Int64s, number: Int64s, positions: Int64s) -> Int64s:
        """Return the items at `positions` of random permutation `number[i]` of each
        `population[i]`.
        """
        keys = random_words(random_words(self._key, population), number)
        return permute_rows(self._sizes[population], keys, positions)

    def _first_items(self, population: Int64s, traversal: Int64s) -> Int64s:
        """Return the first m items of traversals, reordered so that no subset has an item twice.
        The comments have the traversals 2 3 1 0 4 and 4 0 2 1 3 for m = 3: subset 1 would have item
        4 twice.
        """
        m = self._m
        # The last m items of the previous traversal, in reverse order, and the first m of this one.
        last_items, first_items = self._items_around(population, traversal)  # [4, 0, 1], [4, 0, 2]
        # How many items of the previous traversal are in the subset in which this one starts: 2,
        # the first 2 of the reversed row. In the sequence of all traversals, this one starts at
        # index 5, and the subset at index 3.
        num_old = (traversal * self._sizes[population] % m)[:, None]
        is_old = np.broadcast_to(np.arange(m) < num_old, last_items.shape)  # [True, True, False]
        is_repeated = _is_in_row(first_items, last_items, mask=is_old)  # [True, True, False]
        # The subset needs 3 - 2 = 1 more item: the first item that is not repeated moves to the
        # front. The other items follow in their order.
        order = new_entries_first(~is_repeated, m - num_old)  # [2, 0, 1]
        return np.take_along_axis(first_items, order, axis=1)  # [2, 4, 0]

    def _items_around(self, population: Int64s, traversal: Int64s) -> tuple[Int64s, Int64s]:
        """Return the last m items of the traversal before, reversed, and the first m of this."""
        first_positions = np.broadcast_to(np.arange(self._m), (len(population), self._m))
        last_positions = self._sizes[population][:, None] - 1 - first_positions
        # Draw the items of both traversals in one call, which is faster if there are few rows.
        last_and_first_items = self._permuted(
            np.tile(population, 2),
            np.append(traversal - 1, traversal),
            np.concatenate([last_positions, first_positions]),
        )
        last_items, first_items = np.split(last_and_first_items, 2)
        return last_items, first_items


def _is_in_row(queries: Int64s, table: Int64s, mask: Bools) -> Bools:
    """Return whether `queries[i, j]` is one of the values `table[i][mask[i]]`: by one binary
    search, as an offset for each row keeps the rows apart.
    """
    row_offsets = np.arange(len(queries))[:, None] * (max(queries.max(), table.max()) + 1)
    queries, table = queries + row_offsets, table + row_offsets
    values = np.append(table[mask], validate.LIMIT)  # above every query, so each has an index
    values.sort()
    found: Bools = values[np.searchsorted(values, queries)] == queries
    return found
