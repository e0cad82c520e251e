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
    """Prefix sums of `counts`, and the search for the count that contains a position.

    Count i contains `counts[i]` positions, after those of the counts before it. With counts 2, 0,
    3, count 0 contains positions 0 and 1, and count 2 contains positions 2 to 4.

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
        self._num_rows_done = 0  # the rows whose sums are in the table

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
        for first in range(self._num_rows_done, goal, rows_at_once):
            stop = min(first + rows_at_once, num_rows)
            counts = self._counts_at(slice(first * size, min(stop * size, len(self._counts))))
            row_sums = np.add.reduceat(counts, np.arange(0, len(counts), size))
            sums = np.cumsum(row_sums)  # of the rows from `first` on, up to the end of each
            self._table[first + 1 : stop + 1] = self._table[first] + sums
            self._num_rows_done = stop

    def _complete_table(self) -> Int64s:
        """Return the sum of all counts before each row, and of all counts: int64[rows + 1].

        A row is `_row_size` consecutive counts; the last may have fewer. `prepare` computes the
        table bit by bit. What is still missing is computed here.
        """
        if self._num_rows_done < len(self._table) - 1:
            self.prepare(fraction=1)
        return self._table

    @property
    def total(self) -> int:
        """The sum of all counts."""
        return int(self._complete_table()[-1])

    def before(self, index: Int64s) -> Int64s:
        """Return the sum of all counts before each of these indices into the counts, int64[n].

        With counts 2, 0, 3, the sums before indices 0, 1, 2 are 0, 2, 2. The counts are laid out in
        rows of `_row_size` consecutive counts. A table has the sum before each row, and the counts
        within a row are summed here.
        """
        row = index // self._row_size
        sums: Int64s = self._complete_table()[row]  # already the result if a row has one count
        for query, index_in_rows, sums_in_rows in self._sums_in_rows(row):
            # `sums_in_rows[j]` is the sum before index `index_in_rows[j]`. These are the counts of
            # a few rows, in which `index[query]` lie.
            sums[query] = sums_in_rows[np.searchsorted(index_in_rows, index[query])]
        return sums

    def locate(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the index of the count that contains each position, and the sum before it.

        Count i contains `counts[i]` positions, after those of the counts before it: with counts 2,
        0, 3, position 4 is in count 2, and the sum before it is 2. The counts are laid out in rows
        of `_row_size` consecutive counts, and a table has the sum before each row. First find the
        row of each position, then the count within the row.
        """
        table = self._complete_table()
        row = np.searchsorted(table, positions, side="right") - 1
        # The first count of the row: already the result if a row has one count.
        index: Int64s = row * self._row_size
        sums: Int64s = table[row]
        for query, index_in_rows, sums_in_rows in self._sums_in_rows(row):
            # `sums_in_rows[j]` is the sum before index `index_in_rows[j]`. These are the counts of
            # a few rows, in which `positions[query]` lie: find the last sum up to each position.
            found = np.searchsorted(sums_in_rows, positions[query], side="right") - 1
            index[query] = index_in_rows[found]
            sums[query] = sums_in_rows[found]
        return index, sums

    def _sums_in_rows(self, row: Int64s) -> Iterator[tuple[Int64s, Int64s, Int64s]]:
        """Yield the sum before each count of the rows that are needed, a few rows at a time.

        The caller has many queries, and query i needs the sums in row number `row[i]`. The counts
        are laid out in rows of `_row_size` consecutive counts: counts 2 0 3 1 in rows of 2 are the
        rows 2 0 and 3 1. If row 1 is needed, its counts have the indices 2 3 and the sums 2 5. Few
        rows are summed at once, to bound memory.

        Yields:
            For a few rows: the numbers i of the queries that need them; the indices of all counts
            of the rows, ascending; and the sum of all counts before each of these indices.
        """
        if self._row_size == 1:  # the table has all sums
            return
        last = len(self._counts) - 1
        needed_rows, number_of_row = np.unique(row, return_inverse=True)
        for chunk in slices(len(needed_rows), max(1, _CHUNK // self._row_size)):
            query = np.flatnonzero((chunk.start <= number_of_row) & (number_of_row < chunk.stop))
            rows = needed_rows[chunk]
            index = (rows[:, None] * self._row_size + np.arange(self._row_size)).reshape(-1)
            # The last row may be incomplete: it is filled with zeros.
            counts = np.where(index <= last, self._counts_at(np.minimum(index, last)), 0)
            counts = counts.reshape(len(rows), self._row_size)
            sums_in_row = np.cumsum(counts, axis=1) - counts  # before each count of the row
            sums = self._complete_table()[rows, None] + sums_in_row
            yield query, index, sums.reshape(-1)

    def _counts_at(self, index: Any) -> Int64s:
        return np.asarray(self._counts[index]).astype(np.int64, copy=False)
