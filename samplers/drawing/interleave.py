"""Streams interleaved in exact proportion to integer weights.

An *interleave* is a sequence of stream numbers, as the order of the choices of tf.data's
`choose_from_datasets`. It is a concatenation of *periods* of `sum(weights)` positions. A period is
a random permutation in which stream i comes `weights[i]` times.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.int_arrays import owners_of
from twinfeed.samplers.drawing.permutation import SMALL, permute, sorted_rows
from twinfeed.samplers.drawing.random_words import random_words
from twinfeed.samplers.types import Int64s, UInt64s, Unsigned

_BUFFER = 1 << 20  # positions of the periods that are computed at once, if a period is shorter


class Interleave:
    """The interleave of streams with these `weights`, int64[streams].

    By default all periods are the same permutation, so that any `sum(weights)` consecutive
    positions are in proportion, wherever they start. With `renew` each period is a permutation of
    its own.
    """

    def __init__(self, weights: Int64s, key: int, *, renew: bool = False) -> None:
        self._weights, self._key, self._renew = weights, key, renew
        self._length = int(weights.sum())
        # A period before it is permuted: the stream at each position, and its earlier positions.
        streams, counts = owners_of(weights)
        self._streams = streams.astype(np.min_scalar_type(len(weights)))
        self._counts = counts.astype(np.min_scalar_type(int(weights.max())))
        self._cache: FifoCache[tuple[Unsigned, Unsigned]] = FifoCache(4)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the tables, which are computed again."""
        return partial(type(self), renew=self._renew), (self._weights, self._key)

    def streams_at(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the stream at each position, and how often it comes before."""
        if len(self._weights) == 1:
            return np.zeros_like(positions), positions.copy()
        period, offset = np.divmod(positions, self._length)
        stream, count = np.empty_like(positions), np.empty_like(positions)
        periods, row = np.unique(period if self._renew else 0 * period, return_inverse=True)
        chunk = max(1, _BUFFER // self._length)
        for first in range(0, len(periods), chunk):
            mask = (first <= row) & (row < first + chunk)
            streams, counts = self._periods(periods[first : first + chunk])
            stream[mask] = streams[row[mask] - first, offset[mask]]
            count[mask] = counts[row[mask] - first, offset[mask]]
        return stream, period * self._weights[stream] + count

    def counts_before(self, position: int) -> Int64s:
        """Return how often each stream comes before this position, int64[streams]."""
        period, offset = divmod(position, self._length)
        counts = period * self._weights
        if offset:
            streams, _ = self._periods(np.array([period]))
            counts = counts + np.bincount(streams[0, :offset], minlength=len(counts))
        return counts

    def position_of(self, stream: int, count: int) -> int:
        """Return the position of entry number `count` (from 0) of a stream."""
        period, offset = divmod(count, int(self._weights[stream]))
        streams, _ = self._periods(np.array([period]))
        return period * self._length + int(np.flatnonzero(streams[0] == stream)[offset])

    def _periods(self, periods: Int64s) -> tuple[Unsigned, Unsigned]:
        """Return the stream at each position of these periods, and how often it comes before.

        Both are arrays of a row for each period.
        """
        keys = random_words(self._key, periods) if self._renew else np.array([self._key], np.uint64)
        if len(keys) > 1:
            return self._permuted(keys)
        # A long period serves many batches.
        return self._cache.get(int(keys[0]), lambda: self._permuted(keys))

    def _permuted(self, keys: UInt64s) -> tuple[Unsigned, Unsigned]:
        """Return what `_periods` returns, for the periods of these keys."""
        length = self._length
        if length <= SMALL:
            streams = self._streams[sorted_rows(keys, length)]
        else:
            streams = np.stack(
                [self._streams[permute(length, int(k), np.arange(length))] for k in keys]
            )
        counts = np.empty(streams.shape, self._counts.dtype)
        order = np.argsort(streams, axis=1, kind="stable")
        np.put_along_axis(counts, order, np.broadcast_to(self._counts, streams.shape), axis=1)
        return streams, counts
