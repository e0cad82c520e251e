"""Round-robin reading of a sequence that is divided into W consecutive segments.

A *round* reads the next entry of every segment that has entries left. All entries in the order in
which they are read are the *output*. The sequence of the indices 0 to 6 in 3 segments, in constant
order::

    segments  0 1 2 | 3 4 | 5 6
    rounds    0 3 5 | 1 4 6 | 2

So the sequence is read at W entries at most at a time, as in an interleave of W files (tf.data's
`cycle_length=W`). The entry at any position of the output is found by arithmetic over a table of W
rows.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from math import gcd

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.int_arrays import computed_entries
from twinfeed.samplers.drawing.random_words import random_words
from twinfeed.samplers.types import Int64s, UInt64s

_MAX_SORTED = 1 << 12  # random words that are sorted at once, for the orders of segments
MAX_SEGMENTS = 1 << 24  # a segment's number is the lower bits of its word in the order of a round
_MIN_SEGMENTS_FOR_SHORT_ONE = 16  # with fewer segments, one that ends early would be noticed


class Rounds:
    """The rounds that read one entry of each of W segments, int64[W], that has entries left."""

    def __init__(self, lengths: Int64s) -> None:
        # All rounds are equally long until the first segment ends, and so on to the next end. So
        # the rounds are in ranges of equally long rounds, one for each distinct length.
        distinct_lengths, counts = np.unique(lengths, return_counts=True)
        self._first_round = np.append(0, distinct_lengths)  # of each range
        self._round_size = len(lengths) - np.append(0, np.cumsum(counts))  # segments not ended
        range_stops = np.cumsum(np.diff(self._first_round) * self._round_size[:-1])
        self._first_position = np.append(0, range_stops)  # of each range, in the output

    def locate(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the round of each position of the output, and the index in the round, int64[n]."""
        range_number = np.searchsorted(self._first_position, positions, side="right") - 1
        offset = positions - self._first_position[range_number]
        round_in_range, index_in_round = np.divmod(offset, self._round_size[range_number])
        return self._first_round[range_number] + round_in_range, index_in_round


class RoundRobin:
    """Round-robin over the segments of a sequence, in a constant order, longer segments first.

    Any W consecutive entries of the output are of W different segments, or of W - 1 if one is much
    shorter. Each of several sequences of this length has an order of its own, by its key in `keys`.
    """

    def __init__(self, bounds: Int64s, keys: UInt64s) -> None:
        lengths = np.diff(bounds)
        self._rounds = Rounds(lengths)
        random = random_words(keys[:, None], np.arange(len(lengths)))
        order = np.lexsort((random, np.broadcast_to(-lengths, random.shape)), axis=1)
        # Where the segment starts that each sequence reads at each index of a round:
        # int64[sequences, W].
        self._segment_starts = bounds[order]

    def indices_at(self, sequence_number: int | Int64s, positions: Int64s) -> Int64s:
        """Return the index that is read at each position of a sequence, or of several, int64[n].
        The comments have the segments 0 1 2 and 3 4, read as 0 3, 1 4 and 2.
        """
        # For each position: [0, 0, 1, 1, 2] and [0, 1, 0, 1, 0].
        round_, index_in_round = self._rounds.locate(positions)
        # The first index of the segment that is read there: [0, 3, 0, 3, 0]. All rounds read the
        # segments in the same order.
        segment_start: Int64s = self._segment_starts[sequence_number, index_in_round]
        return segment_start + round_  # [0, 3, 1, 4, 2]

    def indices_in_round(self, positions: Int64s) -> Int64s:
        """Return which segment is read at each position, as its index in a round, int64[n]."""
        return self._rounds.locate(positions)[1]


