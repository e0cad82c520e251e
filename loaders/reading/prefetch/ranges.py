"""Which bytes of a file are read in one piece: functions of the rows of an index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.index import Index
from twinfeed.loaders.support.array_types import Int64s

Rows = npt.NDArray[Any]


Extents = npt.NDArray[Any]


EXTENT = np.dtype([("file", "i4"), ("start", "i8"), ("stop", "i8"), ("span", "i8"), ("step", "i8")])
"""A range of a file that the batch of a `step` reads. Steps are counted over all epochs. A `span`
of the stream uses the range until the span is closed. With `NO_SPAN`, no later batch uses it.
"""

NO_SPAN = -1


SMALL = 1 << 14
"""Local neighbours are read in one piece if each has at most so many bytes. For longer neighbours
the second copy costs more than the saved call.
"""


LOCAL_GAP, AHEAD_GAP = 1 << 12, 1 << 16
"""A gap of at most so many bytes between two ranges is read, not skipped: when they are needed, and
ahead."""

_LEAST_GAP, _MOST_GAP = 1 << 12, 1 << 20
"""The same of shards at a URL, where it is about a record."""


MOST_AT_ONCE = 1 << 23
"""Most bytes of one piece."""


def extents_of(rows: Rows, spans: Int64s, steps: Int64s, gap: int = AHEAD_GAP, /) -> Extents:
    """Return the `EXTENT`s of rows, by file and offset. Near neighbours of a span share an extent,
    which has the last of their steps.
    """
    order = np.lexsort((rows["offset"], rows["file"]))
    file, start = rows["file"][order], rows["offset"][order].astype(np.int64)
    stop, spans = start + rows["length"][order], spans[order]
    apart = np.ones(len(order), bool)
    apart[1:] = (file[1:] != file[:-1]) | (start[1:] - stop[:-1] > gap) | (spans[1:] != spans[:-1])
    begin = start[np.maximum.accumulate(np.where(apart, np.arange(len(order)), 0))]
    piece = (start - begin) // MOST_AT_ONCE
    apart[1:] |= piece[1:] != piece[:-1]
    first = np.flatnonzero(apart)
    extents = np.zeros(len(first), EXTENT)
    extents["file"], extents["start"], extents["span"] = file[first], start[first], spans[first]
    if len(first):
        extents["stop"] = np.maximum.reduceat(stop, first)
        extents["step"] = np.maximum.reduceat(steps[order], first)
    return extents


def outside(index: Index, rows: Rows, /) -> Int64s:
    """Return the places of rows that do not lie within their shard as it was indexed."""
    if index.container == "files":
        return np.zeros(0, np.int64)  # a row is a whole file, and its size is checked
    last = len(index.shards) - 1
    sizes = index.shards["bytes"][np.minimum(rows["file"], last)]
    inside = (rows["offset"] >= 0) & (rows["length"] >= 0)
    return np.flatnonzero(~inside | (rows["offset"] > sizes - rows["length"]))


def gap_of(index: Index, /) -> int:
    """Return the longest gap between two ranges that is read ahead, not skipped."""
    if not index.remote:
        return AHEAD_GAP
    mean = int(index.shards["bytes"].sum()) // max(1, len(index))
    return min(max(mean, _LEAST_GAP), _MOST_GAP)


def near_rows(rows: Rows, gap: int, longest: int) -> npt.NDArray[np.bool_] | None:
    """Say for each row but the first if it closely follows the row before; None for one row."""
    if len(rows) < 2:
        return None
    offset, length, file = rows["offset"], rows["length"], rows["file"]
    between = offset[1:] - (offset[:-1] + length[:-1])
    near: npt.NDArray[np.bool_] = (between >= 0) & (between <= gap)
    near &= file[1:] == file[:-1]
    near &= (length[1:] <= longest) & (length[:-1] <= longest)
    return near


def many_near(near: npt.NDArray[np.bool_]) -> bool:
    """Return whether enough rows lie close together to be read in pieces."""
    return 4 * int(np.count_nonzero(near)) > len(near)


def pieces_of(rows: Rows, near: npt.NDArray[np.bool_] | None) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of the rows to be read in one piece."""
    offsets, ends = rows["offset"].tolist(), (rows["offset"] + rows["length"]).tolist()
    first = 0
    for place in range(1, len(offsets)):
        if near is None or not near[place - 1] or ends[place] - offsets[first] > MOST_AT_ONCE:
            yield first, place
            first = place
    if offsets:
        yield first, len(offsets)


def extent_of(rows: Rows) -> tuple[int, int]:
    """Return where a run starts and ends in its file."""
    return int(rows["offset"][0]), int(rows["offset"][-1] + rows["length"][-1])
