"""Lanes: a sequence cut into W consecutive segments, which are read side by side.

A *lane* is such a segment. A *round* reads the next entry of every lane that has entries left. A
*slot* is the index of an output in its round. An *entry* is an index into the sequence. So the
sequence is read at W entries at most at a time, as in an interleave of W files (tf.data's
`cycle_length=W`), and any output is found by arithmetic over a table of W rows.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from math import gcd

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.random_words import random_words
from twinfeed.samplers.types import Int64s, UInt64s

_MAX_SORTED = 1 << 12  # random words that are sorted at once, for the orders of lanes
MAX_LANES = 1 << 24  # a lane's number is the lower bits of its word in the order of a round
_MIN_LANES_FOR_SHORT_LANE = 16  # with fewer lanes, a lane that ends early would be noticed


class Rounds:
    """The rounds of W lanes of these lengths, int64[W].

    A lane is a segment of a sequence. A round reads one entry of each lane that has entries left.
    """

    def __init__(self, lengths: Int64s) -> None:
        # The number of lanes with entries left changes only at a length of a lane. Between two such
        # changes, the output is a linear function of round and slot.
        distinct_lengths, counts = np.unique(lengths, return_counts=True)
        self._first_round = np.append(0, distinct_lengths)  # after each change
        self._num_lanes = len(lengths) - np.append(0, np.cumsum(counts))  # with entries left
        outputs = np.cumsum(np.diff(self._first_round) * self._num_lanes[:-1])
        self._first_output = np.append(0, outputs)

    def locate(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the round of each output, and its slot (index) in the round: int64[n] both.

        `positions` are indices into the outputs. A round reads one entry of each lane, a segment of
        a sequence, that has entries left.
        """
        change = np.searchsorted(self._first_output, positions, side="right") - 1
        offset = positions - self._first_output[change]
        round_, slot = np.divmod(offset, self._num_lanes[change])
        return self._first_round[change] + round_, slot


class ConstantLanes:
    """Segments of a sequence (lanes), read side by side in a constant order, longer lanes first.

    Each round reads the next entry of every lane that has entries left. Any W consecutive outputs,
    the first and the last too, come from W different lanes, or from W - 1 if one lane is much
    shorter. `bounds` is int64[W + 1] from 0. There may be several sequences of this length; each
    has an order of its own, by its key in `keys`.
    """

    def __init__(self, bounds: Int64s, keys: UInt64s) -> None:
        lengths = np.diff(bounds)
        self._rounds = Rounds(lengths)
        random = random_words(keys[:, None], np.arange(len(lengths)))
        order = np.lexsort((random, np.broadcast_to(-lengths, random.shape)), axis=1)
        self._starts = bounds[order]

    def entries(self, sequence: int | Int64s, positions: Int64s) -> Int64s:
        """Return the entry, an index into the sequence, of each of these outputs of a sequence."""
        round_, slot = self._rounds.locate(positions)
        entries: Int64s = self._starts[sequence, slot] + round_
        return entries

    def slots(self, positions: Int64s) -> Int64s:
        """Return the lane of each of these outputs, numbered by their order in a round."""
        return self._rounds.locate(positions)[1]


