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
from twinfeed.samplers.drawing.int_arrays import groups_and_indices
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
        # A period before it is permuted: the stream of each element, and the element's index in it.
        streams, indices = groups_and_indices(weights)
        self._streams = streams.astype(np.min_scalar_type(len(weights)))
        self._indices = indices.astype(np.min_scalar_type(int(weights.max())))
        self._cache: FifoCache[tuple[Unsigned, Unsigned]] = FifoCache(4)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the tables, which are computed again."""
        return partial(type(self), renew=self._renew), (self._weights, self._key)

    def elements_at(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the element at each position: its stream, and its index in this stream.

        The index is the number of earlier positions that have the same stream.
        """
        if len(self._weights) == 1:
            return np.zeros_like(positions), positions.copy()
        period, offset = np.divmod(positions, self._length)
        stream, index = np.empty_like(positions), np.empty_like(positions)
        periods, row = np.unique(period if self._renew else 0 * period, return_inverse=True)
        chunk = max(1, _BUFFER // self._length)  # periods that are permuted at once
        for first in range(0, len(periods), chunk):
            in_chunk = (first <= row) & (row < first + chunk)
            streams, indices = self._periods(periods[first : first + chunk])
            stream[in_chunk] = streams[row[in_chunk] - first, offset[in_chunk]]
            index[in_chunk] = indices[row[in_chunk] - first, offset[in_chunk]]
        return stream, period * self._weights[stream] + index

    def num_before(self, position: int) -> Int64s:
        """Return the number of elements of each stream before this position, int64[streams]."""
        period, offset = divmod(position, self._length)
        counts = period * self._weights
        if offset:
            streams, _ = self._periods(np.array([period]))
            counts = counts + np.bincount(streams[0, :offset], minlength=len(counts))
        return counts

    def position_of(self, stream: int, index: int) -> int:
        """Return the position of element number `index` (from 0) of a stream."""
        period, offset = divmod(index, int(self._weights[stream]))
        streams, _ = self._periods(np.array([period]))
        return period * self._length + int(np.flatnonzero(streams[0] == stream)[offset])

    def _periods(self, periods: Int64s) -> tuple[Unsigned, Unsigned]:
        """Return the stream at each position of these periods, and the index of its element.

        A period is a permutation of stream numbers in which stream i comes `weights[i]` times. The
        index counts the elements of the stream from the start of the period. Both arrays have a row
        for each period, and a column for each position.
        """
        keys = random_words(self._key, periods) if self._renew else np.array([self._key], np.uint64)
        if len(keys) > 1:
            return self._permuted(keys)
        # A period may be longer than a batch: the next batches use it again.
        return self._cache.get(int(keys[0]), lambda: self._permuted(keys))

    def _permuted(self, keys: UInt64s) -> tuple[Unsigned, Unsigned]:
        """Return the stream at each position of a permuted period, and the index of its element.

        Both arrays have a row for each key, and a column for each position of the period.
        """
        length = self._length
        if length <= SMALL:
            streams = self._streams[sorted_rows(keys, length)]
        else:
            orders = (permute(length, key, np.arange(length)) for key in keys.tolist())
            streams = np.stack([self._streams[order] for order in orders])
        # A stable sort by stream has the elements in the order that `_indices` has.
        indices = np.empty(streams.shape, self._indices.dtype)
        by_stream = np.argsort(streams, axis=1, kind="stable")
        np.put_along_axis(indices, by_stream, np.broadcast_to(self._indices, streams.shape), axis=1)
        return streams, indices
