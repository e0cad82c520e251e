"""Fair groups of m distinct items out of n, and patterns of streams in exact proportion.

An item stream is a concatenation of laps. Each lap is a permutation of the n items, and group t is
the entries `t * m` to `t * m + m`. So counts differ by at most 1 after any number of groups. A
group that straddles two laps must still be distinct:

* `n >= 2m - 1`: entries at the head of the new lap that also end the old lap move, stably, after
  the next entries that do not. Only the first m entries of a lap can change, and the last m - 1
  never do. So no change goes on from lap to lap.
* `n < 2m - 1`: one permutation is walked cyclically for `n / gcd(n, m)` groups, then renewed. This
  covers m > n too: all n items first, then again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.bits import Int64, UInt64, spread, words
from twinfeed.samplers.drawing.memo import Recent
from twinfeed.samplers.drawing.permutation import SMALL, permute, permute_rows, sorted_rows

_PERIODS = 1 << 20  # turns of the periods that are made at once, unless one period is longer

Small = NDArray[np.unsignedinteger[Any]]


class FairGroups:
    """Fair groups of m over many populations (classes) at once, each of its own size."""

    def __init__(self, sizes: Int64, m: int, key: int) -> None:
        self._sizes, self._m, self._key = sizes, m, key

    def groups(
        self, population: Int64, number: Int64, low: int = 0, high: int | None = None
    ) -> Int64:
        """Return places low to high of these groups, int64[rows, high - low]; items from 0.

        Only these places are drawn, unless two laps meet in the group.
        """
        n, m = self._sizes[population], self._m
        high = m if high is None else high
        start = number * m
        lap = start // n
        offset = start - lap * n
        cyclic = n < 2 * m - 1
        position = offset[:, None] + np.arange(low, high)
        renewal, wrapped = lap.copy(), position.copy()
        renewal[cyclic] //= m // np.gcd(n[cyclic], m)
        beyond = offset + high > n
        wrapped[beyond] %= n[beyond, None]
        out = self._entries(population, renewal, wrapped)
        # Places within the first m of a lap are of its adjusted head: of this lap, or of the next.
        begun = np.flatnonzero(~cyclic & (offset + low < m) & (lap > 0))
        straddling = np.flatnonzero(~cyclic & beyond)
        rows = np.append(begun, straddling)
        if rows.size:
            ahead = np.arange(len(rows)) >= len(begun)
            head = self._head(population[rows], lap[rows] + ahead)
            place = position[rows] - (n[rows] * ahead)[:, None]
            adjusted = np.take_along_axis(head, place.clip(0, m - 1), axis=1)
            out[rows] = np.where((place >= 0) & (place < m), adjusted, out[rows])
        return out

    def _entries(self, population: Int64, lap: Int64, positions: Int64) -> Int64:
        """Return entries of the permutations of a population and lap a row: int64[rows, m]."""
        keys = words(words(self._key, population), lap)
        return permute_rows(self._sizes[population], keys, positions)

    def _head(self, population: Int64, lap: Int64) -> Int64:
        """Return the first m entries of laps, clashes with the lap before moved back."""
        n, m = self._sizes[population], self._m
        taken = lap * n % m  # entries of the straddling group that the old lap gave
        first = np.broadcast_to(np.arange(m), (len(n), m))
        places = np.concatenate([n[:, None] - 1 - first, first])
        # One call for the old and the new laps: with few rows, the calls cost more than the
        # entries.
        both = self._entries(np.tile(population, 2), np.append(lap - 1, lap), places)
        tail, head = np.split(both, 2)
        # One search over all rows, each with an offset of its own: m * m comparisons would take
        # seconds.
        row = np.arange(len(n))[:, None] * int(n.max())
        used = np.append((row + tail)[np.arange(m) < taken[:, None]], validate.LIMIT)
        used.sort()
        free = used[np.searchsorted(used, row + head)] != row + head
        chosen = free & (np.cumsum(free, axis=1) <= (m - taken)[:, None])
        return np.take_along_axis(head, np.argsort(~chosen, axis=1, kind="stable"), axis=1)


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
