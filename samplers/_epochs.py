"""The base of streams: the number of epochs and steps, and states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsIndex

from twinfeed.samplers import validate
from twinfeed.samplers.state import (
    STATE_VERSION,
    StateMismatchError,
    compare_fingerprints,
    fields_before,
    flattened,
    json_value,
)
from twinfeed.samplers.traits import Samples


class Epochs(Samples):
    """A stream with a fixed number of steps an epoch, and with states: what a `Cursor` needs."""

    seed: int
    #: All on which the stream depends, except the seed: these are fields of the fingerprint.
    parameters: Mapping[str, Any]
    #: Whether each pass is whole: an evaluation, which keeps no position between passes.
    evaluation: bool = False

    def __init__(self, *, num_steps: int, size: int, seed: int) -> None:
        # size: the most ids of an epoch
        size = validate.integer("samples of an epoch", size, minimum=0)
        self.max_epochs = validate.LIMIT // max(1, size)
        self._steps, self.seed = num_steps, seed
        self._fingerprint: dict[str, Any] = {}  # computed when used; copies share the dict

    def __len__(self) -> int:
        return self._steps

    def _as_ints(self, epoch: SupportsIndex, step: SupportsIndex, end: int) -> tuple[int, int]:
        """Return epoch and step as ints. Raise IndexError unless the step is in `[0, end)`."""
        epoch, step = validate.as_int("epoch", epoch), validate.as_int("step", step)
        if not 0 <= epoch < self.max_epochs:
            raise IndexError(f"epoch must be in [0, {self.max_epochs}), got {epoch}")
        if not 0 <= step < end:
            steps = validate.counted(self._steps, "step")
            raise IndexError(f"step {step} of epoch {epoch}: an epoch has {steps}")
        return epoch, step

    def state_at(self, epoch: SupportsIndex, step: SupportsIndex) -> dict[str, Any]:
        """Return the state to resume from at this step; `len(self)` is the end of the epoch.

        A state has the position and a fingerprint: the parameters on which the batches depend. A
        parameter may change at a training step, as `k={0: 2, 1000: 3}` does at step 1000. A state
        at an earlier step does not have this change, so that a user may still alter it.
        """
        epoch, step = checked_position(self, epoch, step)
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
        if not isinstance(state, Mapping):
            raise StateMismatchError(f"the state must be what state_dict gave, got {state!r}")
        missing = {"version", "epoch", "step", "fingerprint"} - set(state)
        if missing:
            raise StateMismatchError(
                f"the state lacks {', '.join(sorted(missing))}, and has {list(state)[:8]}: give "
                f"the part that state_dict gave, as in checkpoint['loader']"
            )
        if state["version"] != STATE_VERSION:
            raise StateMismatchError(
                f"the state has version {state['version']!r}, this library reads {STATE_VERSION}"
            )
        epoch = validate.integer("epoch of the state", state["epoch"], minimum=0)
        step = validate.integer("step of the state", state["step"], minimum=0)
        saved = state["fingerprint"]
        if not isinstance(saved, Mapping):
            raise StateMismatchError(f"fingerprint of the state must be a mapping, got {saved!r}")
        # Changes of a schedule after the state's step may differ: they have changed no batch yet.
        global_step = epoch * len(self) + step
        compare_fingerprints(
            fields_before(saved, global_step),
            fields_before(self.fingerprint, global_step),
        )
        validate.integer("epoch of the state", epoch, minimum=0, below=self.max_epochs)
        if step >= max(1, len(self)):
            raise StateMismatchError(f"the state is at step {step}, an epoch has {len(self)}")
        return epoch, step

    @property
    def fingerprint(self) -> dict[str, Any]:
        """All that the batches depend on: class, stream version, seed, parameters, array digests.

        To hash large arrays takes long, so it is done once for a stream and all its copies.
        """
        if not self._fingerprint:
            fields = {
                "sampler": type(self).__name__,
                "stream_version": self.stream_version,
                "steps": self._steps,
                "seed": self.seed,
                **json_value(self.parameters),
            }
            # Fill the dict in place: copies of this stream refer to the same dict.
            self._fingerprint.update(flattened(fields))
        return dict(self._fingerprint)


def normalise(stream: Epochs, epoch: int, step: int) -> tuple[int, int]:
    """Return (epoch, step), but step 0 of the next epoch if `step` is the end of the epoch.

    An evaluation repeats the same epoch: then it is step 0 of this epoch.
    """
    if step == len(stream) > 0:
        return (epoch if stream.evaluation else epoch + 1), 0
    return epoch, step


def checked_position(stream: Epochs, epoch: SupportsIndex, step: SupportsIndex) -> tuple[int, int]:
    """Return the position before a step as ints; `len(stream)` is the end of the epoch."""
    return normalise(stream, *stream._as_ints(epoch, step, len(stream) + 1))