class StaggeredLanes:
    """Segments of a sequence (lanes), read side by side in a new random order in every round.

    Each round reads the next entry of every lane that has entries left. A lane is at its first
    entry in round `first_rounds[lane]` (int64[W]), and is read cyclically. So in round 0 it is in
    its middle, where the epoch ends too.
    """

    def __init__(self, bounds: Int64s, first_rounds: Int64s, *, key: int) -> None:
        self._starts, self._lengths = bounds[:-1], np.diff(bounds)
        self._first_rounds, self._key = first_rounds, key
        self._rounds = Rounds(self._lengths)
        self._cache: FifoCache[NDArray[np.int32]] = FifoCache(2)

    def entries(self, positions: Int64s) -> Int64s:
        """Return the index into the sequence that is read at each position of the output, int64[n].

        Each round reads one entry of each lane, a segment of the sequence.
        """
        round_, slot = self._rounds.locate(positions)
        lane = self._lane_at(round_, slot)
        offset = (round_ - self._first_rounds[lane]) % self._lengths[lane]
        return self._starts[lane] + offset

    def _lane_at(self, round_: Int64s, slot: Int64s) -> Int64s:
        """Return the lane that is read at index `slot[i]` of round `round_[i]`, int64[n].

        A lane is a segment of the sequence. A round reads one entry of each lane, in random order.
        """
        rounds, row = np.unique(round_, return_inverse=True)
        chunk = max(1, _MAX_SORTED // len(self._lengths))  # rounds whose lanes are sorted at once
        # The outputs sorted by round, and where the outputs of each chunk of rounds start.
        by_round = np.argsort(row, kind="stable")
        starts = np.searchsorted(row[by_round], np.arange(0, len(rounds) + chunk, chunk)).tolist()
        lane = np.empty(round_.shape, np.int64)
        for number, (start, stop) in enumerate(pairwise(starts)):
            outputs, first_row = by_round[start:stop], number * chunk
            chunk_rounds = rounds[first_row : first_row + chunk]
            compute = partial(self._lane_orders, chunk_rounds)
            # A long round has many batches: without a cache, each batch would sort it again.
            orders = self._cache.get(int(chunk_rounds[0]), compute) if chunk == 1 else compute()
            lane[outputs] = orders[row[outputs] - first_row, slot[outputs]]
        return lane

    def _lane_orders(self, rounds: Int64s) -> NDArray[np.int32]:
        """Return the lanes in the random order in which each round reads them: int32[rounds, W].

        Lanes without entries left in the round come last. A random word carries the number of its
        lane in its lower bits, so that a sort of the words is an argsort of the lanes. The highest
        bit is set where the lane has no entries left.
        """
        lane = np.arange(len(self._lengths))
        packed = random_words(random_words(self._key, rounds)[:, None], lane) >> np.uint64(1)
        packed &= ~np.uint64(MAX_LANES - 1)
        packed |= lane.astype(np.uint64)
        packed[rounds[:, None] >= self._lengths] |= np.uint64(1 << 63)
        packed.sort(axis=1)
        packed &= np.uint64(MAX_LANES - 1)
        return packed.astype(np.int32)


def equal_bounds(size: int, lanes: int) -> Int64s:
    """Return the bounds of equal segments of `size` entries, int64[lanes + 1].

    The lengths of the segments (lanes) differ by at most one, the shorter first.
    """
    length, num_longer = divmod(size, lanes)
    lane = np.arange(lanes + 1)
    return lane * length + np.maximum(lane - (lanes - num_longer), 0)


def desynchronized_bounds(size: int, lanes: int, block: int) -> Int64s:
    """Return the bounds of segments (lanes) that reach the end of a block at different times.

    The lanes are read side by side, and the sequence of `size` records is one of blocks of `block`
    records. If all lanes went on to their next block at once, the order would be less random. The
    length of a lane, in blocks, is a fraction with the number of lanes as its denominator, in
    lowest terms. So no two lanes start at the same offset within a block. Only the last lane is
    shorter, by half at most. Where this is impossible, and for few lanes, lengths differ by at most
    one. The bounds are int64[lanes + 1].
    """
    blocks = -(-size // block)
    while gcd(blocks, lanes) > 1:
        blocks += 1
    total_length = blocks * block  # of all lanes, before the last is cut off
    if lanes < _MIN_LANES_FOR_SHORT_LANE or 2 * lanes * (total_length - size) > size:
        total_length = size
    length, remainder = divmod(total_length, lanes)
    lane = np.arange(lanes + 1)
    bounds: Int64s = np.minimum(lane * length + lane * remainder // lanes, size)
    return bounds
