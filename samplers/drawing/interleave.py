"""Streams interleaved in exact proportion to integer weights.

An *interleave* is a sequence of stream numbers, as the order of the choices of tf.data's
`choose_from_datasets`. It is a concatenation of *periods* of `sum(weights)` positions. A period is
a random permutation in which stream i comes `weights[i]` times. With weights 2 and 1::

    streams  0 1 0 | 0 1 0 | 0 1 0 | ...
    indices  0 0 1 | 2 1 3 | 4 2 5 | ...

The *index* is that of the element in its stream: the number of earlier positions with this stream.

The elements of a period are numbered stream by stream: here elements 0 and 1 are of stream 0, and
element 2 is of stream 1. A period is an array of these numbers, such as 0 2 1 for the streams
0 1 0.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.int_arrays import computed_entries, groups_and_indices
from twinfeed.samplers.drawing.permutation import MAX_TABLE_SIZE, permute, random_permutations
from twinfeed.samplers.drawing.random_words import random_words
from twinfeed.samplers.types import Int64s, UInt64s, Unsigned

_BUFFER = 1 << 20  # positions that are computed at once, in whole periods


class Interleave:
    """The interleave of streams with these `weights`, int64[streams]: equal periods, so that any
    `sum(weights)` consecutive positions are in proportion, or with `reshuffle` a new one each time.
    """

    def __init__(self, weights: Int64s, key: int, *, reshuffle: bool = False) -> None:
        self._weights, self._key, self._reshuffle = weights, key, reshuffle
        self._period_size = int(weights.sum())
        # Of each element of a period: its stream, and its index in the stream within the period.
        # With weights 2 and 1 these are 0 0 1 and 0 1 0. Periods may be long: use small integers.
        streams, indices = groups_and_indices(weights)
        self._streams = streams.astype(np.min_scalar_type(len(weights)))
        self._indices = indices.astype(np.min_scalar_type(int(weights.max())))
        self._cache: FifoCache[Unsigned] = FifoCache(4)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the tables, which are computed again."""
        return partial(type(self), reshuffle=self._reshuffle), (self._weights, self._key)

    def elements_at(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the stream at each position, and the index of the element in this stream. The
        comments have weights 2 and 1, the streams 0 1 0, 0 1 0, and the positions 3 and 4.
        """
        if len(self._weights) == 1:  # each position is the next element of the only stream
            return np.zeros_like(positions), positions.copy()
        period, offset = np.divmod(positions, self._period_size)  # [1, 1], [0, 1]
        # Without reshuffling all periods are the same permutation: look all up in period 0.
        lookup_period = period if self._reshuffle else np.zeros_like(period)
        max_periods = max(1, _BUFFER // self._period_size)  # at a time, to bound memory
        # Elements of a period are numbered stream by stream: 0 and 1 of stream 0, 2 of stream 1.
        element = computed_entries(lookup_period, offset, self._periods, max_periods)  # [0, 2]
        stream = self._streams[element].astype(np.int64)  # [0, 1]
        # Add the elements of the same stream in earlier periods: 1 * [2, 1].
        return stream, period * self._weights[stream] + self._indices[element]  # [2, 1]

    def num_before(self, position: int) -> Int64s:
        """Return how often each stream comes before this position, int64[streams]."""
        period, offset = divmod(position, self._period_size)
        counts = period * self._weights
        if offset:
            streams = self._streams[self._periods(np.array([period]))[0, :offset]]
            counts = counts + np.bincount(streams, minlength=len(counts))
        return counts

    def position_of(self, stream: int, index: int) -> int:
        """Return the position of element number `index` (from 0) of a stream."""
        period, offset = divmod(index, int(self._weights[stream]))
        streams = self._streams[self._periods(np.array([period]))[0]]
        return period * self._period_size + int(np.flatnonzero(streams == stream)[offset])

    def _periods(self, periods: Int64s) -> Unsigned:
        """Return the element at each position of these periods, with a row for each period."""
        keys = np.full(len(periods), self._key, np.uint64)  # the key of each period
        if self._reshuffle:
            keys = random_words(self._key, periods)
        if len(keys) > 1:
            return self._shuffled_periods(keys)
        # A long period is cached, since the next batches need it again.
        return self._cache.get(int(keys[0]), lambda: self._shuffled_periods(keys))

    def _shuffled_periods(self, keys: UInt64s) -> Unsigned:
        """Return a random period for each key, in which the elements of each stream ascend. The
        comments have weights 2 and 1 and the period 2 0 1.
        """
        size = self._period_size
        # The streams of shuffled elements: the elements 2 1 0 have the streams [1, 0, 0].
        if size <= MAX_TABLE_SIZE:
            streams = self._streams[random_permutations(keys, size)]
        else:
            orders = (permute(size, key, np.arange(size)) for key in keys.tolist())
            streams = np.stack([self._streams[order] for order in orders])
        # The positions of stream 0, ascending, then those of stream 1.
        positions = np.argsort(streams, axis=1, kind="stable")  # [1, 2, 0]
        # So element 0 is at position 1, element 1 at position 2, and element 2 at position 0.
        elements: Unsigned = np.arange(size, dtype=np.min_scalar_type(size))
        periods = np.empty((len(keys), size), elements.dtype)
        np.put_along_axis(periods, positions, elements, axis=1)  # [2, 0, 1]
        return periods
