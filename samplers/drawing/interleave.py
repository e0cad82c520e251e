"""Streams interleaved in exact proportion to integer weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers.drawing.fifo_cache import Recent
from twinfeed.samplers.drawing.int_arrays import Int64, UInt64, spread
from twinfeed.samplers.drawing.permutation import SMALL, permute, sorted_rows
from twinfeed.samplers.drawing.random_words import words

_PERIODS = 1 << 20  # turns of the periods that are made at once, unless one period is longer

Small = NDArray[np.unsignedinteger[Any]]


class Pattern:
    """Give stream i `weights[i]` turns of each period, turns `k * sum(weights)` and following.

    All periods have the same order, and so every `sum(weights)` consecutive turns are in
    proportion. With `renew` each period has an order of its own.
    """

    def __init__(self, weights: Int64, key: int, *, renew: bool = False) -> None:
        self._weights, self._key, self._renew = weights, key, renew
        self._length = int(weights.sum())
        slots, places = spread(weights) if len(weights) > 1 else (np.empty(0, np.int64),) * 2
        self._slots = slots.astype(np.min_scalar_type(len(weights)))
        self._places = places.astype(np.min_scalar_type(int(weights.max())))
        self._recent: Recent[tuple[Small, Small]] = Recent(4)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the tables, which are made again."""
        return partial(type(self), renew=self._renew), (self._weights, self._key)

    def turns(self, number: Int64) -> tuple[Int64, Int64]:
        """Return the stream of each turn, and how many turns that stream had before."""
        if len(self._weights) == 1:
            return np.zeros_like(number), number.copy()
        lap, slot = np.divmod(number, self._length)
        stream, place = np.empty_like(number), np.empty_like(number)
        laps, row = np.unique(lap if self._renew else 0 * lap, return_inverse=True)
        most = max(1, _PERIODS // self._length)
        for first in range(0, len(laps), most):
            mine = slice(None) if most >= len(laps) else (first <= row) & (row < first + most)
            streams, places = self._periods(laps[first : first + most])
            stream[mine] = streams[row[mine] - first, slot[mine]]
            place[mine] = places[row[mine] - first, slot[mine]]
        return stream, lap * self._weights[stream] + place

    def given(self, number: int) -> Int64:
        """Return how many of the first `number` turns each stream has, int64[streams]."""
        if len(self._weights) == 1:
            return np.array([number])
        lap, rest = divmod(number, self._length)
        given = lap * self._weights
        if rest:
            streams, _ = self._periods(np.array([lap]))
            given = given + np.bincount(streams[0, :rest], minlength=len(given))
        return given

    def turn(self, stream: int, count: int) -> int:
        """Return the turn before which a stream has had this many turns."""
        if len(self._weights) == 1:
            return count
        lap, place = divmod(count, int(self._weights[stream]))
        streams, _ = self._periods(np.array([lap]))
        return lap * self._length + int(np.flatnonzero(streams[0] == stream)[place])

    def _periods(self, laps: Int64) -> tuple[Small, Small]:
        """Return the streams of these periods, and how many turns each had before in its period."""
        if not self._renew:
            return self._recent.get(0, lambda: self._made(np.array([self._key], np.uint64)))
        if len(laps) == 1:  # a long period serves many batches
            return self._recent.get(int(laps[0]), lambda: self._made(words(self._key, laps)))
        return self._made(words(self._key, laps))

    def _made(self, keys: UInt64) -> tuple[Small, Small]:
        length = self._length
        if length <= SMALL:
            streams = self._slots[sorted_rows(keys, length)]
        else:
            streams = np.stack(
                [self._slots[permute(length, int(k), np.arange(length))] for k in keys]
            )
        places = np.empty(streams.shape, self._places.dtype)
        order = np.argsort(streams, axis=1, kind="stable")
        np.put_along_axis(places, order, np.broadcast_to(self._places, streams.shape), axis=1)
        return streams, places
