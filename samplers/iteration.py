"""Iterate over a sampler: the ids of an epoch, one by one, and the position of the next id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import length_hint
from typing import Any

import numpy as np

from twinfeed.samplers.stream import MAX_IDS, Stream, StreamPass
from twinfeed.samplers.types import Int64s


class IdPass(StreamPass, Iterator[int]):
    """An iteration over one epoch's ids of a sampler, as Python ints, with a state.

    Args: sampler: the sampler, whose position this moves. positions_from: returns the positions of
    an epoch that it reads, from one on. draw: returns the ids at positions of an epoch.
    """

    def __init__(
        self,
        sampler: Stream,
        positions_from: Callable[[int], range],
        draw: Callable[[int, Int64s], Int64s],
    ) -> None:
        self._sampler, self._positions_from, self._draw = sampler, positions_from, draw
        self._reset()

    def _reset(self) -> None:
        """Set the iterator to before its first id."""
        # The positions of the epoch that it reads; None before the first id.
        self._positions: range | None = None
        self._num_drawn = 0  # how many of the positions were drawn
        self._ids: Iterator[int] = iter(())  # drawn, but not yet returned

    def __next__(self) -> int:
        for id_ in self._ids:  # the next id of the last chunk, if it has one
            return id_
        if self._positions is None:
            # Of two ranks that start at position 4, rank 1 reads the positions 5 7 9 and so on.
            cursor = self._sampler._cursor
            self._positions = self._positions_from(cursor._next_start(from_start=True)[1])
            cursor._start_iteration(self)
        # A chunk is one id longer than all chunks before it together: 1, 2, 4, 8 ids and so on.
        start = self._num_drawn
        chunk = self._positions[start : min(2 * start + 1, start + MAX_IDS)]
        if not chunk:
            self._sampler._cursor._end_iteration(self)
            raise StopIteration
        self.check_epoch(self._sampler._cursor)
        ids = self._draw(self.epoch, np.arange(chunk.start, chunk.stop, chunk.step))
        self._num_drawn, self._ids = start + len(chunk), iter(ids.tolist())
        return next(self._ids)

    def position(self) -> int:
        """Return the position of the next id, which counts the ids that all ranks have read."""
        assert self._positions is not None  # the iteration has started
        # `length_hint` of an iterator over a list is the number of elements that remain.
        num_returned = self._num_drawn - length_hint(self._ids)
        if num_returned == len(self._positions):
            return len(self._sampler._unsharded)
        return self.step + num_returned * self._positions.step

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last id returned, as a state of the sampler."""
        cursor = self._sampler._cursor
        if self._positions is None:
            return cursor.stream.state_at(*cursor._next_start(from_start=True))
        return cursor.stream.state_at(self.epoch, self.position())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a state, and set the sampler's position to it, too."""
        self._sampler.load_state_dict(state)
        self._reset()
