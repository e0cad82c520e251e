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
from numpy.typing import NDArray

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.permutation import permute_rows
from twinfeed.samplers.drawing.random_words import random_words
from twinfeed.samplers.types import Int64s


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

        Row i has items `start` to `stop - 1` (by default all m) of subset `number[i]` of population
        `population[i]`. A population is the items 0 to n - 1, such as the records of a class. All
        items in a random order are a *traversal*. The traversals, one after the other, are cut into
        subsets of m items. No subset has an item twice (if m is at most n):

        - In a population of n < 2 m - 1 items, several traversals have the same order, as many as
          are needed until the end of a subset is the end of a traversal.
        - In a larger population, the first items of a traversal are reordered.

        With n = 5 and m = 2, subset 2 starts at item 4 of traversal 0. It has the positions 4 and 5
        of this traversal, of which 5 is position 0 of traversal 1.
        """
        n, m = self._sizes[population], self._m
        stop = m if stop is None else stop
        traversal, offset = np.divmod(number * m, n)  # where the subset starts
        # Positions in this traversal; those from n on are in the next traversal.
        position = offset[:, None] + np.arange(start, stop)
        reaches_next = offset + stop > n
        is_small = n < 2 * m - 1
        # How many traversals have the same order: with n = 3 and m = 2, two have 3 whole subsets.
        num_equal = np.where(is_small, m // np.gcd(n, m), 1)
        wrapped = position.copy()
        wrapped[reaches_next] %= n[reaches_next, None]
        items = self._permuted(population, traversal // num_equal, wrapped)
        # In large populations, replace the first m items of a traversal by the reordered ones, and
        # so all items that are not in the traversal in which the subset starts. Count positions
        # from the start of the last traversal that the subset reaches: 4 and 5 become -1 and 0.
        last_traversal = traversal + reaches_next
        start_of_last = n * reaches_next
        is_reordered = ~is_small & (last_traversal > 0) & (offset + start - start_of_last < m)
        rows = np.flatnonzero(is_reordered)
        if rows.size:
            first_items = self._first_items(population[rows], last_traversal[rows])
            position_in_last = position[rows] - start_of_last[rows, None]
            items[rows] = _replace_first_items(items[rows], position_in_last, first_items)
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

        A population is the items 0 to n - 1, such as the records of a class, and a traversal is a
        random order of all of them. The traversals, one after the other, are cut into subsets of m
        items. So a subset may have the last items of one traversal and the first items of the next.
        Items of the next that the subset has already move back, after the next item that it does
        not have.

        The comments have the values of one row: n = 5, m = 3, and traversal 1. The traversals 0 and
        1 are 2 3 1 0 4 and 4 0 2 1 3. So subset 1 has 0 4 and then 4, which is twice. The start
        4 0 2 of traversal 1 becomes 2 4 0.

        Returns:
            int64[rows, m]: row i is for traversal `traversal[i]` of population `population[i]`.
        """
        n, m = self._sizes[population], self._m
        # How many items of the previous traversal are in the subset in which this one starts: 2. In
        # the sequence of all traversals this one starts at item 5, and subsets start at 0, 3 and 6.
        num_old = traversal * n % m
        first_positions = np.broadcast_to(np.arange(m), (len(n), m))  # [0, 1, 2]
        last_positions = n[:, None] - 1 - first_positions  # [4, 3, 2]
        # Compute both traversals in one call: with few rows, calls cost more than items.
        old_and_new_items = self._permuted(
            np.tile(population, 2),
            np.append(traversal - 1, traversal),
            np.concatenate([last_positions, first_positions]),
        )
        # The last items of the previous traversal, backwards: [4, 0, 1]. The subset has the first
        # `num_old` of them. And the first items of this traversal: [4, 0, 2].
        old_items, items = np.split(old_and_new_items, 2)
        is_in_subset = _is_in_row(items, old_items, mask=first_positions < num_old[:, None])
        # `is_in_subset` is [True, True, False]. The first items that are not in the subset complete
        # it, here the first one. All others follow in their order: a stable argsort lists the
        # indices with False before the indices with True.
        num_missing = m - num_old  # 1
        is_among_first = np.cumsum(~is_in_subset, axis=1) <= num_missing[:, None]
        order = np.argsort(is_in_subset | ~is_among_first, axis=1, kind="stable")  # [2, 0, 1]
        return np.take_along_axis(items, order, axis=1)  # [2, 4, 0]


def _replace_first_items(items: Int64s, position: Int64s, first_items: Int64s) -> Int64s:
    """Return `items`, where the first m items of a permutation are replaced by reordered ones.

    A subset of items may have the end of one permutation and the start of the next. Its items are
    in a row of `items`, and `position` has the position of each in the next permutation, which is
    negative before its start. A row of `first_items` has the m reordered items.

    In the comments, the row of `items` is 7 8 9, and the row of `first_items` is 5 6.
    """
    # `position` is [[-1, 0, 1]].
    index = position.clip(0, first_items.shape[1] - 1)  # [[0, 0, 1]]
    is_replaced = index == position  # from 0 to m - 1: [[False, True, True]]
    # Take [[5, 5, 6]] where an item is replaced: the result is [[7, 5, 6]].
    return np.where(is_replaced, np.take_along_axis(first_items, index, axis=1), items)


def _is_in_row(queries: Int64s, table: Int64s, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return whether `queries[i, j]` is one of the values `table[i][mask[i]]`, bool[rows, m].

    As `np.isin` for each row, but by one binary search for all rows: each row's values are shifted
    by an offset that no other row has, so that they equal no value of another row.
    """
    row_offsets = np.arange(len(queries))[:, None] * (max(queries.max(), table.max()) + 1)
    queries, table = queries + row_offsets, table + row_offsets
    values = np.append(table[mask], validate.LIMIT)  # above every query, so each has an index
    values.sort()
    found: NDArray[np.bool_] = values[np.searchsorted(values, queries)] == queries
    return found
