"""Streams of ids by (epoch, step), their states, and `Cursor`: one position in a stream."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Self, SupportsIndex

from twinfeed.samplers import validate
from twinfeed.samplers.processes import warn
from twinfeed.samplers.state import (
    STATE_VERSION,
    StateMismatchError,
    compare_fingerprints,
    fields_before,
    json_value,
)
from twinfeed.samplers.traits import SampleSpace

MAX_IDS = 1 << 15
"""The most ids that are drawn in one call."""

_NO_PASSES = (0, 0)  # (epoch, consecutive passes over it) before any pass was counted


class Stream(SampleSpace, ABC):
    """Ids by (epoch, step), with states; and by iteration without a loader, at one position.

    A step is a batch of a `BatchStream`, or a position of a `Sampler`.
    """

    #: The seed of all random choices.
    seed: int = 0
    #: All on which the stream depends, except the seed: these are fields of the fingerprint.
    parameters: Mapping[str, Any]
    #: Whether each pass is whole: an evaluation, which keeps no position between passes.
    evaluation: bool = False
    #: Whether `shard` was called: `shard(0, 1)` says that every rank is meant to see all.
    sharded: bool = False
    _fixed_order: bool = False  # whether every epoch has the same order, as in an evaluation
    _max_epochs: int  # below it, the ids of all epochs can be counted in int64
    _replacements: Any = None  # the `Replacements` of `replaced`
    _own_cursor: Cursor | None = None  # created when it is first used: most are never iterated

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of steps of an epoch."""

    @abstractmethod
    def _fields(self) -> dict[str, Any]:
        """Return the fields of the fingerprint."""

    @property
    def _unsharded(self) -> Stream:
        """The stream of which states are: for a rank of a `Sampler`, the sampler of all ranks."""
        return self

    @property
    def fingerprint(self) -> dict[str, Any]:
        """All that the ids depend on: class, stream version, seed, parameters, array digests.

        To hash large arrays takes long, so it is done once for a stream and its copies.
        """
        # Copies refer to the same dict, which is filled in place.
        fingerprint: dict[str, Any] = vars(self).setdefault("_fingerprint", {})
        if not fingerprint:
            fingerprint.update(self._fields())
            if self._replacements is not None:
                fingerprint.update(json_value(self._replacements.parameters))
        return dict(fingerprint)

    def _as_ints(self, epoch: SupportsIndex, step: SupportsIndex, end: int) -> tuple[int, int]:
        """Return epoch and step as ints. Raise IndexError unless the step is in `[0, end)`."""
        if type(epoch) is not int or type(step) is not int:
            epoch, step = validate.as_int("epoch", epoch), validate.as_int("step", step)
        if not 0 <= epoch < self._max_epochs:
            raise IndexError(f"epoch must be in [0, {self._max_epochs}), got {epoch}")
        if not 0 <= step < end:
            steps = validate.counted(len(self), "step")
            raise IndexError(f"step {step} of epoch {epoch}: an epoch has {steps}")
        return epoch, step

    def _position(self, epoch: SupportsIndex, step: SupportsIndex) -> tuple[int, int]:
        """Return a position as ints, checked; the end of an epoch is step 0 of the next, or of this
        one in an evaluation.
        """
        epoch, step = self._as_ints(epoch, step, len(self) + 1)
        if step == len(self) > 0:
            return (epoch if self.evaluation else epoch + 1), 0
        return epoch, step

    def state_at(self, epoch: SupportsIndex, step: SupportsIndex) -> dict[str, Any]:
        """Return the state to resume from at this step; `len(self)` is the end of the epoch.

        A state has the position and a fingerprint: the parameters on which the batches depend. A
        parameter may change at a training step, as `k={0: 2, 1000: 3}` does at step 1000. A state
        at an earlier step does not have this change, so that a user may still alter it.
        """
        epoch, step = self._position(epoch, step)
        return {
            "version": STATE_VERSION,
            "epoch": epoch,
            "step": step,
            # Without changes of parameters at this training step or a later one.
            "fingerprint": fields_before(self.fingerprint, epoch * len(self) + step),
        }

    def position_of(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Return the (epoch, step) of a state, after checking that it is of this stream.

        Raises:
            StateMismatchError: a state of other data, other parameters or a newer version.
        """
        is_state = isinstance(state, Mapping) and {"version", "epoch", "step"} <= set(state)
        if not is_state or not isinstance(state.get("fingerprint"), Mapping):
            raise StateMismatchError(
                f"the state must be what state_dict gave, as checkpoint['loader'], "
                f"got {state!r:.99}"
            )
        version, saved = state["version"], state["fingerprint"]
        if version != STATE_VERSION:
            problem = f"the state has version {version!r}, this library reads {STATE_VERSION}"
            raise StateMismatchError(problem)
        epoch = validate.integer("epoch of the state", state["epoch"], minimum=0)
        step = validate.integer("step of the state", state["step"], minimum=0)
        # Changes of a schedule after the state's step may differ: they have changed no batch yet.
        now = epoch * len(self) + step
        compare_fingerprints(fields_before(saved, now), fields_before(self.fingerprint, now))
        validate.integer("epoch of the state", epoch, minimum=0, below=self._max_epochs)
        if step >= max(1, len(self)):
            raise StateMismatchError(f"the state is at step {step}, an epoch has {len(self)}")
        return epoch, step

    @property
    def _cursor(self) -> Cursor:
        """The position of the iteration over this stream, up to date."""
        cursor = self._own_cursor
        if cursor is None:
            # Of a copy: a reference cycle would keep large tables until the garbage collector runs.
            cursor = Cursor(copy.copy(self._unsharded))
            # Set through `vars`: a user's sampler may be a frozen dataclass.
            vars(self)["_own_cursor"] = cursor
        cursor._sync()
        return cursor

    def __copy__(self) -> Self:
        """Return a copy at the same position, which then advances independently."""
        stream = object.__new__(type(self))
        vars(stream).update(vars(self), _own_cursor=copy.copy(self._own_cursor))
        return stream

    @property
    def epoch(self) -> int:
        """Epoch of the next batch or id that iterating draws."""
        return self._cursor.epoch

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


class StreamPass:
    """One iteration over a stream without a loader: an epoch, or the rest of a loaded epoch."""

    #: The epoch that it reads.
    epoch: int
    #: The step at which it starts; a `BatchStream` moves it.
    step: int
    _is_warned = False

    def check_epoch(self, cursor: Cursor) -> None:
        """Warn once if it goes on after the position was set to another epoch."""
        stream = cursor.stream
        may_repeat = stream.evaluation or stream._fixed_order
        if cursor.epoch != self.epoch and not (self._is_warned or may_repeat):
            self._is_warned = True
            warn(
                f"an iteration over epoch {self.epoch} goes on, and the position is in epoch "
                f"{cursor.epoch} now: call set_epoch before the iteration begins (state_dict of a "
                f"StatefulDataLoader begins one, and so Accelerate's use_stateful_dataloader)"
            )

    def position(self) -> int:
        """Return the step after the last one drawn: at its end, the number of steps of an epoch."""
        return self.step


class Cursor:
    """The position (epoch, step) of the next batch of a stream, moved by what was received.

    A cursor starts at step 0 of epoch 0. After the last batch of an epoch the position is
    step 0 of the next epoch. An evaluation keeps no position between passes:

    - each pass begins at step 0, except the first pass after a state was loaded;
    - the last batch leaves the epoch as it is.

    >>> from twinfeed.samplers import BatchSampler, Cursor, RandomSampler
    >>> cursor = Cursor(BatchSampler(RandomSampler(8, seed=0), batch_size=4))
    >>> cursor.start_pass()
    (0, 0)
    >>> cursor.received(), cursor.received()
    (False, True)
    >>> cursor.epoch, cursor.step
    (1, 0)
    """

    #: Epoch of the next batch.
    epoch: int
    #: Step of the next batch, in `[0, len(stream))`.
    step: int

    def __init__(self, stream: Stream, /) -> None:
        self.stream = stream
        self.epoch = self.step = 0
        self._num_steps = len(stream)
        # Epochs of which the loop has received a batch, since a loader has loaded a state.
        self.received_epochs: set[int] = set()
        # The position that load_state_dict has set; None once a batch has been received after it.
        self._loaded: tuple[int, int] | None = None
        self._resuming = False  # whether the next pass starts in the middle of the loaded epoch
        self._resumed_epoch = -1  # the epoch of the latest pass after a state, until `set_epoch`
        # The epoch of the last pass, and how many passes in a row have started at this epoch.
        self._passes_of_epoch = _NO_PASSES
        # The latest iteration without a loader, until it ends: this position is the one it has.
        self._latest_pass: StreamPass | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without the running pass."""
        self._sync()
        return {**vars(self), "_latest_pass": None}

    def _next_start(self, *, from_start: bool = False) -> tuple[int, int]:
        """Return the (epoch, step) at which the next pass starts; see `start_pass`."""
        whole = (from_start or self.stream.evaluation) and not self._resuming
        return self.epoch, 0 if whole else self.step

    def start_pass(self, *, from_start: bool = False) -> tuple[int, int]:
        """Start a pass, which is one iteration over the stream; return its first (epoch, step).

        A pass starts at the cursor's position. With `from_start`, and for an evaluation, it starts
        at step 0 of the epoch, except for the first pass after `load_state_dict`, which resumes in
        the middle of the epoch.
        """
        self.epoch, self.step = self._next_start(from_start=from_start)
        self._resuming = False
        return self.epoch, self.step

    def _start_iteration(self, iteration: StreamPass) -> None:
        """Start a pass without a loader, which has the position from now on: see `_sync`."""
        iteration.epoch, iteration.step = self.start_pass(from_start=True)
        self.count_pass(self.epoch, "use a loader of twinfeed.loaders")
        if self._check_loaded_state():
            self._resumed_epoch = self.epoch
        self._latest_pass = iteration

    def _sync(self) -> None:
        """Move to the position of the latest iteration without a loader, if one is running: only
        when it is needed, not with each id.
        """
        iteration = self._latest_pass
        if iteration is not None:
            step = iteration.position()
            # The epochs differ if `set_epoch` was called since the iteration started: then stay.
            if self.epoch == iteration.epoch:
                self.epoch, self.step = self.stream._position(iteration.epoch, step)
            if step == self._num_steps:
                self._latest_pass = None

    def _end_iteration(self, iteration: StreamPass) -> None:
        """End a pass without a loader, complete or not, unless a later one has the position."""
        self._sync()
        if self._latest_pass is iteration:
            self._latest_pass = None
            self.end()

    def count_pass(self, epoch: int, advice: str) -> None:
        """Count the consecutive passes that start at the same epoch, and warn at the third of a
        training: such a loop has probably forgotten `set_epoch`.
        """
        last_epoch, count = self._passes_of_epoch
        count = count + 1 if epoch == last_epoch else 1
        self._passes_of_epoch = (epoch, count)
        may_repeat = self.stream.evaluation or self.stream._fixed_order or not self._num_steps
        # A second pass is no mistake: sanity checks, and Keras, draw a batch to inspect it.
        if count == 3 and not may_repeat:
            warn(
                f"iterations begin epoch {epoch} for the third time, and repeat its batches: call "
                f"set_epoch(epoch) before each iteration, or {advice}, which continues after the "
                f"batches that the loop received"
            )

    def _check_loaded_state(self) -> bool:
        """Warn if `set_epoch` after a load skips or repeats batches; return if the epoch is loaded.
        Only the first call after a load does this.
        """
        (epoch, step), self._loaded = self._loaded or (-1, 0), None  # warn only once
        if self.stream.evaluation:
            return False
        if step and epoch != self.epoch:
            warn(
                f"the last batches of epoch {epoch} are skipped: a state of its step {step} "
                f"was loaded, and then set_epoch({self.epoch}) was called. To train on them, "
                f"call set_epoch({epoch}), or do not call set_epoch after a state was loaded "
                f"(Lightning: save by ModelCheckpoint while fit runs)"
            )
        elif self.epoch < epoch:
            _warn_of_repeated_epoch(self.epoch, epoch)
        return epoch == self.epoch

    def received(self) -> bool:
        """Count a batch that the loop has received; return whether it is the last of its epoch."""
        if self._loaded is not None:
            self._check_loaded_state()
        self.received_epochs.add(self.epoch)
        self.step += 1
        if self.step == self._num_steps:
            self.epoch, self.step = self.epoch + (not self.stream.evaluation), 0
        return self.step == 0

    def end(self) -> None:
        """End a pass, complete or not: an evaluation goes back to step 0 of its epoch."""
        if self.stream.evaluation:
            self.step = 0

    def seek(self, epoch: SupportsIndex, step: SupportsIndex) -> None:
        """Set the position to this step of an epoch; step `len(stream)` is the end of the epoch."""
        self.epoch, self.step = self.stream._position(epoch, step)
        self._loaded, self._resuming, self._passes_of_epoch = None, False, _NO_PASSES

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Set the position to step 0 of an epoch.

        Between `load_state_dict` and the next batch, setting the epoch of the loaded state keeps
        the step of the state: trainers set the epoch after they have loaded a state, and this must
        not repeat the first batches of the epoch.

        Without a loader, a running pass over the same epoch keeps its position. After a pass that
        began with a loaded state, warn if the epoch is none that comes after it: a host that counts
        its passes from 0 trains on epochs of the state again.
        """
        epoch = validate.integer("epoch", epoch, minimum=0, below=self.stream._max_epochs)
        if self._latest_pass is not None and self._latest_pass.epoch == epoch:
            self.seek(epoch, self._latest_pass.position())
            return
        self.epoch, self.step = epoch, 0
        if self._loaded is not None and self._loaded[0] == epoch:
            self.step = self._loaded[1]
        # The caller chooses the epoch, so a repetition of it is no mistake: do not warn.
        self._passes_of_epoch = _NO_PASSES
        if epoch <= self._resumed_epoch:
            _warn_of_repeated_epoch(epoch, self._resumed_epoch)
        self._resumed_epoch = -1  # warn only once

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the fingerprint of the stream, as a small dict for JSON."""
        return self.stream.state_at(self.epoch, self.step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position to that of a state, which any rank of any world size may have saved.

        The next pass (iteration over the stream) resumes there. A running one without a loader no
        longer moves the position.

        Raises:
            StateMismatchError: a state of another stream.
        """
        self.seek(*self.stream.position_of(state))
        self._loaded, self._resumed_epoch, self._latest_pass = (self.epoch, self.step), -1, None
        self.resume_here()

    def resume_here(self) -> None:
        """Let the next pass start at this step; of an evaluation, too."""
        self._resuming = True


def _warn_of_repeated_epoch(epoch: int, loaded_epoch: int) -> None:
    """Warn that an epoch comes again, which a loaded state has left behind."""
    warn(
        f"set_epoch({epoch}) was called, but a state of epoch {loaded_epoch} was loaded, so an "
        f"epoch comes again: count epochs from that of the state, or call no set_epoch (Fabric "
        f"counts its passes from 0: leave the DataLoader out of setup_dataloaders, and call "
        f"fabric.to_device(batch))"
    )


def steps_per_draw(batch_size: int, /) -> int:
    """Return how many steps are drawn in one call: as many as have `MAX_IDS` ids, at least one."""
    return max(1, MAX_IDS // max(1, batch_size))


def growing_ranges(start: int, stop: int, max_size: int, /) -> Iterator[tuple[int, int]]:
    """Yield ranges of steps that grow up to `max_size` steps, so that the first batch comes soon.

    >>> list(growing_ranges(0, 10, 4))
    [(0, 1), (1, 3), (3, 7), (7, 10)]
    """
    size = 1
    while start < stop:
        yield start, min(start + size, stop)
        start, size = start + size, min(2 * size, max_size)
