"""Iterate over a sampler: the ids of an epoch, one by one, and the position of the next id."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from operator import length_hint
from typing import Any, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers._epochs import Epochs, normalise
from twinfeed.samplers.cursor import Cursor, SamplerCursor
from twinfeed.samplers.drawing.chunks import MAX_IDS
from twinfeed.samplers.processes import warn_unsharded
from twinfeed.samplers.traits import Samples, check_record_ids
from twinfeed.samplers.types import Int64s

_Stream = TypeVar("_Stream", bound="IdStream")


class IdStream(Samples, ABC):
    """Ids by (epoch, position), or by iteration for a plain `DataLoader(dataset, sampler=…)`.

    A sampler does not know what a training loop received, so a pass is an epoch from its first
    position, as for `BatchStream`:

    - The last id moves on to the next epoch.
    - A pass that was broken off begins the same epoch again.
    - The first pass after `load_state_dict` is the rest of the loaded epoch.
    - `set_epoch` says where the next pass begins. A running pass never changes.
    - The latest iterator moves the position, and has it as a state of its own. A loader that keeps
      the iterator's state with each batch, as `StatefulDataLoader`, resumes after that batch.
    """

    #: The only source of chance.
    seed: int = 0
    #: Whether `shard` was called.
    sharded: bool = False
    _fixed_order: bool = False  # whether every epoch has the same order, as in an evaluation
    _own_cursor: IdSamplerCursor | None = None  # for samplers without `super().__init__()`

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of ids of an epoch."""

    @property
    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """All that the ids depend on."""

    @abstractmethod
    def ids(self, epoch: SupportsIndex, positions: ArrayLike) -> Int64s:
        """Return the ids at these positions of an epoch."""

    def __copy__(self: _Stream) -> _Stream:
        stream = object.__new__(type(self))
        vars(stream).update(vars(self), _own_cursor=copy.copy(self._own_cursor))
        return stream

    @property
    def _whole(self) -> IdStream:
        """The stream of all ranks."""
        return self

    def _positions_from(self, start: int) -> range:
        """Return the positions of `_whole` that a pass from `start` on has."""
        return range(start, len(self))

    @property
    def _cursor(self) -> IdSamplerCursor:
        if self._own_cursor is None:
            # Of a copy: a cycle would keep large tables until the garbage collector runs. Set by
            # `vars`, as a sampler of one's own may be a frozen dataclass.
            vars(self)["_own_cursor"] = IdSamplerCursor(copy.copy(self._whole))
        cursor: IdSamplerCursor = vars(self)["_own_cursor"]
        return cursor

    def __iter__(self) -> Iterator[int]:
        """Yield the ids of a pass, as Python ints; nothing is drawn before the first `next`.

        Raises:
            TypeError: ids are no record ids, but views or uses of records.
        """
        check_record_ids(self, "sampler.ids(epoch, positions)")
        warn_unsharded(self)
        return IdIterator(self, self._cursor)

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Set the epoch of the next pass; a trainer calls this before each epoch.

        Between `load_state_dict` and the next id, setting the epoch of the state keeps its
        position: the next pass is the rest of that epoch.
        """
        self._cursor.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next id, and the fingerprint of the sampler, for JSON.

        The step of the state is a position of the sampler of all ranks. It counts the ids that were
        drawn: with workers, which draw ahead, save the state of a `StatefulDataLoader`, or of a
        loader of `twinfeed.loaders`.
        """
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next pass at the position of a state, of any rank and world size.

        This takes constant time.

        Raises:
            StateMismatchError: a state of another sampler.
        """
        self._cursor.load_state_dict(state)


class Positions(Epochs):
    """The positions of a sampler, as the steps of a stream with the sampler's fingerprint."""

    def __init__(self, sampler: IdStream) -> None:
        super().__init__(num_steps=len(sampler), size=len(sampler), seed=sampler.seed)
        self._sampler = sampler

    @property
    def fingerprint(self) -> dict[str, Any]:
        self._fingerprint = self._fingerprint or self._sampler.fingerprint
        return dict(self._fingerprint)


