"""Small functions over integer arrays."""

from __future__ import annotations

import numpy as np

from twinfeed.samplers.types import Array, Int64s


def owners_of(counts: Int64s) -> tuple[Int64s, Int64s]:
    """Number the `sum(counts)` members of groups: return each member's group and its rank in it.

    >>> [array.tolist() for array in owners_of(np.array([2, 0, 3]))]
    [[0, 0, 2, 2, 2], [0, 1, 0, 1, 2]]
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def ranges(starts: Int64s, stops: Int64s) -> Int64s:
    """Return `[*range(starts[0], stops[0]), *range(starts[1], stops[1]), …]`."""
    if len(starts) and (starts[1:] == stops[:-1]).all():
        return np.arange(starts[0], stops[-1])
    owner, rank = owners_of(stops - starts)
    numbers: Int64s = starts[owner] + rank
    return numbers


def distinct_pairs(first: Array, second: Array) -> tuple[Int64s, Int64s]:
    """Return the index and the inverse of the distinct pairs `(first[i], second[i])`.

    As `np.unique` with `return_index` and `return_inverse` over the pairs, but faster: the index of
    one occurrence of each distinct pair, sorted by pair, and for each i the number of its pair.

    >>> [array.tolist() for array in distinct_pairs(np.array([5, 3, 5]), np.array([1, 2, 1]))]
    [[1, 0], [1, 0, 1]]
    """
    order = np.lexsort((second, first))
    changes = (np.diff(first[order]) != 0) | (np.diff(second[order]) != 0)
    inverse = np.empty(len(order), np.int64)
    inverse[order] = np.append(0, np.cumsum(changes))
    return order[np.append(True, changes)], inverse
