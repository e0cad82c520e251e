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
        of population `population[i]`. A population is the items 0 to n - 1, such as the records of
        a class. All items in a random order are a *traversal*. The traversals, one after the other,
        are cut into subsets of m items, in which no item comes twice (if m is at most n).

        With n = 5 and m = 2, subset 2 starts at item 4 of traversal 0. It has the positions 4 and 5
        of this traversal, of which 5 is position 0 of traversal 1.
        """
        traversal, offset = np.divmod(number * self._m, self._sizes[population])
        position = offset[:, None] + np.arange(start, self._m if stop is None else stop)
        items = self._items_at(population, traversal, position)
        self._replace_first_items(items, population, traversal, position)
        return items

    def _items_at(self, population: Int64s, traversal: Int64s, position: Int64s) -> Int64s:
        """Return the items at these positions of a traversal in each row, int64[rows, m].

        A population is the items 0 to n - 1, and a traversal is a random order of them. Positions
        from n on are in the next traversal.

        In a population of n < 2 m - 1 items, several traversals have the same order, as many as
        are divided into whole subsets of m. In a larger population, the items of the next traversal
        are not computed here: in their place are items of this one, from position 0 on, which
        `_replace_first_items` replaces.
        """
        n, m = self._sizes[population], self._m
        # How many traversals have the same order: with n = 3 and m = 2, two have 3 whole subsets.
        num_equal = np.where(n < 2 * m - 1, m // np.gcd(n, m), 1)
        reaches_next = position[:, -1] >= n
        wrapped = position.copy()
        wrapped[reaches_next] %= n[reaches_next, None]
        return self._permuted(population, traversal // num_equal, wrapped)

    def _replace_first_items(
        self, items: Int64s, population: Int64s, traversal: Int64s, position: Int64s
    ) -> None:
        """Replace `items` at the first m positions of a traversal, in place, in large populations.

        A population is the items 0 to n - 1, and a traversal is a random order of them. Row i has
        the items at `position[i]` of `traversal[i]`; positions from n on are in the next traversal.
        If n >= 2 m - 1, the first m items of a traversal (but of the very first) come in another
        order, which `_first_items` computes.

        The comments have the values of one row: m = 3, n = 5, the positions 3 4 5 of traversal 0,
        and the items 0 4 1.
        """
        n, m = self._sizes[population], self._m
        reaches_next = position[:, -1] >= n
        last_traversal = traversal + reaches_next  # that the row has items of: 1
        position_in_last = position - (n * reaches_next)[:, None]  # [-2, -1, 0]
        has_first_items = (position_in_last[:, 0] < m) & (last_traversal > 0)
        rows = np.flatnonzero(has_first_items & (n >= 2 * m - 1))
        if not rows.size:
            return
        first_items = self._first_items(population[rows], last_traversal[rows])  # say [2, 4, 0]
        index = position_in_last[rows].clip(0, m - 1)  # [0, 0, 0]
        is_first = index == position_in_last[rows]  # [False, False, True]
        # The items 0 4 1 become 0 4 2.
        items[rows] = np.where(is_first, np.take_along_axis(first_items, index, 1), items[rows])

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
        and the first items of the next. Those of the next that it has already move back.

        For example, 5 items and m = 3: the traversals 2 3 1 0 4 and 4 0 2 1 3 are cut into the
        subsets 2 3 1, 0 4 4, and so on. So the start 4 0 2 of traversal 1 becomes 2 4 0. The
        comments have the values of this row.
        """
        m = self._m
        last_items, first_items = self._items_around(population, traversal)  # [4, 0, 1], [4, 0, 2]
        # How many items of the previous traversal are in the subset in which this one starts: 2. In
        # the sequence of all traversals this one starts at item 5, and subsets start at 0, 3 and 6.
        num_old = (traversal * self._sizes[population] % m)[:, None]
        is_in_subset = np.broadcast_to(np.arange(m) < num_old, last_items.shape)  # [1, 1, 0]
        is_old = _is_in_row(first_items, last_items, mask=is_in_subset)  # [True, True, False]
        order = new_entries_first(~is_old, m - num_old)  # [2, 0, 1]
        return np.take_along_axis(first_items, order, axis=1)  # [2, 4, 0]

    def _items_around(self, population: Int64s, traversal: Int64s) -> tuple[Int64s, Int64s]:
        """Return m items before the start of traversals, backwards, and the m items after it.

        A traversal is a random order of the items of a population, and row i is for traversal
        `traversal[i]` of population `population[i]`. If the traversals 0 and 1 are 2 3 1 0 4 and
        4 0 2 1 3, the two items around the start of traversal 1 are 4 0 and 4 0.
        """
        first_positions = np.broadcast_to(np.arange(self._m), (len(population), self._m))
        last_positions = self._sizes[population][:, None] - 1 - first_positions
        # Compute both traversals in one call: with few rows, calls cost more than items.
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
