"""Small functions over integer arrays, and the arrays' types."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]
Int64 = NDArray[np.int64]


def spread(counts: Int64) -> tuple[Int64, Int64]:
    """Return, for each of `sum(counts)` entries, its owner and its place within the owner."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def ranges(lows: Int64, highs: Int64) -> Int64:
    """Return `[*range(lows[0], highs[0]), *range(lows[1], highs[1]), …]`."""
    if len(lows) and (lows[1:] == highs[:-1]).all():
        return np.arange(lows[0], highs[-1])
    owner, place = spread(highs - lows)
    made: Int64 = lows[owner] + place
    return made


def distinct_pairs(first: NDArray[Any], second: NDArray[Any]) -> tuple[Int64, Int64]:
    """Return a row of each distinct pair, sorted, and the number of the pair of each row."""
    order = np.lexsort((second, first))
    change = (np.diff(first[order]) != 0) | (np.diff(second[order]) != 0)
    number = np.empty(len(order), np.int64)
    number[order] = np.append(0, np.cumsum(change))
    return order[np.append(True, change)], number
