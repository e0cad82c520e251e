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
    """Return the row of each distinct pair, sorted by pair, and the pair's number of each row.

    As `np.unique((first, second), axis=1, return_index=True, return_inverse=True)`, but faster.
    """
    order = np.lexsort((second, first))
    change = (np.diff(first[order]) != 0) | (np.diff(second[order]) != 0)
    number = np.empty(len(order), np.int64)
    number[order] = np.append(0, np.cumsum(change))
    return order[np.append(True, change)], number
