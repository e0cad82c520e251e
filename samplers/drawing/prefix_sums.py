"""Prefix sums of very many counts, by a table whose size does not grow with them."""

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

    `function` takes an array of indices, and gives an integer for each.
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

    With counts 2, 0, 3 laid end to end, positions 0 and 1 lie in entry 0, positions 2 to 4 in entry
    2. Up to `max_entries` counts each have an entry in the table. If there are more, each *run* of
    consecutive counts has an entry (all runs are equally long), and the counts within a run are
    summed when they are needed.
    """

    def __init__(self, counts: Counts, max_entries: int = _MAX_ENTRIES) -> None:
        self._counts, self._max_entries = counts, max_entries
        self._run = max(1, -(-len(counts) // max_entries))  # counts of a run
        self._table: Int64s | None = None

    def __reduce__(self) -> tuple[type[PrefixSums], tuple[Counts, int]]:
        """Pickle without the table, which is computed again at the first use."""
        return type(self), (self._counts, self._max_entries)

    @property
    def _bounds(self) -> Int64s:
        """The sum of the counts before each run, and of all: int64[runs + 1]."""
        if self._table is None:
            run, count = self._run, len(self._counts)
            table = np.zeros(-(-count // run) + 1, np.int64)
            for chunk in slices(count, max(1, _CHUNK // run) * run):
                sums = self._counts_at(chunk)
                if run > 1:
                    sums = np.add.reduceat(sums, np.arange(0, len(sums), run))
                table[chunk.start // run + 1 :][: len(sums)] = sums
            self._table = np.cumsum(table, out=table)
        return self._table

    @property
    def total(self) -> int:
        """The sum of all counts."""
        return int(self._bounds[-1])

    def before(self, entries: Int64s) -> Int64s:
        """Return the sum of the counts before each entry, int64[entries]."""
        run, offset = np.divmod(entries, self._run)
        sums: Int64s = self._bounds[run]
        for queries, row, starts, _ in self._sums_in_runs(run):
            sums[queries] = starts[row, offset[queries]]
        return sums

    def find(self, positions: Int64s) -> Int64s:
        """Return the entry that contains each position, int64[positions]."""
        return self.locate(positions)[0]

    def locate(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the entry that contains each position, and the sum of the counts before it."""
        run = np.searchsorted(self._bounds, positions, side="right") - 1
        entry: Int64s = run * self._run
        sums: Int64s = self._bounds[run]
        for queries, _, starts, runs in self._sums_in_runs(run):
            index = np.searchsorted(starts.reshape(-1), positions[queries], side="right") - 1
            row, offset = np.divmod(index, self._run)
            entry[queries] = runs[row] * self._run + offset
            sums[queries] = starts[row, offset]
        return entry, sums

    def _sums_in_runs(self, run: Int64s) -> Iterator[tuple[Int64s, Int64s, Int64s, Int64s]]:
        """Yield the sums before each count of the distinct runs, a chunk of runs at a time.

        A chunk is (indices of the queries in these runs, the row of each query, the sums
        int64[rows, run], the run of each row). Nothing is yielded if the table has every count.
        """
        if self._run == 1:
            return
        runs, row = np.unique(run, return_inverse=True)
        for chunk in slices(len(runs), max(1, _CHUNK // self._run)):
            queries = np.flatnonzero((chunk.start <= row) & (row < chunk.stop))
            counts = self._counts_of_runs(runs[chunk])
            starts = self._bounds[runs[chunk], None] + np.cumsum(counts, axis=1) - counts
            yield queries, row[queries] - chunk.start, starts, runs[chunk]

    def _counts_of_runs(self, runs: Int64s) -> Int64s:
        """Return the counts of runs, int64[runs, run]; zeros after the last count."""
        index = runs[:, None] * self._run + np.arange(self._run)
        last = len(self._counts) - 1
        return np.where(index <= last, self._counts_at(np.minimum(index, last)), 0)

    def _counts_at(self, index: Any) -> Int64s:
        return np.asarray(self._counts[index]).astype(np.int64, copy=False)
