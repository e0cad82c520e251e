"""Streams interleaved in exact proportion to integer weights.

An *interleave* is a sequence of stream numbers, as the order of the choices of tf.data's
`choose_from_datasets`. It is a concatenation of *periods* of `sum(weights)` positions. A period is
a random permutation in which stream i comes `weights[i]` times. With weights 2 and 1::

    streams  0 1 0 | 0 1 0 | 0 1 0 | ...
    indices  0 0 1 | 2 1 3 | 4 2 5 | ...

The *index* is that of the element in its stream: the number of earlier positions with this stream.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.int_arrays import distinct_chunks, groups_and_indices
from twinfeed.samplers.drawing.permutation import MAX_TABLE_SIZE, permute, random_permutations
from twinfeed.samplers.drawing.random_words import random_words
from twinfeed.samplers.types import Int64s, UInt64s, Unsigned

_BUFFER = 1 << 20  # positions that are computed at once, in whole periods


class Interleave:
    """The interleave of streams with these `weights`, int64[streams].

    By default all periods are the same permutation, so that any `sum(weights)` consecutive
    positions are in proportion, wherever they start. With `reshuffle` each period is another random
    permutation.
    """

    def __init__(self, weights: Int64s, key: int, *, reshuffle: bool = False) -> None:
        self._weights, self._key, self._reshuffle = weights, key, reshuffle
        self._period_size = int(weights.sum())
        # A period before it is shuffled: the stream of each element, and the element's index in
        # the stream. With weights 2 and 1 these are 0 0 1 and 0 1 0.
        streams, indices = groups_and_indices(weights)
        self._sorted_streams = streams.astype(np.min_scalar_type(len(weights)))
        self._sorted_indices = indices.astype(np.min_scalar_type(int(weights.max())))
        self._cache: FifoCache[tuple[Unsigned, Unsigned]] = FifoCache(4)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the tables, which are computed again."""
        return partial(type(self), reshuffle=self._reshuffle), (self._weights, self._key)

    def elements_at(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the stream at each position, and the index of the element in this stream.

        The index is the number of earlier positions with the same stream. The sequence is made of
        periods, in which each stream comes as often as its weight says. The comments have the
        values for streams of weights 2 and 1, which are interleaved as 0 1 0, 0 1 0 and so on, and
        for the positions 3 and 4: these are element 2 of stream 0, and element 1 of stream 1.
        """
        if len(self._weights) == 1:  # each position is the next element of the only stream
            return np.zeros_like(positions), positions.copy()
        period, offset = np.divmod(positions, self._period_size)  # [1, 1], [0, 1]
        # Without reshuffling all periods are the same permutation: look all up in period 0.
        lookup_period = period if self._reshuffle else np.zeros_like(period)  # [0, 0]
        stream, index_in_period = np.empty_like(positions), np.empty_like(positions)
        max_periods = max(1, _BUFFER // self._period_size)
        # A few distinct periods at a time, to bound memory: `positions[i]` are looked up in the
        # periods `periods[row]`, here [0], [0, 1] and [0, 0].
        for periods, i, row in distinct_chunks(lookup_period, max_periods):
            streams, indices = self._periods(periods)  # [[0, 1, 0]] and [[0, 0, 1]]
            stream[i] = streams[row, offset[i]]  # [0, 1]
            index_in_period[i] = indices[row, offset[i]]  # [0, 0]
        # Add the elements of the same stream in earlier periods: 1 * [2, 1].
        return stream, period * self._weights[stream] + index_in_period

    def num_before(self, position: int) -> Int64s:
        """Return how often each stream comes before this position, int64[streams].

        The sequence is made of periods, in which each stream comes as often as its weight says. So
        only the last, incomplete period must be counted.
        """
        period, offset = divmod(position, self._period_size)
        counts = period * self._weights
        if offset:
            streams, _ = self._periods(np.array([period]))
            counts = counts + np.bincount(streams[0, :offset], minlength=len(counts))
        return counts

    def position_of(self, stream: int, index: int) -> int:
        """Return the position of element number `index` (from 0) of a stream.

        In the sequence of streams 0 1 0 0 1 0, element 2 of stream 0 is at position 3. Each period
        of the sequence has as many elements of a stream as its weight says.
        """
        period, offset = divmod(index, int(self._weights[stream]))
        streams, _ = self._periods(np.array([period]))
        return period * self._period_size + int(np.flatnonzero(streams[0] == stream)[offset])

    def _periods(self, periods: Int64s) -> tuple[Unsigned, Unsigned]:
        """Return the stream at each position of these periods, and the index of each element.

        A period is a permutation of stream numbers in which stream i comes `weights[i]` times. The
        index of an element is the number of earlier positions of the period with the same stream: a
        period 0 1 0 has the indices 0 0 1. Both arrays have a row for each period. With
        `_reshuffle` each period is another permutation; otherwise all periods are the same one.
        """
        keys = np.full(len(periods), self._key, np.uint64)  # the key of each period
        if self._reshuffle:
            keys = random_words(self._key, periods)
        if len(keys) > 1:
            return self._shuffled_periods(keys)
        # A long period is cached, since the next batches need it again.
        return self._cache.get(int(keys[0]), lambda: self._shuffled_periods(keys))

    def _shuffled_periods(self, keys: UInt64s) -> tuple[Unsigned, Unsigned]:
        """Return a random period for each key, and the index of each of its elements in its stream.

        A period is a permutation of stream numbers in which stream i comes `weights[i]` times: with
        weights 2 and 1, it may be 0 1 0, and the indices are 0 0 1. Both arrays have a row for each
        key.
        """
        size = self._period_size
        # Shuffle the streams 0 0 1 by each key.
        if size <= MAX_TABLE_SIZE:
            streams = self._sorted_streams[random_permutations(keys, size)]
        else:
            orders = (permute(size, key, np.arange(size)) for key in keys.tolist())
            streams = np.stack([self._sorted_streams[order] for order in orders])
        # The positions of stream 0, then of stream 1, ascending: [0, 2, 1] of the streams 0 1 0.
        positions = np.argsort(streams, axis=1, kind="stable")
        # These are elements 0 and 1 of stream 0, and element 0 of stream 1.
        indices = np.empty(streams.shape, self._sorted_indices.dtype)
        np.put_along_axis(indices, positions, self._sorted_indices, axis=1)  # [0, 0, 1]
        return streams, indices
