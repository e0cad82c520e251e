"""Small functions over integer arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from twinfeed.samplers.mapped import slices
from twinfeed.samplers.types import Array, Bools, Int64s


def groups_and_indices(sizes: Int64s) -> tuple[Int64s, Int64s]:
    """Return the group of each member of groups of these sizes, and its index within the group.

    Both are int64[sum(sizes)], group after group.

    >>> [array.tolist() for array in groups_and_indices(np.array([2, 0, 3]))]
    [[0, 0, 2, 2, 2], [0, 1, 0, 1, 2]]
    """
    group = np.repeat(np.arange(len(sizes)), sizes)
    group_starts = np.cumsum(sizes) - sizes
    return group, np.arange(len(group)) - group_starts[group]


def ranges(starts: Int64s, stops: Int64s) -> Int64s:
    """Return the numbers of several ranges, one range after the other.

    >>> ranges(np.array([2, 8]), np.array([5, 10])).tolist()
    [2, 3, 4, 8, 9]
    """
    if len(starts) and (starts[1:] == stops[:-1]).all():  # adjacent ranges are one range
        return np.arange(starts[0], stops[-1])
    range_number, index = groups_and_indices(stops - starts)
    values: Int64s = starts[range_number] + index
    return values


def distinct_pairs(first: Array, second: Array) -> tuple[Int64s, Int64s]:
    """Number the distinct pairs `(first[i], second[i])` from 0 on, in ascending order.

    Returns:
        For each distinct pair an index i at which it is, and for each i the number of its pair:
        `return_index` and `return_inverse` of `np.unique`, but faster.

    The pairs (3, 2) and (5, 1) have the numbers 0 and 1. They are at the indices 1 and 0:

    >>> [array.tolist() for array in distinct_pairs(np.array([5, 3, 5]), np.array([1, 2, 1]))]
    [[1, 0], [1, 0, 1]]
    """
    order = np.lexsort((second, first))  # the indices i, sorted by their pairs: [1, 0, 2]
    # Whether a sorted pair differs from the one before: [True, True, False].
    is_new = np.ones(len(order), bool)
    is_new[1:] = (np.diff(first[order]) != 0) | (np.diff(second[order]) != 0)
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(is_new) - 1  # [0, 1, 1] in sorted order
    return order[is_new], number


def distinct_chunks(values: Int64s, size: int) -> Iterator[tuple[Int64s, Int64s, Int64s]]:
    """Yield the distinct numbers (0 or more) of an array, ascending, up to `size` at a time.

    Yields:
        chunk: these distinct numbers.
        indices: the indices in `values` of all entries that are in the chunk.
        row: for each of these entries, its index in the chunk.

    >>> for arrays in distinct_chunks(np.array([5, 6, 5]), size=1):
    ...     print(*(array.tolist() for array in arrays))
    [5] [0, 2] [0, 0]
    [6] [1] [0]
    """
    order = np.argsort(values, kind="stable")  # [0, 2, 1]
    ascending = values[order]  # [5, 5, 6]
    is_new = np.diff(ascending, prepend=-1) > 0  # [True, False, True]
    distinct, row = ascending[is_new], np.cumsum(is_new) - 1  # [5, 6], [0, 0, 1]
    for chunk in slices(len(distinct), size):
        start, stop = np.searchsorted(row, [chunk.start, chunk.stop])
        yield distinct[chunk], order[start:stop], row[start:stop] - chunk.start


def computed_entries(
    rows: Int64s, columns: Int64s, compute_rows: Callable[[Int64s], Array], max_rows: int
) -> Int64s:
    """Return the entries `table[rows[i], columns[i]]` of a table that is too large for memory.

    `compute_rows` returns any rows of the table. It is called with at most `max_rows` distinct row
    numbers at a time.

    >>> def multiplication_table(rows):
    ...     return rows[:, None] * np.arange(10)
    >>> computed_entries(np.array([5, 6, 5]), np.array([0, 1, 2]), multiplication_table, 1).tolist()
    [0, 6, 10]
    """
    entries = np.empty(rows.shape, np.int64)
    for chunk, i, row_in_chunk in distinct_chunks(rows, max_rows):
        entries[i] = compute_rows(chunk)[row_in_chunk, columns[i]]
    return entries


def new_entries_first(is_new: Bools, num_new: int | Int64s) -> Int64s:
    """Return an order of entries in which the first `num_new` new entries come first.

    All other entries follow, new or not, in their order. The order is an array of indices. Of a
    matrix, each row has an order of its own, along the last axis.

    >>> new_entries_first(np.array([False, True, True, True]), 2).tolist()
    [1, 2, 0, 3]
    """
    # Whether each entry is one of those that come first: [False, True, True, False].
    comes_first = is_new & (np.cumsum(is_new, axis=-1) <= num_new)
    # A stable argsort lists the indices with False before the indices with True.
    return np.argsort(~comes_first, axis=-1, kind="stable")