class IdSamplerCursor(SamplerCursor):
    """The cursor of a sampler that is iterated itself: it moves as ids are drawn.

    The ids of a pass do not move it one by one: `sync` asks the latest iterator for its position.
    """

    _latest: IdIterator | None

    def __init__(self, sampler: IdStream) -> None:
        super().__init__(Positions(sampler))

    def __getstate__(self) -> dict[str, Any]:
        self.sync()
        return super().__getstate__()

    def sync(self) -> None:
        """Move to the position of the latest iterator, unless something else set the epoch."""
        running = self._latest
        if running is not None:
            ended = running.sync()
            if self.epoch == running.pass_epoch:
                self.epoch, self.step = running.epoch, running.step
            if ended:
                self._latest = None

    def next_start(self) -> tuple[int, int]:
        """Return the (epoch, step) at which the next pass begins."""
        self.sync()
        return self.epoch, self.step if self._resuming else 0

    def start(self, iterator: IdIterator, *, empty: bool, fixed_order: bool) -> None:
        """Start the pass of an iterator, and set it as the iterator that moves the position.

        A pass is one iteration over the sampler; an `empty` pass has no ids.
        """
        epoch, _ = self.start_pass(from_start=True)
        self._latest = iterator
        if not (empty or fixed_order):  # a stored order may be looked at again and again
            self.count_pass(epoch, "use a loader of twinfeed.loaders")
        if not empty:
            self.advance()  # for its warning: the iterator has the position

    def state_dict(self) -> dict[str, Any]:
        self.sync()
        return super().state_dict()

    def set_epoch(self, epoch: SupportsIndex) -> None:
        self.sync()
        super().set_epoch(epoch)


class IdIterator(Cursor):
    """The ids of one pass of a sampler, as Python ints, drawn in chunks that grow."""

    def __init__(self, sampler: IdStream, cursor: IdSamplerCursor) -> None:
        super().__init__(cursor.stream)
        self._sampler, self._sampler_cursor = sampler, cursor
        self._clear()

    def _clear(self) -> None:
        """Set the iterator before the first id of a pass."""
        self._positions: range | None = None  # those of the pass
        self._drawn = 0  # how many of the positions were drawn
        self._ids: Iterator[int] = iter(())  # which were drawn, and not yet given

    def __iter__(self) -> IdIterator:
        return self

    def __next__(self) -> int:
        for id_ in self._ids:
            return id_
        positions = self._start_pass() if self._positions is None else self._positions
        start = self._drawn
        chunk = positions[start : min(2 * start + 1, start + MAX_IDS)]
        if not chunk:
            self._sampler_cursor.sync()
            raise StopIteration
        ids = self._sampler._whole.ids(
            self.pass_epoch, np.arange(chunk.start, chunk.stop, chunk.step)
        )
        self._drawn, self._ids = start + len(chunk), iter(ids.tolist())
        return next(self._ids)

    def _start_pass(self) -> range:
        """Start the pass, one iteration over the sampler, and return its positions."""
        self.pass_epoch, self._start = self._sampler_cursor.next_start()
        self._positions = self._sampler._positions_from(self._start)
        fixed_order = self._sampler._whole._fixed_order
        self._sampler_cursor.start(self, empty=not self._positions, fixed_order=fixed_order)
        return self._positions

    def sync(self) -> bool:
        """Set the position after the last id returned; return whether the pass has ended."""
        assert self._positions is not None
        count = self._drawn - length_hint(self._ids)
        ended = count == len(self._positions)
        step = len(self.stream) if ended else self._start + count * self._positions.step
        self.epoch, self.step = normalise(self.stream, self.pass_epoch, step)
        return ended

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last id returned, as a state of the sampler."""
        if self._positions is None:
            return self.stream.state_at(*self._sampler_cursor.next_start())
        self.sync()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a state, and let the sampler's epoch be that of the state."""
        self._sampler_cursor.load_state_dict(state)
        self._clear()
