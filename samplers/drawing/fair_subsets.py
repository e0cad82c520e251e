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
        """Return the items of one subset a row, int64[rows, stop - start].

        Row i has items `start` to `stop - 1` (by default all m) of subset `number[i]` of population
        `population[i]`. Subset t has the items at `t * m` to `t * m + m - 1` of an endless sequence
        of random permutations of all n items, the traversals. With n = 5 and m = 2, subset 2 has
        the last item of traversal 0 and the first item of traversal 1.
        """
        n, m = self._sizes[population], self._m
        traversal, offset = np.divmod(number * m, n)  # where the subset starts
        position = offset[:, None] + np.arange(start, m if stop is None else stop)
        # In a small population, m / gcd(n, m) traversals are the same permutation, so that no
        # subset has an item twice. In a large one, the start of a traversal is reordered instead.
        is_small = n < 2 * m - 1
        num_equal = np.where(is_small, m // np.gcd(n, m), 1)
        items = self._permuted(population, traversal // num_equal, position % n[:, None])
        # From here on, positions are those in the last traversal that a subset reaches.
        reaches_next = (position >= n[:, None]).any(axis=1)
        traversal += reaches_next
        position -= (n * reaches_next)[:, None]
        is_reordered = ~is_small & (traversal > 0) & (position < m).any(axis=1)
        rows = np.flatnonzero(is_reordered)
        if rows.size:
            start_items = self._first_items(population[rows], traversal[rows])
            items[rows] = _replace_start(items[rows], position[rows], start_items)
        return items

    def _permuted(self, population: Int64s, permutation: Int64s, positions: Int64s) -> Int64s:
        """Return the items at `positions` of a permutation for each row, int64[rows, m].

        Row i has permutation number `permutation[i]` of the items of population `population[i]`.
        """
        keys = random_words(random_words(self._key, population), permutation)
        return permute_rows(self._sizes[population], keys, positions)

    def _first_items(self, population: Int64s, traversal: Int64s) -> Int64s:
        """Return the first m items of traversals, reordered so that a subset has no item twice.

        Row i, of int64[rows, m], is of traversal `traversal[i]` (a permutation of all n items) of
        population `population[i]`. A subset of m items may have the end of the previous traversal
        and the start of this one. Items that it already has move back, after the next items that it
        does not have. If a subset of 3 already has 0 and 4, then 4 0 2 becomes 2 4 0.
        """
        n, m = self._sizes[population], self._m
        num_previous = traversal * n % m  # items of the subset that are of the previous traversal
        index = np.broadcast_to(np.arange(m), (len(n), m))
        # Both traversals in one call: with few rows, the calls cost more than the items.
        both = self._permuted(
            np.tile(population, 2),
            np.append(traversal - 1, traversal),
            np.concatenate([n[:, None] - 1 - index, index]),
        )
        previous_items, items = np.split(both, 2)  # the last items of the previous, backwards
        is_free = ~_is_in_row(items, previous_items, index < num_previous[:, None])
        # The first free items fill the subset. All others follow, in their order.
        fills = is_free & (np.cumsum(is_free, axis=1) <= (m - num_previous)[:, None])
        return np.take_along_axis(items, np.argsort(~fills, axis=1, kind="stable"), axis=1)


def _replace_start(items: Int64s, position: Int64s, start_items: Int64s) -> Int64s:
    """Return items, with those at positions 0 to m - 1 replaced by the items of `start_items`.

    `position` has the position of each item, and row i of `start_items`, int64[rows, m], the items
    at positions 0 to m - 1. Items 7 8 9 at positions -1 0 1, and start items 5 6, give 7 5 6.
    """
    index = position.clip(0, start_items.shape[1] - 1)
    return np.where(index == position, np.take_along_axis(start_items, index, axis=1), items)


def _is_in_row(queries: Int64s, table: Int64s, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return whether `queries[i, j]` is one of `table[i][mask[i]]`, bool[rows, m].

    One binary search does it for all rows, whose numbers are shifted to ranges of their own.
    (m * m comparisons a row would take seconds.)
    """
    row_offsets = np.arange(len(queries))[:, None] * (max(queries.max(), table.max()) + 1)
    queries, table = queries + row_offsets, table + row_offsets
    numbers = np.append(table[mask], validate.LIMIT)  # the limit is above every query
    numbers.sort()
    found: NDArray[np.bool_] = numbers[np.searchsorted(numbers, queries)] == queries
    return found
