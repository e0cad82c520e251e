"""The position (epoch, step) in a stream, and the iteration over a sampler without a loader."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, SupportsIndex, TypeVar

from twinfeed.samplers import validate
from twinfeed.samplers._epochs import Epochs, checked_position, normalise
from twinfeed.samplers.types import Int64s

_Sampler = TypeVar("_Sampler", bound="IteratedSampler[Any]")
_Cursor = TypeVar("_Cursor", bound="SamplerCursor")

_NO_PASSES = (0, 0)  # (epoch, consecutive passes over it) before any pass was counted


class Cursor:
    """The position (epoch, step) of the next batch of a stream, advanced as batches are received.

    A cursor starts at step 0 of epoch 0. After the last batch of an epoch the position is
    step 0 of the next epoch. An evaluation keeps no position between passes:

    - each pass begins at step 0, except the first pass after a state was loaded;
    - the last batch leaves the epoch as it is.

    >>> from twinfeed.samplers import BatchSampler, RandomSampler
    >>> from twinfeed.samplers.cursor import Cursor
    >>> cursor = Cursor(BatchSampler(RandomSampler(8, seed=0), batch_size=4))
    >>> cursor.start_pass()
    (0, 0)
    >>> cursor.advance(), cursor.advance()
    (False, True)
    >>> cursor.epoch, cursor.step
    (1, 0)
    """

    #: Epoch of the next batch.
    epoch: int
    #: Step of the next batch, in `[0, len(stream))`.
    step: int

    def __init__(self, stream: Epochs, /) -> None:
        self.stream = stream
        self.epoch = self.step = 0
        # The position that load_state_dict has set; None once a batch has been received after it.
        self._loaded: tuple[int, int] | None = None
        self._resuming = False  # whether the next pass starts in the middle of the loaded epoch
        self._resumed_epoch = -1  # the epoch of the latest pass after a state, until `set_epoch`
        # The epoch that `set_epoch` was called with; None after a pass has started.
        self._requested_epoch: int | None = None
        # The epoch of the last pass, and how many passes in a row have started at this epoch.
        self._passes_of_epoch = _NO_PASSES

    def start_pass(self, *, from_start: bool = False) -> tuple[int, int]:
        """Start a pass, which is one iteration over the stream; return its first (epoch, step).

        A pass starts at the cursor's position. With `from_start`, and for an evaluation, it starts
        at step 0 of the epoch, except for the first pass after `load_state_dict`, which resumes in
        the middle of the epoch.
        """
        if not self._resuming and (from_start or self.stream.evaluation):
            self.step = 0
        self._resuming, self._requested_epoch = False, None
        return self.epoch, self.step

    def count_pass(self, epoch: int, advice: str) -> None:
        """Count the consecutive passes (iterations over the stream) that start at the same epoch.

        Warn at the third pass of a training epoch: such a loop has probably forgotten `set_epoch`,
        and trains on the same batches again and again. The warning suggests `advice`.
        """
        last_epoch, count = self._passes_of_epoch
        count = count + 1 if epoch == last_epoch else 1
        self._passes_of_epoch = (epoch, count)
        # A second pass is no mistake: sanity checks, and Keras, draw a batch to inspect it.
        if count == 3 and not self.stream.evaluation:
            warnings.warn(
                f"iterations begin epoch {epoch} for the third time, and repeat its batches: call "
                f"set_epoch(epoch) before each iteration, or {advice}, which continues after the "
                f"batches that the loop received",
                stacklevel=4,
            )

    def _check_loaded_state(self) -> None:
        """Warn if batches are skipped or repeated, since `set_epoch` was called after a load.

        This is called at each batch, or at the start of an iteration over ids, and warns at the
        first call after a state was loaded. If the state is of the middle of an epoch, and then
        another epoch was set, the remaining batches of its epoch are skipped.
        """
        if self._loaded is None:
            return
        epoch, step = self._loaded
        self._loaded = None  # warn only once
        if self.stream.evaluation:
            return
        if step and epoch != self.epoch:
            warnings.warn(
                f"the last batches of epoch {epoch} are skipped: a state of its step {step} "
                f"was loaded, and then set_epoch({self.epoch}) was called. To train on them, "
                f"call set_epoch({epoch}), or do not call set_epoch after a state was loaded "
                f"(Lightning: save by ModelCheckpoint while fit runs)",
                stacklevel=3,
            )
        elif self.epoch < epoch:
            self._warn_of_ended_epoch(self.epoch, epoch)
        elif self.epoch == epoch:
            self._resumed_epoch = epoch

    def _warn_of_ended_epoch(self, requested_epoch: int, loaded_epoch: int) -> None:
        """Warn that a state was saved after the epoch that `set_epoch` was called with.

        At the end of epoch 2, the position of a state is step 0 of epoch 3. A loop that is resumed,
        counts epochs and calls `set_epoch(2)` trains on epoch 2 twice.
        """
        warnings.warn(
            f"set_epoch({requested_epoch}) was called, but the loaded state was saved after "
            f"the last batch of epoch {loaded_epoch - 1}, so an epoch comes twice: resume the "
            f"loop at epoch {loaded_epoch}, or count steps in place of epochs",
            stacklevel=4,
        )

    def advance(self) -> bool:
        """Move the position to the next batch; return whether the epoch has ended."""
        self._check_loaded_state()
        self.epoch, self.step = normalise(self.stream, self.epoch, self.step + 1)
        return self.step == 0

    def end(self) -> None:
        """End a pass, complete or not: an evaluation goes back to step 0 of its epoch."""
        if self.stream.evaluation:
            self.step = 0

    def seek(self, epoch: SupportsIndex, step: SupportsIndex) -> None:
        """Set the position to this step of an epoch; step `len(stream)` is the end of the epoch."""
        self.epoch, self.step = checked_position(self.stream, epoch, step)
        self._loaded = self._requested_epoch = None
        self._resuming, self._passes_of_epoch = False, _NO_PASSES

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Set the position to step 0 of an epoch.

        Between `load_state_dict` and the next batch, setting the epoch of the loaded state keeps
        the step of the state: trainers set the epoch after they have loaded a state, and this must
        not repeat the first batches of the epoch.
        """
        epoch = validate.integer("epoch", epoch, minimum=0, below=self.stream.max_epochs)
        self.epoch, self.step, self._requested_epoch = epoch, 0, epoch
        if self._loaded is not None and self._loaded[0] == epoch:
            self.step = self._loaded[1]
        # The caller chooses the epoch, so a repetition of it is no mistake: do not warn.
        self._passes_of_epoch = _NO_PASSES

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the fingerprint of the stream, as a small dict for JSON."""
        return self.stream.state_at(self.epoch, self.step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position to that of a state, which any rank of any world size may have saved.

        The next pass (iteration over the stream) resumes there.

        Raises:
            StateMismatchError: a state of another stream.
        """
        position = self.stream.position_of(state)
        # `set_epoch` may have been called before: torchdata loads a state after it.
        requested = self._requested_epoch
        if requested is not None and position == (requested + 1, 0) and not self.stream.evaluation:
            self._warn_of_ended_epoch(requested, position[0])
        self.seek(*position)
        self._loaded, self._resuming, self._resumed_epoch = position, True, -1


