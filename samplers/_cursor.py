"""The one class where a position lives."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

from twinfeed.samplers import _validate

if TYPE_CHECKING:
    from twinfeed.samplers._stream import BatchStream


class Cursor:
    """Stand between two batches of a stream, and move on as batches are received.

    A cursor starts at step 0 of epoch 0. After the last batch of an epoch it stands at step 0 of
    the next epoch. An evaluation has no place to stand:

    - each pass begins at step 0, except the first pass after a state was loaded;
    - the last batch leaves the epoch as it is.

    >>> from twinfeed.samplers import BatchSampler, Cursor, RandomSampler
    >>> cursor = Cursor(BatchSampler(RandomSampler(8, seed=0), batch_size=4))
    >>> cursor.begin()
    (0, 0)
    >>> cursor.advance()
    >>> cursor.advance()
    >>> cursor.epoch, cursor.step
    (1, 0)
    """

    def __init__(self, stream: BatchStream, /) -> None:
        self._stream = stream
        self._epoch = self._step = 0
        self._loaded: tuple[int, int] | None = None  # until the first batch after a state
        self._resumes = False  # the next pass is what a loaded state left of its epoch

    @property
    def epoch(self) -> int:
        """Epoch of the next batch."""
        return self._epoch

    @property
    def step(self) -> int:
        """Step of the next batch, in `[0, len(stream))`."""
        return self._step

    def begin(self, *, whole: bool = False) -> tuple[int, int]:
        """Begin a pass, and return its first (epoch, step): normally where the cursor stands.

        With `whole`, and for an evaluation, the pass begins at step 0 of the epoch. Only the first
        pass after `load_state_dict` begins at the loaded step.
        """
        if not self._resumes and (whole or self._stream.evaluation):
            self._step = 0
        self._resumes = False
        return self._epoch, self._step

    def advance(self) -> None:
        """Count one batch as received.

        Warns where the batch is of another epoch than a state that was loaded in mid-epoch: the
        rest of the loaded epoch will not come.
        """
        if self._loaded is not None:
            epoch, step = self._loaded
            if step and epoch != self._epoch and not self._stream.evaluation:
                warnings.warn(
                    f"the rest of epoch {epoch} does not come: a state of its step {step} was "
                    f"loaded, and then epoch {self._epoch} was named; name the state's epoch, and "
                    f"let Lightning save while fit runs, by ModelCheckpoint",
                    stacklevel=2,
                )
            self._loaded = None
        self._epoch, self._step = self._stream._settled(self._epoch, self._step + 1)

    def end(self) -> None:
        """End the pass, for whatever reason: an evaluation goes back to step 0 of its epoch."""
        if self._stream.evaluation:
            self._step = 0
        elif not len(self._stream):  # no batch will come that could move on
            self._epoch += 1

    def seek(self, epoch: SupportsIndex, step: SupportsIndex) -> None:
        """Stand before this step; `len(stream)` is the end of the epoch."""
        self._epoch, self._step = self._stream._place(epoch, step)
        self._loaded, self._resumes = None, False

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Stand at step 0 of an epoch.

        After `load_state_dict`, until the first batch, naming the loaded epoch restores the loaded
        step: trainers name an epoch after they have loaded a state, and some name two.
        """
        limit = self._stream._epochs
        epoch = _validate.integer("epoch", epoch, minimum=0, below=limit)
        named = self._loaded is not None and self._loaded[0] == epoch
        self._epoch, self._step = self._loaded if named and self._loaded else (epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return where the cursor stands, and of which stream: a small dict that JSON can hold."""
        return self._stream.state_at(self._epoch, self._step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand where a state was taken, of any rank and world size.

        Raises StateMismatchError for a state of another stream.
        """
        self._loaded = self._stream.position_of(state)
        self._epoch, self._step = self._loaded
        self._resumes = True