class ShuffledRoundRobin:
    """Round-robin over the segments of a sequence, in a new random order in every round.

    A segment is read cyclically: its first entry comes in round `first_rounds[segment]`.
    """

    def __init__(self, bounds: Int64s, first_rounds: Int64s, *, key: int) -> None:
        self._segment_starts, self._lengths = bounds[:-1], np.diff(bounds)
        self._first_rounds, self._key = first_rounds, key
        self._rounds = Rounds(self._lengths)
        # The rounds whose orders are computed at once, to bound memory.
        self._max_rounds = max(1, _MAX_SORTED // len(self._lengths))
        self._cache: FifoCache[NDArray[np.int32]] = FifoCache(2)

    def indices_at(self, positions: Int64s) -> Int64s:
        """Return the index into the sequence that is read at each position of the output, int64[n].
        The comments have the segments 0 1 2 (first round 1) and 3 4 (first round 0)::

            round         0     1     2
            position      0 1   2 3   4
            segment       1 0   0 1   0
            index read    3 2   0 4   1
        """
        # The round of each position, [0, 0, 1, 1, 2], and the index in it, [0, 1, 0, 1, 0].
        round_, index_in_round = self._rounds.locate(positions)
        # `_orders` are the segments in the order of each round. The segment at each position is the
        # entry `index_in_round` of the order of round `round_`: [1, 0, 0, 1, 0].
        segment = computed_entries(round_, index_in_round, self._orders, self._max_rounds)
        rounds_since_first = round_ - self._first_rounds[segment]  # [0, -1, 0, 1, 1]
        # Cyclically: -1 is offset 2 of the 3 indices of segment 0.
        offset_in_segment = rounds_since_first % self._lengths[segment]  # [0, 2, 0, 1, 1]
        return self._segment_starts[segment] + offset_in_segment  # [3, 2, 0, 4, 1]

    def _orders(self, rounds: Int64s) -> NDArray[np.int32]:
        """Return the random order in which each round reads the segments, int32[rounds, W]."""
        return self._cache.get(rounds.tobytes(), partial(self._compute_orders, rounds))

    def _compute_orders(self, rounds: Int64s) -> NDArray[np.int32]:
        """Compute the orders of rounds: random words are sorted with the segment's number as lower
        bits, and the highest bit where it has no entry left.
        """
        segment = np.arange(len(self._lengths))
        packed = random_words(random_words(self._key, rounds)[:, None], segment) >> np.uint64(1)
        packed &= ~np.uint64(MAX_SEGMENTS - 1)
        packed |= segment.astype(np.uint64)
        packed[rounds[:, None] >= self._lengths] |= np.uint64(1 << 63)
        packed.sort(axis=1)
        packed &= np.uint64(MAX_SEGMENTS - 1)
        return packed.astype(np.int32)


def equal_bounds(size: int, count: int) -> Int64s:
    """Divide `size` entries into `count` segments, shorter ones first; return int64[count + 1]."""
    length, num_longer = divmod(size, count)
    number = np.arange(count + 1)
    return number * length + np.maximum(number - (count - num_longer), 0)


def desynchronized_bounds(size: int, count: int, block: int) -> Int64s:
    """Divide `size` records into `count` segments that start at different offsets in a block;
    return their bounds. Otherwise all would come to their next block at the same time, which is
    less random. The comments have 512 records in blocks of 16: segments are as long as if there
    were 33 blocks.
    """
    num_blocks = -(-size // block)  # 32
    # Segment i starts after i * 33 / 16 blocks. As 33 and 16 have no common divisor, the fractions
    # of a block in these numbers are different for all segments.
    padded_size = _next_coprime(num_blocks, count) * block  # 33 * 16
    # After the last segment has ended, records of one segment fewer are mixed. With few segments,
    # or for long, that would make the order less random: then divide the records equally.
    num_missing = padded_size - size  # the records that the last segment lacks: 16 of 33
    if count < _MIN_SEGMENTS_FOR_SHORT_ONE or num_missing > size // count // 2:
        return _rounded_bounds(size, count)
    return np.minimum(_rounded_bounds(padded_size, count), size)


def _next_coprime(number: int, modulus: int) -> int:
    """Return the first number, from `number` on, that has no common divisor with `modulus`."""
    return next(candidate for candidate in count(number) if gcd(candidate, modulus) == 1)


def _rounded_bounds(size: int, count: int) -> Int64s:
    """Return `i * size // count` for each i from 0 to `count`, without overflow of int64."""
    length, remainder = divmod(size, count)
    i = np.arange(count + 1)
    return i * length + i * remainder // count
