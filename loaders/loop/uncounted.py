"""Passes for frameworks that do not say which batches they received."""

from __future__ import annotations

import sys
import threading
import warnings
from functools import partial
from itertools import count
from types import FrameType
from typing import Any, Literal, NamedTuple
from weakref import WeakSet

from twinfeed.samplers import BatchStream
from twinfeed.samplers.cursor import Cursor

Order = Literal["mine"]
"""Who answers for the order of the batches: the user, where the library cannot know the order."""

Asker = Literal["fit", "look", "loop", "thread"]
"""Who begins a pass: a training of Keras, another method of Keras, a loop of the user's, or some
method of Keras through a thread of TensorFlow.
"""

# Frameworks begin passes in threads of their own. All loaders share a lock, as locks do not pickle.
_LOCK = threading.Lock()

_NUMBERS = count()

_LOOKING = -1  # the counting of passes that move no position

# Between a loop and a dataset there may be functions of these packages.
_LIBRARIES = ("tensorflow", "torch", "twinfeed")


UNANNOUNCED = (
    "somebody counts these batches, but they come from a pipeline that the loader does not know, "
    "as sample_from_datasets, zip or an iterator within a tf.function is, so the position after "
    "them is not known: use loader.dataset with map, prefetch or take alone, or say order='mine' "
    "if each element is the next batch of the loader"
)


class Begun(NamedTuple):
    """Where a pass begins, and which counting it belongs to."""

    epoch: int
    step: int
    counting: int


class Announced:
    """An iterator that will begin a pass. The iterator keeps this object.

    - `refused` says why the position after its batches is not known. Empty: it is known.
    - `repeats`: whether the iterator may begin more than one pass.
    """

    def __init__(self, asker: Asker, refused: str = "", *, repeats: bool = False) -> None:
        self.asker, self.refused, self.repeats = asker, refused, repeats
        self.number = next(_NUMBERS)
        self.begun = False


