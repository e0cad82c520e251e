"""`Run`: one position in a stream, moved by what was received, whoever iterates."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NamedTuple, SupportsIndex

from twinfeed.samplers import BatchStream
from twinfeed.samplers.processes import warn
from twinfeed.samplers.stream import Cursor

Order = Literal["unchecked"]
"""The user vouches that element n of a dataset is batch n of the loader: nothing checks it."""

# Frameworks begin passes in threads of their own. All runs share a lock, as locks do not pickle.
_LOCK = threading.Lock()

_PEEKING = -1  # the generation of passes that change no position


class PassStart(NamedTuple):
    """The first batch of a framework's pass, and the generation in which the pass was started."""

    epoch: int
    step: int
    generation: int


class Run(Cursor):
    """The position of a loader. Loops and trainers differ only in who says what was received.

    - A loop over the loader counts each batch that it gets, by `received`.
    - A framework that iterates over a dataset of the loader does not say what it received. Its
      pass, one iteration, runs to the end of its epoch: it starts where `start_external` says, and
      `finish_external` moves the position to the next epoch. A pass that is abandoned before its
      end, as by `next(iter(dataset))`, does not change the position.
    - A caller that sees which batches were trained on, such as a Keras callback, may track the
      position, from `track_from` to `stop_tracking`. The first pass then starts where the caller
      says, and each later pass where the previous pass ended. Only `advance_to` changes the
      position.
    - While `peeking` is true, a pass has the whole epoch and does not change the position. The
      caller sets this for a validation.
    - `reshardable`: whether a strategy may divide the batches. False in a loop over the loader.

    >>> from twinfeed.samplers import BatchSampler, SequentialSampler
    >>> sampler = BatchSampler(SequentialSampler(8), batch_size=4)
    >>> run = Run(sampler, advice="call set_epoch")
    >>> run.finish_external(run.start_external())
    >>> run.start_external()[:2]
    (1, 0)
    >>> run.track_from(1, 1)
    >>> run.finish_external(run.start_external())
    >>> run.advance_to(1, 2)
    >>> run.start_external()[:2]
    (2, 0)
    >>> run.received(), run.received(), run.epoch
    (False, True, 3)
    """

    #: Passes that were refused since a file is imported for its feed alone; else None.
    refused: ClassVar[int | None] = None

    def __init__(self, stream: BatchStream, /, *, advice: str) -> None:
        super().__init__(stream)
        self._advice = advice  # how to iterate so that batches are counted, for a warning
        self.position_was_set = False  # by set_epoch or load_state_dict
        self._loaded_position = 0, 0  # the (epoch, step) that load_state_dict set
        self._warned_of_repeat_or_skip = False  # set_epoch warns only once
        self._generation = 0  # rises when tracking starts or stops
        self._reset_tracking()

    def _reset_tracking(self) -> None:
        """Note that no caller tracks the position."""
        # The (epoch, step) at which the next pass starts, while a caller tracks the position, from
        # `track_from` to `stop_tracking`; otherwise None.
        self._tracked_start: tuple[int, int] | None = None
        self._latest_start: tuple[int, int] | None = None  # where the latest pass started
        self.peeking = False
        self.reshardable = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state of a copy or a pickle, which no caller tracks."""
        vars(self).update(state)
        self._reset_tracking()

    @staticmethod
    def check_may_start() -> None:
        """Raise SystemExit, which `except Exception` does not catch, if no pass may start."""
        if Run.refused is not None:
            Run.refused += 1
            raise SystemExit

    def start_pass(self, *, from_start: bool = False) -> tuple[int, int]:
        """Start a pass of a loop, unless no pass may start; see `Cursor.start_pass`."""
        self.check_may_start()
        return super().start_pass(from_start=from_start)

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Set the position to an epoch; see `Cursor.set_epoch`."""
        previous_epoch, step = self.epoch, self.step
        super().set_epoch(epoch)
        self.position_was_set = True
        if not self.stream.evaluation:
            self._warn_of_repeat_or_skip(previous_epoch, step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position to that of a state; see `Cursor.load_state_dict`."""
        super().load_state_dict(state)
        self.position_was_set = True
        self.received_epochs.clear()
        self._loaded_position = self.epoch, self.step

    def _warn_of_repeat_or_skip(self, previous_epoch: int, step: int) -> None:
        """Warn, once, if `set_epoch` has repeated an epoch, or skipped the rest of the previous
        one, which was at `step`.
        """
        problem = ""
        loaded_epoch, loaded_step = self._loaded_position
        # A host that counts its passes from 0 names an epoch before that of the state it resumed.
        is_before_state = bool(self.received_epochs) and self.epoch < loaded_epoch
        if self.step == 0 and (self.epoch in self.received_epochs or is_before_state):
            problem = (
                f"set_epoch starts epoch {self.epoch} again, so the same batches come again: "
                f"give each training a loader of its own, and count epochs from a loaded state's"
            )
        elif previous_epoch in self.received_epochs and step and self.epoch != previous_epoch:
            num_skipped = len(self.stream) - step
            advice = f"for epochs of {step} batches set batches_per_epoch={step} of the sampler"
            # Perhaps the trainer has counted batches of the loaded state. For example, epochs have
            # 10 batches, and the state was saved after 2 batches of epoch 1. The trainer starts
            # epoch 2, but counts its first batch as number 3. So it ends epoch 2 after 8 batches,
            # and 2 are skipped: as many as `loaded_step`. It has received none of epoch 1.
            if num_skipped == loaded_step and loaded_epoch not in self.received_epochs:
                advice = (
                    f"the trainer counts the {num_skipped} batches of epoch {loaded_epoch} that "
                    f"came before the loaded state: resume from a checkpoint saved while fit ran"
                )
            problem = (
                f"{num_skipped} of {len(self.stream)} batches of epoch {previous_epoch} were "
                f"skipped, as set_epoch started epoch {self.epoch}: {advice}"
            )
        if problem and not self._warned_of_repeat_or_skip:
            self._warned_of_repeat_or_skip = True
            warn(problem)

    def start_external(self) -> PassStart:
        """Return where a framework's new pass, an iteration, must start.

        It is the position (2.); or where the previous pass ended, if a caller tracks the position
        (3.), unless that is later since a pass was abandoned (4.); or step 0 while `peeking` (1.).
        Warns if an epoch starts for the third time.
        """
        self.check_may_start()
        training = not self.stream.evaluation
        with _LOCK:
            if self.peeking and training:  # 1.
                return PassStart(self.epoch, 0, _PEEKING)
            position = self.epoch, self.step
            if self._tracked_start is None:  # 2. no caller tracks the position
                self._latest_start = self.start_pass()
                # Warns with this advice if too many passes start at the same epoch.
                self.count_pass(self._latest_start[0], self._advice)
            elif training and position > self._tracked_start:
                # 4. Batches after `_tracked_start` were trained on, but their pass has not ended:
                # it was abandoned, or the framework only draws a batch to infer its shape.
                return PassStart(*position, self._generation)
            else:  # 3.
                self._latest_start = self._tracked_start
            return PassStart(*self._latest_start, self._generation)

    def finish_external(self, pass_start: PassStart, /) -> None:
        """Set where the next pass starts, after the end of one.

        The end of epoch 2 is the start of epoch 3, or of epoch 2 again in an evaluation. It is
        ignored if tracking has started or stopped since the pass started (1.), noted if a caller
        tracks the position (2.), and else becomes the position (3.).
        """
        epoch, _, generation = pass_start
        evaluation = self.stream.evaluation
        with _LOCK:
            # 1. The generation is a number that rises at `track_from` and `stop_tracking`. A pass
            # that was abandoned before may still prefetch to its end: to count it would skip an
            # epoch.
            if generation != self._generation:
                return
            if self._tracked_start is not None:  # 2. a caller sets the position
                if self._tracked_start[0] == epoch:
                    self._tracked_start = (epoch if evaluation else epoch + 1), 0
                return
            if evaluation:  # 3.
                self.end()
            elif self.epoch == epoch:  # else `set_epoch` has changed it meanwhile
                # The end of the epoch is the start of the next one.
                self.seek(epoch, len(self.stream))

    def track_from(self, epoch: int, step: int, /, *, reshardable: bool = True) -> None:
        """Let the caller set the position, by `advance_to`, until `stop_tracking`: a framework
        draws batches before it trains on them, so what it has drawn does not show the position. The
        next pass starts at this step of this epoch. `reshardable`: whether a `tf.distribute`
        strategy may divide the batches among its replicas.
        """
        with _LOCK:
            if self._tracked_start is None:  # the caller did not set the position before
                # `finish_external` ignores the end of a pass that started in an earlier generation.
                self._generation += 1
            self._tracked_start = epoch, step
            self.peeking, self.reshardable = False, reshardable

    @contextmanager
    def peek(self) -> Iterator[None]:
        """Let a framework look at batches in a `with` block from step 0, without changing the
        position.
        """
        was_peeking, self.peeking = self.peeking, True
        try:
            yield
        finally:
            self.peeking = was_peeking

    def started_at(self, epoch: int, step: int, /) -> bool:
        """Return whether the latest pass started at this position."""
        return self._latest_start == (epoch, step)

    def advance_to(self, epoch: int, step: int, /) -> None:
        """Set the loader's position: all batches before this step were trained on."""
        self.seek(epoch, step)

    def stop_tracking(self) -> None:
        """Undo `track_from`: the end of a pass moves the position to the next epoch."""
        with _LOCK:
            if self._tracked_start is not None:  # `track_from` was called
                # `finish_external` ignores the end of a pass that started in an earlier generation.
                self._generation += 1
            self._reset_tracking()
