"""The start and the end of passes that a framework runs, whose batches cannot be counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

from twinfeed.loaders.loop.ledger import Ledger
from twinfeed.samplers.cursor import Cursor

Order = Literal["unchecked"]
"""The user vouches that element n of a dataset is batch n of the loader: nothing checks it."""

# Frameworks begin passes in threads of their own. All loaders share a lock, as locks do not pickle.
_LOCK = threading.Lock()

_PEEKING = -1  # the generation of passes that move no position


class PassStart(NamedTuple):
    """Where a pass starts, and the generation in which it was started.

    The generation is a number that changes whenever a counter of batches starts or stops.
    """

    epoch: int
    step: int
    generation: int


class ExternalPasses:
    """Decide where the passes of a framework start, and what the loader's position is after them.

    A pass is one iteration over a dataset of the loader; it runs to the end of its epoch. A pass
    that is abandoned before its end, as by `next(iter(dataset))`, does not change the position.

    - Normally a pass starts at the loader's position. After its last batch, the position is the
      start of the next epoch.
    - A counter, such as a Keras callback, knows which batches were trained on. From `track_from` to
      `stop_tracking`, the first pass starts where the counter says, and each later pass where the
      previous pass ended. Only `advance_to` changes the position.
    - While `peeking` is true, a pass has the whole epoch and does not change the position. The
      counter sets this for a validation.
    - `reshardable`: whether a strategy may divide the batches. False in a loop over the loader.

    >>> from twinfeed.samplers import BatchSampler, SequentialSampler
    >>> sampler = BatchSampler(SequentialSampler(8), batch_size=4)
    >>> passes = ExternalPasses(Cursor(sampler), advice="call set_epoch")
    >>> passes.finished(passes.start())
    >>> passes.start()[:2]
    (1, 0)
    >>> passes.track_from(1, 1)
    >>> passes.finished(passes.start())
    >>> passes.advance_to(1, 2)
    >>> passes.start()[:2]
    (2, 0)
    """

    def __init__(self, cursor: Cursor, /, *, advice: str, ledger: Ledger | None = None) -> None:
        self._cursor, self._advice = cursor, advice
        self._ledger = ledger
        # Positions (epoch, step): where the next pass starts, if there is a counter; and where the
        # latest pass started.
        self._next_start: tuple[int, int] | None = None
        self._latest_start: tuple[int, int] | None = None
        self._generation = 0  # changes when a counter starts or stops
        self.peeking = False
        self.reshardable = True

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the cursor, but not the tracking of running passes."""
        return partial(ExternalPasses, advice=self._advice), (self._cursor,)

    def start(self) -> PassStart:
        """Start a pass, and return its first position.

        Warns if passes without a counter start the same training epoch for the third time.
        """
        with _LOCK:
            # A pass to look at a batch, or a validation on the training's loader.
            if self.peeking and not self._cursor.stream.evaluation:
                return PassStart(self._cursor.epoch, 0, _PEEKING)
            position = self._cursor.epoch, self._cursor.step
            if self._next_start is None:
                self._latest_start = self._cursor.start_pass()
                self._cursor.count_pass(self._latest_start[0], self._advice)
            elif position > self._next_start and not self._cursor.stream.evaluation:
                # The tracked pass was abandoned, or the framework draws a batch to infer its shape.
                return PassStart(*position, self._generation)
            else:
                self._latest_start = self._next_start
            return PassStart(*self._latest_start, self._generation)

    def finish(self, pass_start: PassStart, /) -> None:
        """Set the position after the last batch of a pass.

        If a counter sets the loader's position, only the start of the next pass is set here. Else
        the loader's position becomes the next epoch; an evaluation starts again.
        """
        epoch, step, generation = pass_start
        evaluation = self._cursor.stream.evaluation
        with _LOCK:
            if generation != self._generation:
                return  # an abandoned pass may still prefetch; its end would skip an epoch
            if self._next_start is not None:
                if self._next_start[0] == epoch:
                    self._next_start = (epoch if evaluation else epoch + 1), 0
                return
            steps = len(self._cursor.stream)
            if self._ledger is not None:
                self._ledger.delivered(epoch * steps + step, steps - step)
            if evaluation:
                self._cursor.end()
            elif self._cursor.epoch == epoch:
                self._cursor.seek(epoch, steps)

    def track_from(self, epoch: int, step: int, /, *, reshardable: bool = True) -> None:
        """Let the next pass start at this position. A counter calls `advance_to` from now on.

        `reshardable` says whether a `tf.distribute` strategy may divide the batches.
        """
        with _LOCK:
            self._generation += self._next_start is None
            self._next_start = epoch, step
            self.peeking, self.reshardable = False, reshardable

    @contextmanager
    def peek(self) -> Iterator[None]:
        """Let passes that start within the `with` block leave the position unchanged."""
        previous, self.peeking = self.peeking, True
        try:
            yield
        finally:
            self.peeking = previous

    def started_at(self, epoch: int, step: int, /) -> bool:
        """Return whether the latest pass started at this position."""
        return self._latest_start == (epoch, step)

    def advance_to(self, epoch: int, step: int, /) -> None:
        """Set the loader's position: all batches before this step were trained on.

        The ledger notes the steps since the position before.
        """
        if self._ledger is not None:
            steps = len(self._cursor.stream)
            previous = self._cursor.epoch * steps + self._cursor.step
            self._ledger.delivered(previous, epoch * steps + step - previous)
        self._cursor.seek(epoch, step)

    def stop_tracking(self) -> None:
        """Let the end of each pass set the position again: the batches are no longer counted."""
        with _LOCK:
            self._generation += self._next_start is not None
            self._next_start = self._latest_start = None
            self.peeking, self.reshardable = False, True
