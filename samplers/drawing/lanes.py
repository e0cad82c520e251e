"""Lanes: a sequence cut into W stretches that are emitted side by side, exact and seekable.

A round emits the next entry of every lane that has one left. So at most W places of the sequence
are open at a time, and any output is found by arithmetic over a table of W rows.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from math import gcd

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers.drawing.fifo_cache import Recent
from twinfeed.samplers.drawing.int_arrays import Int64, UInt64
from twinfeed.samplers.drawing.random_words import words

_ORDER_WORDS = 1 << 12  # words of lane orders that are sorted at once
MAX_LANES = 1 << 24  # a lane's number is the lower bits of its word in the order of a round
_FEWEST_ARCS = 16  # with fewer lanes, a lane that ends early would be missed


class Rounds:
    """Find outputs in the rounds of lanes of these lengths, int64[W]."""

    def __init__(self, lengths: Int64) -> None:
        # Rounds between two neighbouring lengths have the same lanes: one linear piece each.
        distinct, times = np.unique(lengths, return_counts=True)
        self._first = np.append(0, distinct)
        self._active = len(lengths) - np.append(0, np.cumsum(times))
        self._outputs = np.append(0, np.cumsum(np.diff(self._first) * self._active[:-1]))

    def of(self, positions: Int64) -> tuple[Int64, Int64]:
        """Return the round of each output, and the output's place in the round."""
        piece = np.searchsorted(self._outputs, positions, side="right") - 1
        turn, slot = np.divmod(positions - self._outputs[piece], self._active[piece])
        return turn + self._first[piece], slot


class Arcs:
    """Emit lanes in one order for all rounds, the longer lanes first.

    Any W consecutive outputs, the first and the last too, come from W different lanes, or from
    W - 1 if one lane is much shorter. `bounds` is int64[W + 1] from 0. `keys` has one order for
    each of several equal sequences.
    """

    def __init__(self, bounds: Int64, keys: UInt64) -> None:
        lengths = np.diff(bounds)
        self._rounds = Rounds(lengths)
        drawn = words(keys[:, None], np.arange(len(lengths)))
        order = np.lexsort((drawn, np.broadcast_to(-lengths, drawn.shape)), axis=1)
        self._begins = bounds[order]

    def places(self, sequence: int | Int64, positions: Int64) -> Int64:
        """Return the places of these outputs, each of one of the sequences."""
        turn, slot = self._rounds.of(positions)
        places: Int64 = self._begins[sequence, slot] + turn
        return places

    def slots(self, positions: Int64) -> Int64:
        """Return the lane of each of these outputs, as its number in the order of emission."""
        return self._rounds.of(positions)[1]


class StaggeredLanes:
    """Emit lanes in another order in every round.

    A lane begins its stretch in round `starts` (int64[W]), cyclically. Then the same places are
    open when the epoch begins and when the epoch ends.
    """

    def __init__(self, bounds: Int64, starts: Int64, *, key: int) -> None:
        self._begins, self._lengths = bounds[:-1], np.diff(bounds)
        self._starts, self._key = starts, key
        self._rounds = Rounds(self._lengths)
        self._recent: Recent[NDArray[np.int32]] = Recent(2)

    def places(self, positions: Int64) -> Int64:
        """Return the places of the sequence that these outputs take, int64 as `positions`."""
        turn, slot = self._rounds.of(positions)
        lane = self._lanes(turn, slot)
        offset = (turn - self._starts[lane]) % self._lengths[lane]
        return self._begins[lane] + offset

    def _lanes(self, turn: Int64, slot: Int64) -> Int64:
        """Return the lane of each slot of a round."""
        rounds, row = np.unique(turn, return_inverse=True)
        block = max(1, _ORDER_WORDS // len(self._lengths))
        order = np.argsort(row, kind="stable")
        cuts = np.searchsorted(row[order], np.arange(0, len(rounds) + block, block)).tolist()
        lane = np.empty(turn.shape, np.int64)
        for number, (a, b) in enumerate(pairwise(cuts)):
            mine, first = order[a:b], number * block
            some = rounds[first : first + block]
            make = partial(self._lane_order, some)
            # A long round serves many batches: each batch would sort the round anew.
            lanes = self._recent.get(int(some[0]), make) if block == 1 else make()
            lane[mine] = lanes[row[mine] - first, slot[mine]]
        return lane

    def _lane_order(self, rounds: Int64) -> NDArray[np.int32]:
        """Return the lanes of each round in their order of emission; empty lanes come last."""
        lane = np.arange(len(self._lengths))
        packed = words(words(self._key, rounds)[:, None], lane) >> np.uint64(1)
        packed &= ~np.uint64(MAX_LANES - 1)
        packed |= lane.astype(np.uint64)
        packed[rounds[:, None] >= self._lengths] |= np.uint64(1 << 63)
        packed.sort(axis=1)
        packed &= np.uint64(MAX_LANES - 1)
        return packed.astype(np.int32)


def equal_bounds(size: int, lanes: int) -> Int64:
    """Return the bounds of lanes whose lengths differ by at most one, the shorter first."""
    share, longer = divmod(size, lanes)
    lane = np.arange(lanes + 1)
    return lane * share + np.maximum(lane - (lanes - longer), 0)


def arc_bounds(size: int, lanes: int, block: int) -> Int64:
    """Return the bounds of lanes that change blocks of this size one after the other.

    A lane is a number of blocks divided by the number of lanes, which have no common divisor: so
    no two lanes begin at the same place of a block. Only the last lane is shorter, by half at most.
    Where that cannot be, lengths differ by one.
    """
    blocks = -(-size // block)
    while gcd(blocks, lanes) > 1:
        blocks += 1
    cut = blocks * block
    if lanes < _FEWEST_ARCS or 2 * lanes * (cut - size) > size:
        cut = size
    share, rest = divmod(cut, lanes)
    lane = np.arange(lanes + 1)
    bounds: Int64 = np.minimum(lane * share + lane * rest // lanes, size)
    return bounds
