"""The loader's position while a framework iterates, without reporting the batches it received."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

from twinfeed.samplers.cursor import Cursor

Order = Literal["unchecked"]
"""The user vouches that element n of a dataset is batch n of the loader: nothing checks it."""

# Frameworks begin passes in threads of their own. All loaders share a lock, as locks do not pickle.
_LOCK = threading.Lock()

_PEEKING = -1  # the generation of passes that change no position


class PassStart(NamedTuple):
    """The first batch of a pass, and the generation in which the pass was started.

    The generation is a number that rises whenever the tracking of the position starts or stops. So
    the end of an old pass, which may come late, is recognised and ignored.
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
    - A caller that sees which batches were trained on, such as a Keras callback, may track the
      position, from `track_from` to `stop_tracking`. The first pass then starts where the caller
      says, and each later pass where the previous pass ended. Only `advance_to` changes the
      position.
    - While `peeking` is true, a pass has the whole epoch and does not change the position. The
      caller sets this for a validation.
    - `reshardable`: whether a strategy may divide the batches. False in a loop over the loader.

    >>> from twinfeed.samplers import BatchSampler, SequentialSampler
    >>> sampler = BatchSampler(SequentialSampler(8), batch_size=4)
    >>> passes = ExternalPasses(Cursor(sampler), advice="call set_epoch")
    >>> passes.finish(passes.start())
    >>> passes.start()[:2]
    (1, 0)
    >>> passes.track_from(1, 1)
    >>> passes.finish(passes.start())
    >>> passes.advance_to(1, 2)
    >>> passes.start()[:2]
    (2, 0)
    """

    def __init__(self, cursor: Cursor, /, *, advice: str) -> None:
        self._cursor, self._advice = cursor, advice
        # The (epoch, step) at which the next pass starts, while a caller tracks the position, from
        # `track_from` to `stop_tracking`; otherwise None.
        self._tracked_start: tuple[int, int] | None = None
        self._latest_start: tuple[int, int] | None = None  # where the latest pass started
        self._generation = 0  # rises when tracking starts or stops
        self.peeking = False
        self.reshardable = True

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the cursor, but not the tracking of running passes."""
        return partial(ExternalPasses, advice=self._advice), (self._cursor,)

    def start(self) -> PassStart:
        """Return the epoch and step at which a framework's new iteration, a pass, must start.

        1. While `peeking` is set, the framework only looks at batches of a loader that trains, or
           validates on this loader: the pass starts at step 0 of the epoch.
        2. Normally the pass starts at the loader's position. Warns if the same training epoch
           starts for the third time, since the position does not move.
        3. A caller such as a Keras callback may set the loader's position by itself, from
           `track_from` to `stop_tracking`. The first pass then starts where `track_from` says, and
           each later pass where the previous one ended: at `_tracked_start`.
        4. As 3, but the position is later than `_tracked_start`, since a pass was abandoned before
           its end: the pass starts at the position.

        The result also has the generation, a number that rises whenever case 3 begins or ends, so
        that `finish` can ignore the end of a pass that started before.
        """
        self._cursor.check_may_start()
        training = not self._cursor.stream.evaluation
        with _LOCK:
            if self.peeking and training:  # 1.
                return PassStart(self._cursor.epoch, 0, _PEEKING)
            position = self._cursor.epoch, self._cursor.step
            if self._tracked_start is None:  # 2. no caller tracks the position
                self._latest_start = self._cursor.start_pass()
                # Warns with this advice if too many passes start at the same epoch.
                self._cursor.count_pass(self._latest_start[0], self._advice)
            elif training and position > self._tracked_start:
                # 4. Batches after `_tracked_start` were trained on, but their pass has not ended:
                # it was abandoned, or the framework only draws a batch to infer its shape.
                return PassStart(*position, self._generation)
            else:  # 3.
                self._latest_start = self._tracked_start
            return PassStart(*self._latest_start, self._generation)

    def finish(self, pass_start: PassStart, /) -> None:
        """Set where the next pass (iteration of a framework) starts, after the end of a pass.

        For example, a pass over epoch 2 has ended. The next pass starts at step 0 of epoch 3; or of
        epoch 2 again, if the loader evaluates. How this is stored depends on who sets the loader's
        position:

        1. A caller has started or stopped to set it (`track_from`, `stop_tracking`) since the pass
           started: the end of this pass comes too late, and is ignored.
        2. A caller sets it now, by `advance_to`: the position stays, and only the start of the next
           pass is noted, in `_tracked_start`.
        3. Nobody else sets it: the position becomes the start of the next pass.

        Args:
            pass_start: where the pass started, as `start` has returned it.
        """
        epoch, _, generation = pass_start
        evaluation = self._cursor.stream.evaluation
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
                self._cursor.end()
            elif self._cursor.epoch == epoch:  # else `set_epoch` has changed it meanwhile
                # The end of the epoch is the start of the next one.
                self._cursor.seek(epoch, len(self._cursor.stream))

    def track_from(self, epoch: int, step: int, /, *, reshardable: bool = True) -> None:
        """Let the caller set the loader's position while a framework iterates over the loader.

        A framework draws batches before it trains on them, so the batches that it has drawn do not
        show the position. A caller such as a Keras callback sees which batches were trained on.
        From now on, until `stop_tracking`, only the caller changes the position, by `advance_to`.

        Args:
            epoch: the epoch at which the next pass (iteration of the framework) starts.
            step: the step of this epoch.
            reshardable: whether a `tf.distribute` strategy may divide the batches among its
                replicas.
        """
        with _LOCK:
            if self._tracked_start is None:  # the caller did not set the position before
                # `finish` ignores the end of a pass that started in an earlier generation.
                self._generation += 1
            self._tracked_start = epoch, step
            self.peeking, self.reshardable = False, reshardable

    @contextmanager
    def peek(self) -> Iterator[None]:
        """Let a framework look at batches in a `with` block without changing the loader's position.

        An iteration that starts in the block starts at step 0. Its end is ignored.
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
        self._cursor.seek(epoch, step)

    def stop_tracking(self) -> None:
        """Undo `track_from`, so that the caller no longer sets the loader's position.

        From now on, a pass (iteration of a framework) starts at the loader's position, and its end
        moves the position to the next epoch. A pass that is running now does not: its end may come
        late, when the framework has prefetched the remaining batches, and would skip an epoch.
        """
        with _LOCK:
            if self._tracked_start is not None:  # `track_from` was called
                # `finish` ignores the end of a pass that started in an earlier generation.
                self._generation += 1
            # Set all attributes as `__init__` does.
            self._tracked_start = self._latest_start = None
            self.peeking, self.reshardable = False, True
