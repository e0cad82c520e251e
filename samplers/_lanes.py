"""Lanes: a sequence cut into W stretches that are emitted side by side, exact and seekable.

A round emits the next entry of every lane that has one left. So at most W places of the sequence
are open at a time, and any output is found by arithmetic over a table of W rows.

A lane may begin its stretch at a later round, cyclically. Then the two ends of the lane meet in
time: the same places are open when the epoch begins and when the epoch ends.

The order of the lanes within a round is keyed, one order for each round or one for all rounds. With
one order for all rounds, any W consecutive outputs come from W different lanes.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers._bits import Int64, words
from twinfeed.samplers._memo import Recent

_ORDER_WORDS = 1 << 12  # words of lane orders that are sorted at once
MAX_LANES = 1 << 24  # a lane's number is the lower bits of its word in the order of a round


class Lanes:
    """Map output positions to places of a sequence of `bounds[-1]` entries.

    `bounds` is int64[W + 1] from 0, `starts` the round in which each lane begins, int64[W]. With
    `renew` every round has an order of its own.
    """

    def __init__(self, bounds: Int64, starts: Int64, *, key: int, renew: bool) -> None:
        self._begins, self._lengths = bounds[:-1], np.diff(bounds)
        self._starts, self._key, self._renew = starts, key, renew
        # Rounds between two neighbouring lengths have the same lanes: one linear piece each.
        lengths, times = np.unique(self._lengths, return_counts=True)
        self._first_round = np.append(0, lengths)
        self._active = len(self._lengths) - np.append(0, np.cumsum(times))
        outputs = np.diff(self._first_round) * self._active[:-1]
        self._first_output = np.append(0, np.cumsum(outputs))
        self._recent: Recent[NDArray[np.int32]] = Recent(2)

    def places(self, positions: Int64) -> Int64:
        """Return the places of the sequence that these outputs take, int64 as `positions`."""
        piece = np.searchsorted(self._first_output, positions, side="right") - 1
        turn, slot = np.divmod(positions - self._first_output[piece], self._active[piece])
        turn += self._first_round[piece]
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
        keys = words(self._key, rounds if self._renew else np.zeros_like(rounds))
        packed = words(keys[:, None], lane) >> np.uint64(1)
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
