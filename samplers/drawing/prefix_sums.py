"""Running sums of very many counts, by a table that does not grow with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from twinfeed.samplers.drawing.int_arrays import Int64
from twinfeed.samplers.mapped import pieces

_MOST = 1 << 20  # entries of the table: 8 MB
_AT_ONCE = 1 << 18  # counts that are added up at once


class Counts(Protocol):
    """Integers by place: an array, or what calculates them."""

    def __len__(self) -> int: ...
    def __getitem__(self, places: Any, /) -> Any: ...


class RunningSums:
    """Add up counts, and find the count that a place of all counts end to end lies in.

    Up to `most` counts each have an entry in the table. If there are more counts, each run of equal
    length has an entry, and the counts within a run are added up when they are needed.
    """

    def __init__(self, counts: Counts, most: int = _MOST) -> None:
        self._counts, self._most = counts, most
        self._run = max(1, -(-len(counts) // most))
        self._table: Int64 | None = None

    def __reduce__(self) -> tuple[type[RunningSums], tuple[Counts, int]]:
        """Pickle without the table, which is made again at the first use."""
        return type(self), (self._counts, self._most)

    @property
    def _bounds(self) -> Int64:
        """The sum of the counts before each run, and of all: int64[runs + 1]."""
        if self._table is None:
            run, count = self._run, len(self._counts)
            table = np.zeros(-(-count // run) + 1, np.int64)
            for some in pieces(count, max(1, _AT_ONCE // run) * run):
                sums = self._at(some)
                if run > 1:
                    sums = np.add.reduceat(sums, np.arange(0, len(sums), run))
                table[some.start // run + 1 :][: len(sums)] = sums
            self._table = np.cumsum(table, out=table)
        return self._table

    @property
    def total(self) -> int:
        """The sum of all counts."""
        return int(self._bounds[-1])

    def before(self, entries: Int64) -> Int64:
        """Return the sum of the counts before each entry, int64[entries]."""
        run, rest = np.divmod(entries, self._run)
        sums: Int64 = self._bounds[run]
        for mine, row, starts, _ in self._starts(run):
            sums[mine] = starts[row, rest[mine]]
        return sums

    def find(self, places: Int64) -> Int64:
        """Return the entry that each place lies in, int64[places]."""
        return self.locate(places)[0]

    def locate(self, places: Int64) -> tuple[Int64, Int64]:
        """Return the entry that each place lies in, and the sum of the counts before the entry."""
        run = np.searchsorted(self._bounds, places, side="right") - 1
        entry: Int64 = run * self._run
        sums: Int64 = self._bounds[run]
        for mine, _, starts, runs in self._starts(run):
            at = np.searchsorted(starts.reshape(-1), places[mine], side="right") - 1
            row, number = np.divmod(at, self._run)
            entry[mine] = runs[row] * self._run + number
            sums[mine] = starts[row, number]
        return entry, sums

    def _starts(self, run: Int64) -> Iterator[tuple[Int64, Int64, Int64, Int64]]:
        """Yield the sums before each count of the distinct runs, some runs at a time.

        With them come the requests in these runs, the row of each request, and the runs. Nothing
        comes if the table has all that is needed.
        """
        if self._run == 1:
            return
        runs, row = np.unique(run, return_inverse=True)
        for some in pieces(len(runs), max(1, _AT_ONCE // self._run)):
            mine = np.flatnonzero((some.start <= row) & (row < some.stop))
            counts = self._of(runs[some])
            starts = self._bounds[runs[some], None] + np.cumsum(counts, axis=1) - counts
            yield mine, row[mine] - some.start, starts, runs[some]

    def _of(self, run: Int64) -> Int64:
        """Return the counts of runs, int64[runs, run length]; zeros after the last count."""
        place = run[:, None] * self._run + np.arange(self._run)
        last = len(self._counts) - 1
        return np.where(place <= last, self._at(np.minimum(place, last)), 0)

    def _at(self, places: Any) -> Int64:
        return np.asarray(self._counts[places]).astype(np.int64, copy=False)
