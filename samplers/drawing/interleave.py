"""Streams interleaved in exact proportion to integer weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.int_arrays import owners_of
from twinfeed.samplers.drawing.permutation import SMALL, permute, sorted_rows
from twinfeed.samplers.drawing.random_words import random_words
from twinfeed.samplers.types import Int64s, UInt64s, Unsigned

_BUFFER = 1 << 20  # turns of the periods that are computed at once, unless one period is longer


class Interleave:
    """A sequence of turns, each of one stream, in exact proportion to `weights`, int64[streams].

    `sum(weights)` consecutive turns are a *period*, a random permutation in which stream i has
    `weights[i]` turns. By default all periods are the same permutation, so that any
    `sum(weights)` consecutive turns are in proportion, wherever they start. With `renew` each
    period is a permutation of its own.
    """

    def __init__(self, weights: Int64s, key: int, *, renew: bool = False) -> None:
        self._weights, self._key, self._renew = weights, key, renew
        self._length = int(weights.sum())
        # A period before it is permuted: the stream of each turn, and the stream's turns before.
        streams, counts = owners_of(weights) if len(weights) > 1 else (np.empty(0, np.int64),) * 2
        self._streams = streams.astype(np.min_scalar_type(len(weights)))
        self._counts = counts.astype(np.min_scalar_type(int(weights.max())))
        self._cache: FifoCache[tuple[Unsigned, Unsigned]] = FifoCache(4)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the tables, which are computed again."""
        return partial(type(self), renew=self._renew), (self._weights, self._key)

    def streams_at(self, turns: Int64s) -> tuple[Int64s, Int64s]:
        """Return the stream of each turn, and the number of earlier turns of that stream."""
        if len(self._weights) == 1:
            return np.zeros_like(turns), turns.copy()
        period, offset = np.divmod(turns, self._length)
        stream, count = np.empty_like(turns), np.empty_like(turns)
        periods, row = np.unique(period if self._renew else 0 * period, return_inverse=True)
        chunk = max(1, _BUFFER // self._length)
        for first in range(0, len(periods), chunk):
            every = chunk >= len(periods)
            mask = slice(None) if every else (first <= row) & (row < first + chunk)
            streams, counts = self._periods(periods[first : first + chunk])
            stream[mask] = streams[row[mask] - first, offset[mask]]
            count[mask] = counts[row[mask] - first, offset[mask]]
        return stream, period * self._weights[stream] + count

    def counts_before(self, turn: int) -> Int64s:
        """Return the number of turns of each stream before this turn, int64[streams]."""
        if len(self._weights) == 1:
            return np.array([turn])
        period, rest = divmod(turn, self._length)
        counts = period * self._weights
        if rest:
            streams, _ = self._periods(np.array([period]))
            counts = counts + np.bincount(streams[0, :rest], minlength=len(counts))
        return counts

    def turn_of(self, stream: int, count: int) -> int:
        """Return the turn of a stream that has had so many turns before."""
        if len(self._weights) == 1:
            return count
        period, rest = divmod(count, int(self._weights[stream]))
        streams, _ = self._periods(np.array([period]))
        return period * self._length + int(np.flatnonzero(streams[0] == stream)[rest])

    def _periods(self, periods: Int64s) -> tuple[Unsigned, Unsigned]:
        """Return the stream of each turn of these periods, and its earlier turns in the period."""
        if not self._renew:
            return self._cache.get(0, lambda: self._permuted(np.array([self._key], np.uint64)))
        if len(periods) == 1:  # a long period serves many batches
            return self._cache.get(
                int(periods[0]), lambda: self._permuted(random_words(self._key, periods))
            )
        return self._permuted(random_words(self._key, periods))

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
