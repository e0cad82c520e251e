"""Prefix sums of very many counts, by a table of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from twinfeed.samplers.mapped import slices
from twinfeed.samplers.types import Int64s

_MAX_ENTRIES = 1 << 20  # of the table: 8 MB
_CHUNK = 1 << 18  # counts that are summed at once


class Counts(Protocol):
    """An array of integers, or an object that computes the integers at an index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...


class ComputedCounts:
    """An array of `length` integers that are computed when they are indexed.

    `function` takes an array of indices, and returns an integer for each.
    """

    def __init__(self, length: int, function: Callable[[Int64s], Int64s]) -> None:
        self._length, self._function = length, function

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: slice | Int64s) -> Int64s:
        if isinstance(index, slice):
            index = np.arange(*index.indices(self._length))
        return self._function(index)


class PrefixSums:
    """Prefix sums of `counts`, and the search for the entry that contains a position.

    With counts 2, 0, 3, positions 0 and 1 are in entry 0, and positions 2 to 4 in entry 2.

    The table has the sum before each *group* of consecutive counts. All groups are equally long:
    one count, or as many that there are at most `max_entries` groups. The counts within a group are
    summed when they are needed.
    """

    def __init__(self, counts: Counts, max_entries: int = _MAX_ENTRIES) -> None:
        self._counts, self._max_entries = counts, max_entries
        self._group_size = max(1, -(-len(counts) // max_entries))  # counts of a group
        self._table: Int64s | None = None

    def __reduce__(self) -> tuple[type[PrefixSums], tuple[Counts, int]]:
        """Pickle without the table, which is computed again at the first use."""
        return type(self), (self._counts, self._max_entries)

    @property
    def _group_bounds(self) -> Int64s:
        """The sum of the counts before each group, and of all counts: int64[groups + 1].

        A group is `_group_size` consecutive counts; the last may have fewer.
        """
        if self._table is None:
            size, count = self._group_size, len(self._counts)
            table = np.zeros(-(-count // size) + 1, np.int64)
            for chunk in slices(count, max(1, _CHUNK // size) * size):
                sums = self._counts_at(chunk)
                if size > 1:
                    sums = np.add.reduceat(sums, np.arange(0, len(sums), size))
                table[chunk.start // size + 1 :][: len(sums)] = sums
            self._table = np.cumsum(table, out=table)
        return self._table

    @property
    def total(self) -> int:
        """The sum of all counts."""
        return int(self._group_bounds[-1])

    def before(self, entries: Int64s) -> Int64s:
        """Return the sum of the counts before each entry (an index into the counts), int64[n].

        The table has the sum before each group of consecutive counts, and the rest is summed here.
        """
        group, offset = np.divmod(entries, self._group_size)
        sums: Int64s = self._group_bounds[group]
        for queries, row, sums_in_groups, _ in self._sums_in_groups(group):
            sums[queries] = sums_in_groups[row, offset[queries]]
        return sums

    def find(self, positions: Int64s) -> Int64s:
        """Return the entry that contains each position, int64[positions]."""
        return self.locate(positions)[0]

    def locate(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the entry that contains each position, and the sum of the counts before it.

        Entry i contains `counts[i]` positions, after those of the entries before it. The table has
        the sum before each group of consecutive counts. Within a group, the search is done here.
        """
        group = np.searchsorted(self._group_bounds, positions, side="right") - 1
        entry: Int64s = group * self._group_size
        sums: Int64s = self._group_bounds[group]
        for queries, _, sums_in_groups, groups in self._sums_in_groups(group):
            # The sums rise along a row and from row to row: one search over all rows.
            flat = sums_in_groups.reshape(-1)
            index = np.searchsorted(flat, positions[queries], side="right") - 1
            row, offset = np.divmod(index, self._group_size)
            entry[queries], sums[queries] = groups[row] * self._group_size + offset, flat[index]
        return entry, sums

    def _sums_in_groups(self, group: Int64s) -> Iterator[tuple[Int64s, Int64s, Int64s, Int64s]]:
        """Yield the sum of the counts before each count of these groups, for some at a time.

        `group` is the group of counts of each query. Yields (indices of the queries of some groups,
        the row of each query, the sums int64[rows, group size], the group of each row). Yields
        nothing if each group is one count.
        """
        if self._group_size == 1:
            return
        groups, row = np.unique(group, return_inverse=True)
        for chunk in slices(len(groups), max(1, _CHUNK // self._group_size)):
            queries = np.flatnonzero((chunk.start <= row) & (row < chunk.stop))
            counts = self._counts_of_groups(groups[chunk])
            sums = self._group_bounds[groups[chunk], None] + np.cumsum(counts, axis=1) - counts
            yield queries, row[queries] - chunk.start, sums, groups[chunk]

    def _counts_of_groups(self, groups: Int64s) -> Int64s:
        """Return the counts of groups, int64[groups, group size]; zeros after the last count."""
        index = groups[:, None] * self._group_size + np.arange(self._group_size)
        last = len(self._counts) - 1
        return np.where(index <= last, self._counts_at(np.minimum(index, last)), 0)

    def _counts_at(self, index: Any) -> Int64s:
        return np.asarray(self._counts[index]).astype(np.int64, copy=False)