class SamplerCursor(Cursor):
    """The cursor of a sampler that is iterated without a loader: it advances as batches are drawn.

    Each pass (iteration over the sampler) starts at step 0. Only the latest pass moves the cursor.
    """

    def __init__(self, stream: Epochs, /) -> None:
        super().__init__(stream)
        self._latest_pass: Cursor | None = None  # the position of the latest pass, until it ends

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without the running pass."""
        return {**vars(self), "_latest_pass": None}

    def iterate(
        self, draw: Callable[[int, int], Iterator[Int64s]]
    ) -> Iterator[tuple[int, int, Int64s]]:
        """Yield (epoch, step, ids) for each batch of one pass, which is one iteration.

        `draw(epoch, step)` yields the ids of the batches from this step to the end of the epoch.
        Nothing is drawn before the first `next`. The pass starts at step 0, or at the step of a
        state that was just loaded.
        """
        epoch, start = self.start_pass(from_start=True)
        # Warn if this is the third pass in a row over the same epoch; the text is the advice.
        self.count_pass(epoch, "use a loader of twinfeed.loaders")
        pass_position = self._latest_pass = Cursor(self.stream)
        pass_position.seek(epoch, start)
        try:
            for step, ids in enumerate(draw(epoch, start), start):
                # Advance before the batch is yielded: a loop that takes exactly len() batches never
                # resumes this generator.
                self._advance_with(pass_position)
                yield epoch, step, ids
        finally:  # also if the loop is left early
            if self._latest_pass is pass_position:
                self._latest_pass = None
                self.end()  # moves an evaluation back to step 0; training keeps its position

    def _advance_with(self, pass_position: Cursor) -> None:
        """Advance the position of a pass, and the sampler's position (`self`) if they are the same.

        The sampler's position is where the next pass starts. It no longer advances with this pass
        if another pass was started, another epoch was set, or a state was loaded.
        """
        is_same = self._latest_pass is pass_position and self.epoch == pass_position.epoch
        pass_position.advance()
        if is_same:
            self.advance()

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Set the epoch of the next pass (iteration over the stream), which starts at its step 0.

        If a pass over the same epoch is running, its position is kept. After a pass that began with
        a loaded state, warn if the epoch is none that comes after it: a host that counts its passes
        from 0 trains on epochs of the state again.
        """
        epoch = validate.as_int("epoch", epoch)
        if self._latest_pass is not None and self._latest_pass.epoch == epoch:
            self.seek(epoch, self._latest_pass.step)
            return
        super().set_epoch(epoch)
        if epoch <= self._resumed_epoch:
            warnings.warn(
                f"set_epoch({epoch}) was called after the pass that resumed epoch "
                f"{self._resumed_epoch}, so epoch {epoch} comes again: count epochs from that of "
                f"the state, or call no set_epoch (Fabric counts its passes from 0: leave the "
                f"DataLoader out of setup_dataloaders, and call fabric.to_device(batch))",
                stacklevel=3,
            )
        self._resumed_epoch = -1  # warn only once

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next pass at the position of a state; a running pass no longer moves `self`."""
        super().load_state_dict(state)
        self._latest_pass = None


class IteratedSampler(ABC, Generic[_Cursor]):
    """Base of samplers that can be iterated without a loader, with a state: each has a cursor."""

    _own_cursor: Any = None  # created when it is first used: most samplers are never iterated

    @abstractmethod
    def _new_cursor(self) -> _Cursor:
        """Return a cursor (a position) at the start of this sampler's stream.

        A subclass must give the cursor a copy of the sampler. If the cursor referred to the sampler
        itself, which refers to the cursor, this reference cycle would keep large tables in memory
        until the garbage collector runs.
        """

    @property
    def _cursor(self) -> _Cursor:
        """The position of the iteration over this sampler, created when it is first used."""
        if self._own_cursor is None:
            # Set through `vars`: a user's sampler may be a frozen dataclass.
            vars(self)["_own_cursor"] = self._new_cursor()
        cursor: _Cursor = self._own_cursor
        return cursor

    def __copy__(self: _Sampler) -> _Sampler:
        """Return a copy at the same position, which then advances independently."""
        sampler = object.__new__(type(self))
        vars(sampler).update(vars(self), _own_cursor=copy.copy(self._own_cursor))
        return sampler

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Set the epoch of the next iteration; a trainer calls this before each epoch.

        The iteration starts at the beginning of the epoch. But after `load_state_dict` with a state
        from the middle of the same epoch, it resumes there, and yields the rest of the epoch.
        """
        self._cursor.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch or id, and the sampler's fingerprint, for JSON.

        The step of the state is the number of batches of the epoch that were drawn. For a sampler
        of ids, it is the number of ids that all ranks together have drawn. Workers draw more than
        the training loop has received: with workers, save the state of a `StatefulDataLoader` or of
        a loader of `twinfeed.loaders`.
        """
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iteration at the position of a state, which any rank may have saved.

        This takes constant time.

        Raises:
            StateMismatchError: a state of other data, parameters or version; every differing field
                is named.
        """
        self._cursor.load_state_dict(state)
