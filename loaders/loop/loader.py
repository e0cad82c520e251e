"""`Loader`, the base class of loaders: it keeps the position, and runs one pass at a time."""

from __future__ import annotations

import atexit
import ctypes
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import count
from operator import attrgetter
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, Protocol
from weakref import WeakSet

from twinfeed.loaders.batches.meter import Meter, PassReport
from twinfeed.loaders.loop.run import Run
from twinfeed.loaders.support.closing import Closing
from twinfeed.samplers import BatchStream
from twinfeed.samplers.processes import warn_unsharded

_PASS_WAS_ENDED = (
    "this pass was ended before its last batch, by another pass over the same loader, by its "
    "set_epoch, load_state_dict or close, or by a fork: give each loop a loader of its own"
)
"""The error of a loop over a loader whose pass was ended by another call."""

_ADVISE_KERAS_FIT = (
    "a {} is not an array: in Keras, train by ResumeCallback(loader, folder).fit(model, ('x', "
    "'y')), or give loader.dataset.map(pairs) of a TensorFlowLoader or loader.dataloader(pairs) of "
    "a TorchLoader"
)

_END = object()  # a sentinel, the default of `next`: there is no further batch

_LOADERS: WeakSet[Loader[Any]] = WeakSet()  # loaders to call after a fork and at exit


def _after_fork() -> None:
    """In a forked child, drop the running passes of all loaders: their threads do not exist."""
    for loader in list(_LOADERS):
        loader._reset_after_fork()


def _at_exit() -> None:
    """End all running passes before the interpreter clears the modules that this needs."""
    for loader in list(_LOADERS):
        loader._end_pass()
        loader._drop_continued_pass()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import TypeVar

    B = TypeVar("B", default=dict[str, Any])  # a default at run time needs Python 3.13
else:
    from typing import TypeVar

    B = TypeVar("B")


@contextmanager
def explain_key_error(batch: Any) -> Iterator[None]:
    """Add the names of the batch's fields to a KeyError that is raised in the `with` block."""
    try:
        yield
    except KeyError as error:
        if isinstance(batch, Mapping):
            error.add_note(f"the fields of a batch are {', '.join(batch)}")
        raise


class Pass(Iterator[Any], Protocol):
    """An iterator over the batches of a pass; `close` stops its threads or workers."""

    def close(self) -> None: ...


