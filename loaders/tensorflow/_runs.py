"""A stream of records as runs: stretches of one file that are read from front to back.

A run is what one sequential reader gives. Runs that overlap in time each need a reader and
an open file. This module needs numpy only.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.support.array_types import Int64s


class Runs(NamedTuple):
    """The runs of a stream: run r is the `turns[bounds[r]:bounds[r + 1]]` of the stream.

    `first` (int64[runs]) is the record that each run begins with. The other records follow in
    order.
    """

    first: Int64s
    bounds: Int64s
    turns: Int64s

    def most_at_once(self) -> int:
        """Return how many runs overlap at most.

        >>> find_runs(np.array([0, 5, 1, 6, 7]), np.array([5, 10])).most_at_once()
        2
        """
        begin, end = np.sort(self.turns[self.bounds[:-1]]), np.sort(self.turns[self.bounds[1:] - 1])
        live = np.arange(1, len(begin) + 1) - np.searchsorted(end, begin)
        return int(live.max(initial=0))


class Pieces(NamedTuple):
    """Runs, or pieces of them, laid out over readers.

    - `reader` says for each turn of the stream which reader gives the record.
    - `first` and `counts` have the first record and the length of each piece, sorted by reader and
      then by the order of reading.
    - `bounds[r]:bounds[r + 1]` are the pieces of reader r.
    """

    reader: Int64s
    first: Int64s
    counts: Int64s
    bounds: Int64s


def find_runs(records: Int64s, stops: Int64s, /) -> Runs:
    """Find the runs in a stream of record ids; `stops` are the ids after the last of each file.

    Record r continues the run of r - 1 if both lie in one file, r comes later in the stream, and
    the pause between is at most four times the median pause. In a longer pause it is cheaper to
    close the file. In a file that is read in a circle, no pause is too long. A record that comes
    again belongs to another run.

    >>> runs = find_runs(np.array([0, 5, 1, 6, 2]), np.array([5, 10]))
    >>> [runs.turns[a:b].tolist() for a, b in zip(runs.bounds, runs.bounds[1:])]
    [[0, 2, 4], [1, 3]]
    """
    order = np.lexsort((records, _times_drawn(records)))
    sorted_records = records[order]
    file = np.searchsorted(stops, sorted_records, side="right")
    pause = np.diff(order, prepend=order[:1])
    follows = (np.diff(sorted_records, prepend=-2) == 1) & (pause > 0)
    follows[1:] &= file[1:] == file[:-1]
    if follows.any():
        circle = _read_in_a_circle(records, stops)
        most = 4 * np.median(pause[follows])
        follows &= circle[file] | (pause <= most)
    starts = np.flatnonzero(~follows)
    return Runs(sorted_records[starts], np.append(starts, len(order)), order)


def lay_out(runs: Runs, readers: int, /) -> Pieces:
    """Give every run a free reader. If no reader is free, cut the run that ends last in two.

    >>> pieces = lay_out(find_runs(np.array([0, 5, 1, 6, 2]), np.array([5, 10])), 2)
    >>> pieces.reader, pieces.first, pieces.counts
    (array([0, 1, 0, 1, 0]), array([0, 5]), array([3, 2]))
    """
    turns = runs.turns.tolist()
    bounds = runs.bounds.tolist()
    waiting = [
        (turns[start], first, start, stop)
        for first, start, stop in zip(runs.first.tolist(), bounds[:-1], bounds[1:], strict=True)
    ]
    heapq.heapify(waiting)
    busy: list[tuple[int, int]] = []  # (the last turn of its piece, reader)
    pieces: list[list[tuple[int, int, int]]] = []  # by reader: first record, start, stop
    while waiting:
        turn, first, start, stop = heapq.heappop(waiting)
        if busy and busy[0][0] < turn:
            reader = heapq.heappop(busy)[1]
        elif len(pieces) < readers:
            reader = len(pieces)
            pieces.append([])
        else:
            reader = _cut_last(busy, pieces, waiting, turns, turn)
        pieces[reader].append((first, start, stop))
        heapq.heappush(busy, (turns[stop - 1], reader))
    return _pieces(pieces, runs.turns, readers)


def _cut_last(
    busy: list[tuple[int, int]],
    pieces: list[list[tuple[int, int, int]]],
    waiting: list[tuple[int, int, int, int]],
    turns: list[int],
    turn: int,
) -> int:
    """Free the reader of the piece that ends last. The rest of the piece waits again."""
    ending = max(busy)
    busy.remove(ending)
    heapq.heapify(busy)
    reader = ending[1]
    first, start, stop = pieces[reader].pop()
    cut = start + int(np.searchsorted(turns[start:stop], turn))
    pieces[reader].append((first, start, cut))
    heapq.heappush(waiting, (turns[cut], first + cut - start, cut, stop))
    return reader


def _pieces(pieces: list[list[tuple[int, int, int]]], turns: Int64s, readers: int) -> Pieces:
    """Turn the lists into arrays."""
    reader = np.empty(len(turns), np.int64)
    for number, own in enumerate(pieces):
        for _, start, stop in own:
            reader[turns[start:stop]] = number
    counts = [len(own) for own in pieces] + [0] * (readers - len(pieces))
    table = np.array([piece for own in pieces for piece in own], np.int64).reshape(-1, 3)
    bounds = np.cumsum([0, *counts])
    return Pieces(reader, table[:, 0], table[:, 2] - table[:, 1], bounds)


def _times_drawn(records: Int64s) -> Int64s:
    """Return how often each record of the stream came before."""
    order = np.argsort(records, kind="stable")
    starts = np.flatnonzero(np.diff(records[order], prepend=-1))
    before = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    drawn = np.empty(len(order), np.int64)
    drawn[order] = before
    return drawn


def _read_in_a_circle(records: Int64s, stops: Int64s) -> npt.NDArray[np.bool_]:
    """Say for each file whether the stream reads its records in a circle, without a gap."""
    file = np.searchsorted(stops, records, side="right")
    order = np.argsort(file, kind="stable")
    sorted_file, own = file[order], records[order]
    follows = own[1:] == own[:-1] + 1
    wraps = own[:-1] == stops[sorted_file[:-1]] - 1
    begins = np.concatenate([[0], stops[:-1]])
    follows |= wraps & (own[1:] == begins[sorted_file[1:]])
    broken = np.zeros(len(stops), bool)
    broken[sorted_file[1:][~follows & (sorted_file[1:] == sorted_file[:-1])]] = True
    return ~broken
