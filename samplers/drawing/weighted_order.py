"""Records without replacement, in the order of exponential waiting times, sorted in pieces.

A record of weight w waits an exponential time of rate w (Efraimidis and Spirakis, "Weighted random
sampling with a reservoir", 2006). Sorting the waits of all records at once would stop a training
loop for seconds at the start of each epoch. Here two things are spread over the draws:

* Blocks of records are divided into pieces by their waits, while the epoch before is drawn.
* A piece is sorted when a draw comes to it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers.drawing.fifo_cache import Recent
from twinfeed.samplers.drawing.int_arrays import Int64
from twinfeed.samplers.drawing.prefix_sums import Counts
from twinfeed.samplers.drawing.random_words import words

Float64 = NDArray[np.float64]
_BLOCK = 1 << 14  # records of which the waits are computed at once
_PIECE = 1 << 15  # records that are sorted at once, about
_SAMPLE = 1 << 12  # waits that say where pieces begin, about
_AHEAD = 1.25  # how much faster the next epoch is prepared than this epoch is drawn


class Waiting:
    """The records of one epoch in the order of their waits."""

    def __init__(self, weights: Counts, key: int) -> None:
        self._weights, self._key = weights, key
        count = len(weights)
        self._blocks = [slice(a, min(a + _BLOCK, count)) for a in range(0, count, _BLOCK)]
        waits = np.sort(self._waits(np.arange(0, count, max(1, count // _SAMPLE))))
        pieces = min(count // _PIECE + 1, 1 << 15)
        # The bounds of pieces decide how many records are sorted at once, never the order.
        self._edges = waits[np.arange(1, pieces) * len(waits) // pieces]
        # Threads may divide the same block: they write the same pieces.
        self._piece_of = np.empty(count, np.uint16)
        self._divided = 0  # this many blocks, from the first on
        self._bounds: Int64 | None = None  # bounds of pieces, once all blocks are divided
        self._sorted: Recent[Int64] = Recent(2)

    def prepare(self, share: float) -> None:
        """Divide this share of the blocks, and a little more."""
        goal = min(len(self._blocks), int(len(self._blocks) * share * _AHEAD))
        for number in range(self._divided, goal):
            block = self._blocks[number]
            waits = self._waits(np.arange(block.start, block.stop))
            self._piece_of[block] = np.searchsorted(self._edges, waits, side="right")
            self._divided = number + 1

    def records(self, positions: Int64) -> Int64:
        """Return the records at these places of the order, int64 as `positions`."""
        bounds = self._bounds
        if bounds is None:
            self.prepare(1)
            pieces = len(self._edges) + 1
            counts = sum(np.bincount(self._piece_of[b], minlength=pieces) for b in self._blocks)
            bounds = self._bounds = np.append(0, np.cumsum(counts))
        piece = np.searchsorted(bounds, positions, side="right") - 1
        out = np.empty(positions.shape, np.int64)
        for number in np.unique(piece).tolist():
            mine = piece == number
            members = self._sorted.get(number, lambda: self._piece(number))  # noqa: B023
            out[mine] = members[positions[mine] - bounds[number]]
        return out

    def _piece(self, number: int) -> Int64:
        """Return the records of a piece by their waits; equal waits stay in stored order."""
        records = np.flatnonzero(self._piece_of == number)
        return records[np.argsort(self._waits(records), kind="stable")]

    def _waits(self, records: Int64) -> Float64:
        """Return exponential waiting times of rate weight; infinite for a weight of 0."""
        word = words(self._key, records) >> np.uint64(11)
        uniform = (word.astype(np.float64) + 0.5) * 2.0**-53
        weights: Int64 = np.asarray(self._weights[records])
        waits = -log(uniform) / np.maximum(weights, 1)
        waits[weights == 0] = np.inf
        return waits


def log(x: Float64) -> Float64:
    """Return natural logarithms by correctly rounded operations alone.

    `np.log` differs in its last bit between CPUs. Here x = m * 2^e with m near 1, and
    log m is the series of 2 atanh((m - 1) / (m + 1)).
    """
    mantissa, exponent = np.frexp(x)
    low = mantissa < 0.7071067811865476
    mantissa = np.where(low, mantissa * 2, mantissa)
    exponent = exponent - low
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = np.zeros_like(s)
    for odd in range(21, 0, -2):
        series = series * square
        series = series + 1 / odd
    log: Float64 = exponent * 0.6931471805599453 + 2 * s * series
    return log
