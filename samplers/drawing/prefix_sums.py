"""Prefix sums of very many counts, by a table of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from twinfeed.samplers.mapped import slices
from twinfeed.samplers.types import Int64s

_MAX_ENTRIES = 1 << 20  # of the table: 8 MB
_CHUNK = 1 << 18  # counts that are summed at once for a query
_TABLE_CHUNK = 1 << 14  # counts that are summed at once while the table is computed
_HEAD_START = 1.25  # the table is computed faster than it is needed, by this factor


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

    Entry i has `counts[i]` positions, after those of the entries before it. With counts 2, 0, 3,
    entry 0 has positions 0 and 1, and entry 2 has positions 2 to 4.

    The counts are laid out in rows of `_row_size` consecutive counts, at most `max_entries` rows,
    and the table has the sum of all counts before each row. The counts within a row are summed when
    they are needed. Counts 2 0 3 1 in rows of 2 are the rows 2 0 and 3 1, and the table is 0 2 6:
    the sums before both rows, and the sum of all.
    """

    def __init__(self, counts: Counts, max_entries: int = _MAX_ENTRIES) -> None:
        self._counts, self._max_entries = counts, max_entries
        self._row_size = max(1, -(-len(counts) // max_entries))
        num_rows = -(-len(counts) // self._row_size)
        # The sum of all counts before each row, and of all counts. Threads may sum the same rows:
        # they write the same values.
        self._table = np.zeros(num_rows + 1, np.int64)
        self._rows_done = 0

    def __reduce__(self) -> tuple[type[PrefixSums], tuple[Counts, int]]:
        """Pickle without the table, which is computed again at the first use."""
        return type(self), (self._counts, self._max_entries)

    def prepare(self, fraction: float) -> None:
        """Compute the first `fraction` of the table, and a quarter more, if that is not done yet.

        The table has the sum of all counts before each row (`_row_size` consecutive counts). With a
        fraction that grows from 0 to 1, it is computed by many calls, none of which takes long. It
        is complete at a fraction of 0.8 already, before it is needed.
        """
        size, num_rows = self._row_size, len(self._table) - 1
        rows_at_once = max(1, _TABLE_CHUNK // size)
        goal = min(num_rows, int(num_rows * fraction * _HEAD_START))
        for first in range(self._rows_done, goal, rows_at_once):
            stop = min(first + rows_at_once, num_rows)
            counts = self._counts_at(slice(first * size, min(stop * size, len(self._counts))))
            row_sums = np.add.reduceat(counts, np.arange(0, len(counts), size))
            sums = np.cumsum(row_sums)  # of the rows from `first` on, up to the end of each
            self._table[first + 1 : stop + 1] = self._table[first] + sums
            self._rows_done = stop

    @property
    def _sums_before_rows(self) -> Int64s:
        """The sum of all counts before each row, and of all counts: int64[rows + 1].

        A row is `_row_size` consecutive counts; the last may have fewer.
        """
        if self._rows_done < len(self._table) - 1:
            self.prepare(1)
        return self._table

    @property
    def total(self) -> int:
        """The sum of all counts."""
        return int(self._sums_before_rows[-1])

    def before(self, entries: Int64s) -> Int64s:
        """Return the sum of the counts before each entry (an index into the counts), int64[n].

        With counts 2, 0, 3, the sums before entries 0, 1, 2 are 0, 2, 2. The counts are laid out in
        rows of `_row_size` consecutive counts. A table has the sum before each row, and the counts
        of a row are summed here.
        """
        row, column = np.divmod(entries, self._row_size)
        sums: Int64s = self._sums_before_rows[row]  # final if a row is a single count
        for queries, rows, sums_before in self._sums_in_rows(row):
            # `sums_before[r, c]` is the sum before column c of row `rows[r]`. `queries` are the
            # indices into `entries` for which it is needed: find r for each.
            index_of_row = np.searchsorted(rows, row[queries])
            sums[queries] = sums_before[index_of_row, column[queries]]
        return sums

    def locate(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the entry that contains each position, and the sum of the counts before it.

        Entry i contains `counts[i]` positions, after those of the entries before it: with counts 2,
        0, 3, position 4 is in entry 2, and the sum before it is 2. The counts are laid out in rows
        of `_row_size` consecutive counts. First find the row of each position, then the entry
        within the row.
        """
        row = np.searchsorted(self._sums_before_rows, positions, side="right") - 1
        entry: Int64s = row * self._row_size  # the first of the row, and the only one if size is 1
        sums: Int64s = self._sums_before_rows[row]
        for queries, rows, sums_before in self._sums_in_rows(row):
            # `sums_before[r, c]` is the sum before column c of row `rows[r]`. `queries` are the
            # indices into `positions` for which it is needed. The sums increase along a row and
            # from row to row: one binary search over all rows.
            flat_sums = sums_before.reshape(-1)
            flat_index = np.searchsorted(flat_sums, positions[queries], side="right") - 1
            index_of_row, column = np.divmod(flat_index, self._row_size)
            entry[queries] = rows[index_of_row] * self._row_size + column
            sums[queries] = flat_sums[flat_index]
        return entry, sums

    def _sums_in_rows(self, row: Int64s) -> Iterator[tuple[Int64s, Int64s, Int64s]]:
        """Yield the sum of all counts before each count, for a few rows of counts at a time.

        Callers have many queries, and query i needs the sums in row number `row[i]`. The counts are
        laid out in rows of `_row_size` consecutive counts: counts 2 0 3 1 in rows of 2 are the rows
        2 0 and 3 1, whose sums are 0 2 and 2 5. Few rows are summed at once, to bound memory.

        Yields:
            The indices i of the queries that need these rows, int64[queries]; the numbers of the
            rows, ascending; and the sum before each of their counts, int64[rows, row size].
        """
        if self._row_size == 1:  # the table has all sums
            return
        needed_rows, index = np.unique(row, return_inverse=True)
        for chunk in slices(len(needed_rows), max(1, _CHUNK // self._row_size)):
            queries = np.flatnonzero((chunk.start <= index) & (index < chunk.stop))
            rows = needed_rows[chunk]
            counts = self._counts_of_rows(rows)
            sums_in_row = np.cumsum(counts, axis=1) - counts  # before each count of the row
            yield queries, rows, self._sums_before_rows[rows, None] + sums_in_row

    def _counts_of_rows(self, rows: Int64s) -> Int64s:
        """Return the counts of rows, int64[rows, row size]; zeros after the last count."""
        index = rows[:, None] * self._row_size + np.arange(self._row_size)
        last = len(self._counts) - 1
        return np.where(index <= last, self._counts_at(np.minimum(index, last)), 0)

    def _counts_at(self, index: Any) -> Int64s:
        return np.asarray(self._counts[index]).astype(np.int64, copy=False)
