"""The position in a stream, and passes over a stream without a loader."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, SupportsIndex

from twinfeed.samplers import validate
from twinfeed.samplers._epochs import Epochs, checked_position, normalise
from twinfeed.samplers.types import Int64s


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
        self._loaded: tuple[int, int] | None = None  # by load_state_dict; None after a batch
        self._resuming = False  # whether the next pass starts in the middle of the loaded epoch
        self._pass_counts = (0, 0)  # an epoch, and its consecutive passes

    def start_pass(self, *, from_start: bool = False) -> tuple[int, int]:
        """Return the (epoch, step) at which a pass, one iteration over the stream, starts.

        It is the cursor's position. With `from_start`, and for an evaluation, it is step 0 of the
        epoch, except for the first pass after `load_state_dict`.
        """
        if not self._resuming and (from_start or self.stream.evaluation):
            self.step = 0
        self._resuming = False
        return self.epoch, self.step

    def count_pass(self, epoch: int, advice: str) -> None:
        """Count a pass that starts an epoch; warn at the third in a row of one training epoch.

        A pass is one iteration over the stream. `advice` is what the warning says to use.
        """
        # The second time is no mistake: sanity checks and Keras draw a batch to inspect it.
        last_epoch, count = self._pass_counts
        self._pass_counts = epoch, count + 1 if last_epoch == epoch else 1
        if self._pass_counts[1] == 3 and not self.stream.evaluation:
            warnings.warn(
                f"passes begin epoch {epoch} for the third time, so the same batches come again: "
                f"call set_epoch(epoch) before each pass, or {advice}, which goes on after the "
                f"batches that the loop received",
                stacklevel=4,
            )

    def advance(self) -> bool:
        """Move the position to the next batch; return whether the epoch has ended.

        Warn if a state was loaded in mid-epoch, and then another epoch was set: the rest of the
        loaded epoch will not come.
        """
        if self._loaded is not None:
            epoch, step = self._loaded
            if step and epoch != self.epoch and not self.stream.evaluation:
                warnings.warn(
                    f"the rest of epoch {epoch} does not come: a state of its step {step} was "
                    f"loaded, and then epoch {self.epoch} was named. To train the rest, name "
                    f"epoch {epoch} or none (Lightning: save by ModelCheckpoint while fit runs)",
                    stacklevel=2,
                )
            self._loaded = None
        self.epoch, self.step = normalise(self.stream, self.epoch, self.step + 1)
        return self.step == 0

    def end(self) -> None:
        """End the pass, for whatever reason: an evaluation goes back to step 0 of its epoch."""
        if self.stream.evaluation:
            self.step = 0

    def seek(self, epoch: SupportsIndex, step: SupportsIndex) -> None:
        """Set the position before this step; `len(stream)` is the end of the epoch."""
        self.epoch, self.step = checked_position(self.stream, epoch, step)
        self._loaded, self._resuming, self._pass_counts = None, False, (0, 0)

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Set the position to step 0 of an epoch.

        Between `load_state_dict` and the next batch, setting the epoch of the state sets its step
        too: trainers set an epoch after they have loaded a state, and some set two.
        """
        limit = self.stream.max_epochs
        epoch = validate.integer("epoch", epoch, minimum=0, below=limit)
        loaded = self._loaded
        self.epoch, self.step = loaded if loaded and loaded[0] == epoch else (epoch, 0)
        self._pass_counts = (0, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and of which stream it is: a small dict that JSON can hold."""
        return self.stream.state_at(self.epoch, self.step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position to that of a state, which may be of any rank and world size.

        Raises:
            StateMismatchError: a state of another stream.
        """
        self._loaded = self.stream.position_of(state)
        self.epoch, self.step = self._loaded
        self._resuming, self._pass_counts = True, (0, 0)


class SamplerCursor(Cursor):
    """The cursor of a sampler that is iterated itself: it advances as batches are drawn.

    Each pass starts at step 0, and only the latest pass moves the cursor.
    """

    def __init__(self, stream: Epochs, /) -> None:
        super().__init__(stream)
        self._latest: Cursor | None = None  # the position of the latest pass, until it ends

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without the running pass."""
        return {**vars(self), "_latest": None}

    def iterate(
        self, draw: Callable[[int, int], Iterator[Int64s]]
    ) -> Iterator[tuple[int, int, Int64s]]:
        """Yield (epoch, step, ids) for each batch of a pass, one iteration over the stream.

        `draw(epoch, step)` yields the ids of the batches from this step on. Nothing is drawn before
        the first `next`.
        """
        epoch, step = self.start_pass(from_start=True)
        running = self._latest = Cursor(self.stream)
        running.seek(epoch, step)
        self.count_pass(epoch, "use a loader of twinfeed.loaders")
        try:
            for step, ids in enumerate(draw(epoch, step), step):  # noqa: B020
                # Before the batch is yielded: a loop that takes exactly len() batches never resumes
                # this generator.
                running.advance()
                # A later pass, `set_epoch` or a state may have set the position meanwhile.
                if self._latest is running:
                    if self.epoch == epoch:
                        self.advance()
                    if not running.step:
                        self._latest = None
                yield epoch, step, ids
        finally:
            if self._latest is running:
                self._latest = None
                self.end()

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Set the epoch of the next pass; to set the epoch of the running pass changes nothing.

        A pass is one iteration over the stream.
        """
        epoch = validate.as_int("epoch", epoch)
        if self._latest is not None and self._latest.epoch == epoch:
            self.seek(epoch, self._latest.step)
        else:
            super().set_epoch(epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next pass at a state."""
        super().load_state_dict(state)
        self._latest = None
