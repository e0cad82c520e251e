"""Iterate over a sampler: the ids of an epoch, one by one, and the position of the next id."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from operator import length_hint
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers._epochs import Epochs, normalise
from twinfeed.samplers.cursor import Cursor, IteratedSampler, SamplerCursor
from twinfeed.samplers.drawing.chunks import MAX_IDS
from twinfeed.samplers.processes import warn_unsharded
from twinfeed.samplers.traits import Samples, check_record_ids
from twinfeed.samplers.types import Int64s


class IdStream(IteratedSampler["IdSamplerCursor"], Samples):
    """Ids by (epoch, position), or by iteration for a plain `DataLoader(dataset, sampler=…)`.

    A sampler does not see which ids a training loop received, so a pass is an epoch from its first
    position, as for `BatchStream`:

    - The last id moves on to the next epoch.
    - A pass that was broken off begins the same epoch again.
    - The first pass after `load_state_dict` is the rest of the loaded epoch.
    - `set_epoch` says where the next pass begins. A running pass never changes.
    - The latest iterator moves the position, and has it as a state of its own. A loader that keeps
      the iterator's state with each batch, as `StatefulDataLoader`, resumes after that batch.
    """

    #: The seed of all random choices.
    seed: int = 0
    #: Whether `shard` was called.
    sharded: bool = False
    _fixed_order: bool = False  # whether every epoch has the same order, as in an evaluation

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

    @property
    def epoch(self) -> int:
        """Epoch of the next id that iterating draws."""
        self._cursor.sync()
        return self._cursor.epoch

    @property
    def _unsharded(self) -> IdStream:
        """The sampler of all ranks, if this is the sampler of one rank."""
        return self

    def _positions_from(self, start: int) -> range:
        """Return the positions of an epoch that this sampler reads, from position `start` on.

        Here it reads all positions. The sampler of one of n ranks (`RankSampler`) overrides this,
        and reads every n-th position.
        """
        return range(start, len(self))

    def _new_cursor(self) -> IdSamplerCursor:
        return IdSamplerCursor(copy.copy(self._unsharded))

    def __iter__(self) -> Iterator[int]:
        """Yield the ids of an epoch, as Python ints; nothing is drawn before the first `next`.

        Raises:
            TypeError: ids are not record ids, but views or uses of records.
        """
        check_record_ids(self, "sampler.ids(epoch, positions)")
        warn_unsharded(self)
        return IdIterator(self, self._cursor)


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
    """The cursor of a sampler of ids: the position of the latest iterator over the sampler.

    It is not moved by each id. `sync` asks the iterator for its position when it is needed.
    """

    _latest_pass: IdIterator | None

    def __init__(self, sampler: IdStream) -> None:
        super().__init__(Positions(sampler))

    def __getstate__(self) -> dict[str, Any]:
        self.sync()
        return super().__getstate__()

    def sync(self) -> None:
        """Move to the position of the latest iterator over the sampler, if one is running.

        The iterator does not move this cursor with each id, which would be slow.
        """
        iterator = self._latest_pass  # None when its last id was returned
        if iterator is not None:
            is_exhausted = iterator.update_position()
            # The epochs differ if `set_epoch` was called since the iteration started: then stay.
            if self.epoch == iterator.start_epoch:
                self.epoch, self.step = iterator.epoch, iterator.step
            if is_exhausted:
                self._latest_pass = None

    def next_start(self) -> tuple[int, int]:
        """Return the (epoch, position) at which the next iteration over the sampler starts."""
        self.sync()
        return self.epoch, self.step if self._resuming else 0

    def start_iteration(self, iterator: IdIterator, *, may_repeat: bool) -> None:
        """Start a pass, which is one iteration over the sampler by this iterator.

        This cursor is the position of the sampler. From now on `sync` copies the position of the
        iterator to it. Warn about two probable mistakes: the third pass in a row over the same
        epoch, unless `may_repeat`; and another epoch than that of a loaded state.
        """
        epoch, _ = self.start_pass(from_start=True)
        self._latest_pass = iterator
        if not may_repeat:
            # Warn at the third pass over this epoch; the text is the advice of the warning.
            self.count_pass(epoch, "use a loader of twinfeed.loaders")
        self._check_loaded_state()

    def state_dict(self) -> dict[str, Any]:
        self.sync()  # the iterator may be ahead of this cursor, and the state is of the iterator
        return super().state_dict()

    def set_epoch(self, epoch: SupportsIndex) -> None:
        self.sync()
        super().set_epoch(epoch)


class IdIterator(Cursor):
    """An iterator over one epoch's ids of a sampler, as Python ints, with a state.

    The ids are drawn in chunks: one id at first, then twice as many each time.
    """

    def __init__(self, sampler: IdStream, cursor: IdSamplerCursor) -> None:
        super().__init__(cursor.stream)
        self._sampler, self._sampler_cursor = sampler, cursor
        self._reset()

    def _reset(self) -> None:
        """Set the iterator to before its first id."""
        # The positions of the epoch that it reads; None before the first id.
        self._positions: range | None = None
        self._num_drawn = 0  # how many of the positions were drawn
        self._ids: Iterator[int] = iter(())  # drawn, but not yet returned

    def __iter__(self) -> IdIterator:
        return self

    def __next__(self) -> int:
        for id_ in self._ids:  # the next id of the last chunk, if it has one
            return id_
        positions = self._start() if self._positions is None else self._positions
        # A chunk is one id longer than all chunks before it together: 1, 2, 4, 8 ids and so on.
        start = self._num_drawn
        chunk = positions[start : min(2 * start + 1, start + MAX_IDS)]
        if not chunk:
            self._sampler_cursor.sync()
            raise StopIteration
        chunk_positions = np.arange(chunk.start, chunk.stop, chunk.step)
        ids = self._sampler._unsharded.ids(self.start_epoch, chunk_positions)
        self._num_drawn, self._ids = start + len(chunk), iter(ids.tolist())
        return next(self._ids)

    def _start(self) -> range:
        """Start the iteration; return the positions of the epoch that it reads.

        It starts at position 0 of an epoch, or in the middle if a state was loaded. The sampler of
        one of several ranks skips the positions of other ranks: if all ranks start at position 4,
        rank 1 of 2 reads the positions 5 7 9 and so on.
        """
        cursor = self._sampler_cursor  # the position of the sampler
        self.start_epoch, self._start_position = cursor.next_start()
        positions = self._positions = self._sampler._positions_from(self._start_position)
        # To repeat an epoch is no mistake if every epoch has the same order, or if it has no ids.
        # `_unsharded` is the sampler of all ranks.
        may_repeat = self._sampler._unsharded._fixed_order or not positions
        # From now on, the sampler has the position of this iterator.
        cursor.start_iteration(self, may_repeat=may_repeat)
        return positions

    def update_position(self) -> bool:
        """Set `epoch` and `step` to the position of the next id; return whether no id remains.

        They are not updated with each id, which would be slow. `step` counts the ids of the epoch
        that all ranks together have read. If this is one of two ranks, and started at step 0, it
        reads the positions 0 2 4 and so on: after 3 ids it is at step 6.
        """
        assert self._positions is not None  # the iteration has started
        # `_ids` is an iterator over the ids that were drawn, but not yet returned. `length_hint`
        # of an iterator over a list is the number of elements that remain.
        num_returned = self._num_drawn - length_hint(self._ids)
        is_exhausted = num_returned == len(self._positions)
        step = self._start_position + num_returned * self._positions.step
        if is_exhausted:
            step = len(self.stream)  # the end of the epoch, also if ids were left out
        # The end of an epoch becomes step 0 of the next epoch.
        self.epoch, self.step = normalise(self.stream, self.start_epoch, step)
        return is_exhausted

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last id returned, as a state of the sampler.

        Before the first id, it is the position at which the sampler will start an iteration.
        """
        if self._positions is None:  # before the first id
            return self.stream.state_at(*self._sampler_cursor.next_start())
        self.update_position()  # `__next__` does not update `epoch` and `step`
        return self.stream.state_at(self.epoch, self.step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a state, and set the sampler's position to it, too."""
        self._sampler_cursor.load_state_dict(state)
        self._reset()