class UncountedPasses:
    """Say where the passes of a framework begin, and follow what is known of them.

    A pass runs to the end of its epoch. A framework may look at a batch and give up the pass. This
    changes nothing.

    - Normally a pass begins at the loader's position. After its last batch, the position is the
      beginning of the next epoch.
    - A counter, such as a Keras callback, knows what was trained. From `count_from` to
      `stop_counting`, passes begin where the counter says, and then one after the other.
      `trained` alone moves the position.
    - An iterator made in Python is announced, with who asks for it. A pass that `evaluate`,
      `predict` or `adapt` of Keras asks for is a look at the whole epoch, and moves no position.

    >>> from twinfeed.samplers import BatchSampler, SequentialSampler
    >>> sampler = BatchSampler(SequentialSampler(8), batch_size=4)
    >>> passes = UncountedPasses(sampler, Cursor(sampler), advice="call set_epoch")
    >>> passes.delivered(passes.begin())
    >>> passes.begin()[:2]
    (1, 0)
    >>> passes.count_from(1, 1)
    >>> passes.delivered(passes.begin())
    >>> passes.trained(1, 2)
    >>> passes.begin()[:2]
    (2, 0)
    """

    def __init__(self, sampler: BatchStream, cursor: Cursor, /, *, advice: str) -> None:
        self._sampler, self._cursor, self._advice = sampler, cursor, advice
        self._next: tuple[int, int] | None = None  # while a counter counts: where passes begin
        self._latest: tuple[int, int] | None = None  # where the latest pass began
        self._times = 0  # how many passes in a row have begun the latest epoch
        self._counting = 0  # changes when a counter begins or stops
        self._strict = False  # whether the counter refuses passes of an unknown order
        self._announced: WeakSet[Announced] = WeakSet()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without the counting, which belongs to this object's passes."""
        return partial(UncountedPasses, advice=self._advice), (self._sampler, self._cursor)

    def announce(self, announced: Announced, /) -> None:
        """Expect a pass, for as long as `announced` exists."""
        with _LOCK:
            self._announced.add(announced)

    def begin(self, announced: Announced | None = None, /) -> Begun:
        """Begin a pass: the announced one, or the newest of those that were announced.

        Warns where passes without a counter begin one training epoch for the third time.

        Raises:
            ValueError: somebody counts, and could not know the position after the batches.
        """
        with _LOCK:
            announced = announced or self._newest()
            self.check(announced)
            if announced is not None:
                announced.begun = True
                if self._looks(announced):
                    return Begun(self._cursor.epoch, 0, _LOOKING)
            position = self._cursor.epoch, self._cursor.step
            if self._next is None:
                self._latest = self._counted_begin()
            elif position > self._next and not self._sampler.evaluation:
                # The counter was killed, or somebody looks at a batch while it counts.
                return Begun(*position, self._counting)
            else:
                self._latest = self._next
            return Begun(*self._latest, self._counting)

    def expects(self) -> bool:
        """Return whether the next pass to begin was announced."""
        with _LOCK:
            return self._newest() is not None

    def delivered(self, begun: Begun, /) -> None:
        """Note that the last batch of a pass was delivered."""
        evaluation = self._sampler.evaluation
        with _LOCK:
            if begun.counting != self._counting:
                return  # a pass that was given up may still run ahead, and would skip an epoch
            if self._next is not None:
                if self._next[0] == begun.epoch:
                    self._next = (begun.epoch if evaluation else begun.epoch + 1), 0
            elif evaluation:
                self._cursor.end()
            elif self._cursor.epoch == begun.epoch:
                self._cursor.seek(begun.epoch, len(self._sampler))

    def count_from(self, epoch: int, step: int, /, *, strict: bool = False) -> None:
        """Begin the next pass here, for somebody who counts what is trained.

        With `strict`, passes are refused if nobody announced them, or if the position after their
        batches is not known.
        """
        with _LOCK:
            self._counting += self._next is None
            self._next, self._strict = (epoch, step), strict

    def began_at(self, epoch: int, step: int, /) -> bool:
        """Return whether the latest pass began here."""
        return self._latest == (epoch, step)

    def trained(self, epoch: int, step: int, /) -> None:
        """Move the position to that of the training."""
        self._cursor.seek(epoch, step)

    def stop_counting(self) -> None:
        """Let the position follow the passes again."""
        with _LOCK:
            self._counting += self._next is not None
            self._next = self._latest = None
            self._strict = False

    def check(self, announced: Announced | None, /) -> None:
        """Refuse a pass of an unknown order to a strict counter: raise ValueError."""
        if not self._strict:
            return
        if announced is None:
            raise ValueError(UNANNOUNCED)
        if announced.asker == "fit" and announced.refused:
            raise ValueError(announced.refused)

    def _newest(self) -> Announced | None:
        """Return the newest announced pass that has not begun, or else the newest that repeats."""
        waiting = [one for one in self._announced if one.repeats or not one.begun]
        return max(waiting, key=lambda one: (not one.begun, one.number), default=None)

    def _looks(self, announced: Announced) -> bool:
        """Return whether a pass moves no position. An evaluation has no position to move."""
        if self._sampler.evaluation:
            return False
        looks = self._strict and announced.asker == "loop" and announced.refused
        return announced.asker == "look" or bool(looks)

    def _counted_begin(self) -> tuple[int, int]:
        """Begin a pass without a counter, and count how often its epoch was begun."""
        before, begins = self._latest, self._cursor.begin()
        again = before is not None and before[0] == begins[0]
        self._times = self._times + 1 if again else 1
        if self._times == 3 and not self._sampler.evaluation:
            warnings.warn(
                f"passes begin epoch {begins[0]} for the third time, so the same batches come "
                f"again: call loader.set_epoch(epoch) before each pass, or {self._advice}, which "
                f"goes on after the batches that the loop received",
                stacklevel=4,
            )
        return begins


def asker() -> Asker:
    """Return who begins a pass: the innermost method of Keras, if Keras itself calls.

    A model's `fit` trains. All other methods only look: `evaluate`, also within `fit`, `predict`,
    and `adapt` of a layer. A thread of TensorFlow does not say which method waits for it.
    """
    frame: FrameType | None = sys._getframe(1)
    keras = False
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in ("keras", "tf_keras"):
            keras, name = True, frame.f_code.co_name
            if name == "fit":
                return "fit"
            if name in ("evaluate", "predict", "adapt"):
                return "look"
        elif package not in _LIBRARIES:
            break
        frame = frame.f_back
    if keras and frame is None:
        return "thread"
    return "look" if keras else "loop"
