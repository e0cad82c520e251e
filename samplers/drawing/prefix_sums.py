"""Prefix sums of very many counts, by a table of bounded size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.int_arrays import computed_entries, distinct_chunks
from twinfeed.samplers.mapped import slices
from twinfeed.samplers.types import Int64s

_MAX_ENTRIES = 1 << 20  # of the table: 8 MB
_CHUNK = 1 << 16  # counts that are summed at once for a search
_TABLE_CHUNK = 1 << 14  # counts that are summed at once while the table is computed


class Counts(Protocol):
    """An array of integers, or an object that computes the integers at an index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...


class ComputedCounts:
    """An array of `length` integers that `function` computes for an array of indices."""

    def __init__(self, length: int, function: Callable[[Int64s], Int64s]) -> None:
        self._length, self._function = length, function

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: slice | Int64s) -> Int64s:
        if isinstance(index, slice):
            index = np.arange(*index.indices(self._length))
        return self._function(index)


class PrefixSums:
    """Prefix sums of `counts`, and the search for the bin that contains a position.

    The table has the sum before each row of `_row_size` counts, at most `max_entries` rows. The
    counts within a row are summed when they are needed. In the comments, counts 2 0 3 1 are in rows
    of 2, with the table 0 2 6: bin 0 has the positions 0 1, bin 2 the positions 2 3 4.
    """

    def __init__(self, counts: Counts, max_entries: int = _MAX_ENTRIES) -> None:
        self._counts = counts
        self._row_size = max(1, -(-len(counts) // max_entries))
        self._max_rows = max(1, _CHUNK // self._row_size)  # rows that are summed at once
        self._cache: FifoCache[Int64s] = FifoCache(1)  # of the table, which is not pickled

    def _complete_table(self) -> Int64s:
        """Return the table, int64[rows + 1], which is computed when it is first used."""
        return self._cache.get("table", self._compute_table)

    def _compute_table(self) -> Int64s:
        """Compute the table. Counts 2 0 3 1 in rows of 2 have the row sums 2 4, so it is 0 2 6."""
        size = self._row_size
        num_rows = -(-len(self._counts) // size)
        table = np.zeros(num_rows + 1, np.int64)
        for rows in slices(num_rows, max(1, _TABLE_CHUNK // size)):
            counts = self._counts_at(slice(rows.start * size, rows.stop * size))
            row_sums = np.add.reduceat(counts, np.arange(0, len(counts), size))
            table[rows.start + 1 : rows.stop + 1] = row_sums
        return np.cumsum(table, out=table)

    @property
    def total(self) -> int:
        """The sum of all counts."""
        return int(self._complete_table()[-1])

    def before(self, index: Int64s) -> Int64s:
        """Return `counts[:i].sum()` for each index i, int64[n]."""
        if self._row_size == 1:  # a row is a count
            return self._complete_table()[index]
        row, column = np.divmod(index, self._row_size)
        return computed_entries(row, column, self._sums_in_rows, self._max_rows)

    def locate(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the bin that contains each position, and the first position in it, int64[n] each.
        The comments have the positions 5 1.
        """
        table = self._complete_table()
        row = np.searchsorted(table, positions, side="right") - 1  # [1, 0]
        if self._row_size == 1:  # a row is a bin
            return row, table[row]
        bin_index, bin_start = np.empty_like(row), np.empty_like(row)
        # A few distinct rows at a time, to bound memory: `positions[i]` are in the rows `rows`.
        for rows, i, _ in distinct_chunks(row, self._max_rows):
            bin_index[i], bin_start[i] = self._locate_in_rows(rows, positions[i])
        return bin_index, bin_start  # [3, 0] and [5, 0]

    def _locate_in_rows(self, rows: Int64s, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return `locate` of positions that are all in these rows, which ascend. The comments have
        the rows 0 and 1.
        """
        bin_starts = self._sums_in_rows(rows).reshape(-1)  # [0, 2, 2, 5]
        found = np.searchsorted(bin_starts, positions, side="right") - 1  # [3, 0]
        return self._indices_in_rows(rows)[found], bin_starts[found]  # [3, 0] and [5, 0]

    def _sums_in_rows(self, rows: Int64s) -> Int64s:
        """Return the sum of all counts before each count of these rows, int64[rows, _row_size]."""
        indices = self._indices_in_rows(rows)
        # The last row may be incomplete: it is filled with zeros.
        last = len(self._counts) - 1
        counts = np.where(indices <= last, self._counts_at(np.minimum(indices, last)), 0)
        counts = counts.reshape(len(rows), self._row_size)
        sums_in_row = np.cumsum(counts, axis=1) - counts
        sums: Int64s = self._complete_table()[rows, None] + sums_in_row
        return sums

    def _indices_in_rows(self, rows: Int64s) -> Int64s:
        """Return the indices of all counts in these rows: of rows of 2, row 3 has 6 and 7."""
        return (rows[:, None] * self._row_size + np.arange(self._row_size)).reshape(-1)

    def _counts_at(self, index: Any) -> Int64s:
        return np.asarray(self._counts[index]).astype(np.int64, copy=False)
