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
    """Fair subsets of m items from several populations (such as classes) of their own sizes.

    A population of n items has the items 0 to n - 1. A traversal is a random permutation of them.
    """

    def __init__(self, sizes: Int64s, m: int, key: int) -> None:
        self._sizes, self._m, self._key = sizes, m, key

    def subsets(
        self, population: Int64s, number: Int64s, start: int = 0, stop: int | None = None
    ) -> Int64s:
        """Return the items of one subset in each row, int64[rows, stop - start].

        Row i has items `start` to `stop - 1` (by default all m, at least one) of subset `number[i]`
        of population `population[i]`. A population is the items 0 to n - 1. All items in a random
        order are a *traversal*. The traversals, one after the other, are cut into subsets of m
        items, in which no item comes twice (if m is at most n). So with n = 5 and m = 2, subset 2
        has the last item of traversal 0 and the first item of traversal 1. The comments have the
        values of this subset.
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
        """Return items of a random permutation in each row, int64[rows, m], as `positions`.

        A population has n items, 0 to n - 1, and many random permutations, numbered from 0 on. Row
        i is for permutation `number[i]` of population number `population[i]`. If this permutation
        is 3 0 4 1 2, and the row of `positions` is 0 2, the row of the result is 3 4.
        """
        keys = random_words(random_words(self._key, population), number)
        return permute_rows(self._sizes[population], keys, positions)

    def _first_items(self, population: Int64s, traversal: Int64s) -> Int64s:
        """Return the first m items of traversals, reordered so that no subset has an item twice.

        A traversal is a random order of the items of a population. The traversals, one after the
        other, are cut into subsets of m items. So a subset may have the last items of one traversal
        and the first items of the next. If an item is among both, it moves back in the next
        traversal, and another item takes its position in the subset.

        For example, with 5 items and m = 3, the traversals 2 3 1 0 4 and 4 0 2 1 3 are cut into the
        subsets 2 3 1, 0 4 4, and so on. Subset 1 has item 4 twice. So traversal 1 starts with 2 4 0
        in place of 4 0 2. The comments have the values for this traversal.
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
        """Return the last m items of the previous traversal, reversed, and the first m of this one.

        A traversal is a random order of the items of a population, and row i is for traversal
        `traversal[i]` of population `population[i]`. The traversals follow each other, and a subset
        of m (`_m`) items may have items of both. If the traversals 0 and 1 are 2 3 1 0 4 and
        4 0 2 1 3, and m is 2, the result for traversal 1 is 4 0 and 4 0.
        """
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
    """Return whether `queries[i, j]` is one of the values `table[i][mask[i]]`, bool[rows, m].

    As `np.isin` for each row, but by one binary search for all rows: each row's values are shifted
    by an offset that no other row has, so that they equal no value of another row.
    """
    row_offsets = np.arange(len(queries))[:, None] * (max(queries.max(), table.max()) + 1)
    queries, table = queries + row_offsets, table + row_offsets
    values = np.append(table[mask], validate.LIMIT)  # above every query, so each has an index
    values.sort()
    found: Bools = values[np.searchsorted(values, queries)] == queries
    return found