class Loader(Closing, Generic[B]):
    """Iterate over the batches of a stream, and count the batches that the loop has received.

    - A pass begins with the first batch that the loop has not received, whatever ended the last
      pass. After the last batch of an epoch comes the next epoch. `set_epoch` begins an epoch.
    - In an evaluation (`ExactOnceBatchSampler`) each pass is whole. Only the first pass after
      `load_state_dict` is a remainder.
    - In training, the first batches of the next epoch may be made before its pass, which gives them
      unless the position was set meanwhile. `close` drops them.
    - There is one pass at a time. Within a loop, another pass, `set_epoch`, `load_state_dict` or
      `close` ends the loop with RuntimeError. Nothing is read before the first `next`.
    - A copy, a pickle and a forked child continue after the batches that the loop received, in a
      pass of their own. In the child, the parent's loop ends with RuntimeError.

    For a type checker a batch is a `dict[str, Any]`. To give it the names of the fields, name a
    `TypedDict`, as in `NumpyLoader[MyBatch](feed)`. Nothing is checked at run time.

    Some loaders also feed a framework that does not say what it received: see `Run`.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import Feed, NumpyLoader, pack
    >>> from twinfeed.samplers import BatchSampler, SequentialSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> loader = NumpyLoader(Feed(index, BatchSampler(SequentialSampler(3), batch_size=1)))
    >>> for batch in loader:
    ...     break
    >>> [batch["word"] for batch in loader], loader.epoch
    ([[b'be'], [b'or']], 1)
    """

    # The advice of a warning: how to iterate so that the batches are counted.
    _counting_advice = "loop over the loader itself"

    # Whether a pass goes on after its epoch, to make the first batches of the next epoch ahead.
    _goes_on = False
    _current_pass: Pass | None = None
    # A pass that has made first batches of the next epoch already, and the position of these.
    _continued_pass: tuple[Pass, tuple[int, int]] | None = None
    # Attributes that a copy and a forked child do not get.
    _not_copied: ClassVar[tuple[str, ...]] = ("_current_pass", "_continued_pass")
    _shared: ClassVar[tuple[str, ...]] = ("_sampler",)  # shared by a shallow copy

    def __init__(self, sampler: BatchStream, /) -> None:
        self._sampler = sampler
        self.run = Run(sampler, advice=self._counting_advice)
        self.meter = Meter()
        _LOADERS.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self._not_copied}

    def __copy__(self) -> Self:
        """Return a copy with a position of its own, which shares the sampler and the feed."""
        shared = [attrgetter(name)(self) for name in self._shared]
        return deepcopy(self, {id(value): value for value in shared})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _LOADERS.add(self)
        self._start_next_pass_here()

    def _start_next_pass_here(self) -> None:
        """Make the next pass start at the current step, also in an evaluation."""
        if self.run.step:
            self.run.resume_here()

    def _reset_after_fork(self) -> None:
        """Drop the running pass in a forked child, without ending the parent's threads."""
        # Copy all attributes to a dict that is never freed, even at exit, since its reference count
        # is raised here and never lowered. So removing them below destroys nothing.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(vars(self).copy()))
        for name in self._not_copied:
            vars(self).pop(name, None)
        self._start_next_pass_here()  # the child continues at the step that the parent had reached
        self.meter = Meter()  # a thread of the parent may hold the old lock

    @abstractmethod
    def _start_pass(self, epoch: int, start: int) -> Pass:
        """Start a pass over the steps of an epoch, from step `start` on, and return it."""

    def _pass_at(self, epoch: int, start: int) -> Pass:
        """Return the pass that an earlier loop has left at this position, or start a new one."""
        if self._continued_pass is not None and self._continued_pass[1] == (epoch, start):
            batches, self._continued_pass = self._continued_pass[0], None
            return batches
        self._drop_continued_pass()
        return self._start_pass(epoch, start)

    def _drop_continued_pass(self) -> None:
        """Drop what was made of the next epoch."""
        if self._continued_pass is not None:
            batches, self._continued_pass = self._continued_pass[0], None
            batches.close()

    def __repr__(self) -> str:
        stream = getattr(self, "feed", self._sampler)
        where = f"epoch {self.epoch}, step {self.step} of {len(self)}"
        return f"<{type(self).__name__} of {stream!r}: {where}>"

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self._sampler)

    def __array__(self, *_: object, **__: object) -> NoReturn:
        """Raise TypeError that says how to train with Keras, whose `fit` asks for an array."""
        raise TypeError(_ADVISE_KERAS_FIT.format(type(self).__name__))

    @property
    def shape(self) -> NoReturn:
        """Raise AttributeError that says how to train with Keras, whose `fit` asks for a shape."""
        raise AttributeError(_ADVISE_KERAS_FIT.format(type(self).__name__))

    def __iter__(self) -> Iterator[B]:
        """Iterate over the batches, from the position to the end of the epoch."""
        epoch, start = self._new_pass()
        batches = self._pass_at(epoch, start)
        num_batches = len(self) - start
        yield from self._iterate_pass(
            batches, self.run.received, num_batches=num_batches, epoch=epoch
        )

    def _new_pass(self) -> tuple[int, int]:
        """End the running pass, and return the epoch and step at which a loop starts a new one."""
        self._end_pass_and_tracking()
        epoch, start = self.run.start_pass()
        self.meter.start()
        return epoch, start

    def _iterate_pass(
        self,
        batches: Pass,
        count_received: Callable[[], bool],
        *,
        num_batches: int | None = None,
        epoch: int | None = None,
        divided: bool = False,
    ) -> Iterator[Any]:
        """Yield the batches of a pass over `epoch`, and end or hold the pass after the last one.

        A call such as `set_epoch`, also from another thread, may end the pass at any time:
        RuntimeError. `count_received` is called before each batch is yielded, and returns whether
        it is the last of its epoch. `divided` says that the framework gives each process its own
        batches; if not, there is a warning for several processes.
        """
        if not divided:
            warn_unsharded(self._sampler)
        running: Pass | None = batches
        self._current_pass = running
        try:
            for _ in count() if num_batches is None else range(num_batches):
                requested = perf_counter_ns()  # to measure how long the loop waits for the batch
                try:
                    batch = next(batches, _END)  # _END if there is no further batch
                except Exception:
                    if self._current_pass is batches:
                        raise
                    batch = _END  # another thread has closed the pass, which has caused the error
                too_few_batches = batch is _END and num_batches is not None
                if too_few_batches or self._current_pass is not batches:
                    batches.close()
                    raise RuntimeError(_PASS_WAS_ENDED)
                if batch is _END:
                    return
                self.meter.received(requested)
                is_last = count_received()
                if is_last and epoch is not None and self._goes_on:
                    # The pass is not this loop's any more: another loop may go on with it.
                    self._current_pass, self._continued_pass = None, (batches, (epoch + 1, 0))
                    running = None
                yield batch
                # The body of the user's loop has run. It may have ended the pass, which is an error
                # unless it was at the last batch.
                if self._current_pass is not running:
                    if is_last:
                        return
                    raise RuntimeError(_PASS_WAS_ENDED)
        finally:
            if self._current_pass is running:  # no later pass has begun
                self.meter.end()
                self._end_pass()

    def report(self) -> PassReport:
        """Return how long each stage of the last pass took, so far: see `PassReport`.

        If a loop waits for much of the time, the data slow it down. Print the report, or take
        `dataclasses.asdict(report)` for a log.
        """
        return self.meter.report()

    @property
    def epoch(self) -> int:
        """Epoch of the next batch that the loop receives."""
        return self.run.epoch

    @property
    def step(self) -> int:
        """Step of the next batch that the loop receives, in `[0, len(loader))`."""
        return self.run.step

    @property
    def global_step(self) -> int:
        """Number of batches before the position, over all epochs: a step for logs.

        It is `epoch * len(loader) + step`. After the last batch of an epoch `step` is 0 again, but
        `global_step` keeps counting. A saved state restores both.
        """
        return self.epoch * len(self) + self.step

    def set_epoch(self, epoch: int, /) -> None:
        """Set the epoch of the next pass.

        The pass starts at step 0, or at the step of a loaded state if that is in this epoch.

        Unless the loader evaluates, this warns once if batches of this epoch came before, to this
        loop or before the loaded state, or if the last batches of the previous epoch are skipped.
        """
        self._end_pass_and_tracking()
        self.run.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, with what identifies the sampler and the records.

        It is a small dict that JSON can hold. A loader with another number of ranks or workers,
        with another container of the same records, or of another framework can continue from it.
        """
        return self.run.state_dict()

    def state_at(self, epoch: int, step: int, /) -> dict[str, Any]:
        """Return the state before a step; `step=len(loader)` is the end of the epoch."""
        return {**self.state_dict(), **self._sampler.state_at(epoch, step)}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Set the position to that of a state: the next pass continues there.

        Warns if the state has no digest of the records, so that they cannot be compared.

        Raises:
            StateMismatchError: the state was saved with other records or another sampler.
        """
        self._end_pass_and_tracking()
        self._check_state(state)
        self.run.load_state_dict(state)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise StateMismatchError for a state of another sampler."""
        self._sampler.position_of(state)

    def close(self) -> None:
        """Stop the running pass and close the files; a later pass opens them again."""
        self._end_pass_and_tracking()
        self._drop_continued_pass()

    def _end_pass_and_tracking(self) -> None:
        """End the running pass, and the tracking of a framework's passes."""
        self._end_pass()
        self.run.stop_tracking()

    def _end_pass(self) -> None:
        """End the running pass, if there is one: its loop, and its threads or workers."""
        if self._current_pass is not None:
            batches, self._current_pass = self._current_pass, None
            self.run.end()
            self.meter.end()
            with suppress(ValueError):  # a generator that another thread runs, and will close
                batches.close()
