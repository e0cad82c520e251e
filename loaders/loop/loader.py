"""`Loader`, the base class of loaders: it has the position, and runs one pass at a time."""

from __future__ import annotations

import atexit
import ctypes
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import count
from operator import attrgetter
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, Protocol
from weakref import WeakSet

from twinfeed.loaders.loop.external_passes import ExternalPasses
from twinfeed.loaders.loop.ledger import Ledger
from twinfeed.loaders.making.meter import Meter, PassReport
from twinfeed.loaders.support.closing import Closing
from twinfeed.samplers import BatchStream
from twinfeed.samplers.cursor import Cursor
from twinfeed.samplers.processes import warn_unsharded

_PASS_WAS_ENDED = (
    "this pass was ended before its last batch, by another pass over the same loader, by its "
    "set_epoch, load_state_dict or close, or by a fork: give each loop a loader of its own"
)
"""The error of a loop when something else has ended its pass."""

_NO_ARRAY = (
    "a {} is no array: in Keras, train by ResumeCallback(loader, folder).fit(model, ('x', 'y')), "
    "or give loader.dataset.map(pairs) of a TensorFlowLoader or loader.dataloader(pairs) of a "
    "TorchLoader"
)

_END = object()

_LOADERS: WeakSet[Loader[Any]] = WeakSet()  # loaders to call after a fork and at exit


def _after_fork() -> None:
    """In a forked child, drop the running passes of all loaders."""
    for loader in list(_LOADERS):
        loader._reset_after_fork()


def _at_exit() -> None:
    """End all running passes before the interpreter clears the modules that this needs."""
    for loader in list(_LOADERS):
        loader._end_pass()


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
    """Add the names of the batch's fields to a KeyError in the `with` block."""
    try:
        yield
    except KeyError as error:
        if isinstance(batch, Mapping):
            error.add_note(f"the fields of a batch are {', '.join(batch)}")
        raise


class Pass(Protocol):
    """An iterator over the batches of a pass; `close` stops its threads or workers."""

    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
    def close(self) -> None: ...


class Loader(Closing, Generic[B]):
    """Iterate over the batches of a stream, and count the batches that the loop has received.

    - A pass begins with the first batch that the loop has not received, whatever ended the last
      pass. After the last batch of an epoch comes the next epoch. `set_epoch` begins an epoch.
    - In an evaluation (`ExactOnceBatchSampler`) each pass is whole. Only the first pass after
      `load_state_dict` is a remainder.
    - There is one pass at a time. Within a loop, another pass, `set_epoch`, `load_state_dict` or
      `close` ends the loop with RuntimeError. Nothing is read before the first `next`.
    - A copy, a pickle and a forked child go on after the batches that the loop received, in a pass
      of their own. In the child, the parent's loop ends with RuntimeError.

    For a type checker a batch is a `dict[str, Any]`. To give it the names of the fields, name a
    `TypedDict`, as in `NumpyLoader[MyBatch](feed)`. Nothing is checked at run time.

    Some loaders also feed a framework that does not say what it received: see `ExternalPasses`.

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

    _counting_advice = "loop over the loader itself"  # advice of a warning

    _current_pass: Pass | None = None
    _not_copied: ClassVar[tuple[str, ...]] = ("_current_pass",)  # new in a copy or a child
    _shared: ClassVar[tuple[str, ...]] = ("_sampler",)  # shared by a shallow copy

    def __init__(
        self, sampler: BatchStream, /, *, ledger: str | os.PathLike[str] | None = None
    ) -> None:
        self._sampler = sampler
        self._cursor = Cursor(sampler)
        self.meter = Meter()
        self._received_epochs: set[int] = (
            set()
        )  # epochs of the batches received since load_state_dict
        self._loaded_position = 0, 0  # the position that load_state_dict set
        self._warned_of_jump = False  # whether set_epoch has warned
        self._position_was_set = False  # whether set_epoch or load_state_dict said where to begin
        stream = getattr(self, "feed", sampler)
        self._ledger = None if ledger is None else Ledger(ledger, stream)
        self.external_passes = ExternalPasses(
            self._cursor, advice=self._counting_advice, ledger=self._ledger
        )
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
        """Make the next pass start at the current step, also in an evaluation.

        Without this, each pass of an evaluation starts at step 0.
        """
        if self._cursor.step:
            self._cursor.load_state_dict(self._cursor.state_dict())

    def _reset_after_fork(self) -> None:
        """Drop the running pass in a forked child, without ending the parent's threads."""
        # An extra reference keeps the attributes from being destroyed, even at exit: destructors
        # would end the parent's workers, or wait for threads that the child does not have.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(vars(self).copy()))
        for name in self._not_copied:
            vars(self).pop(name, None)
        self._start_next_pass_here()
        self.meter = Meter()  # a thread of the parent may hold the old lock

    @abstractmethod
    def _start_pass(self, epoch: int, start: int) -> Pass:
        """Start a pass over the steps of an epoch, from step `start` on, and return it."""

    def __repr__(self) -> str:
        stream = getattr(self, "feed", self._sampler)
        where = f"epoch {self.epoch}, step {self.step} of {len(self)}"
        return f"<{type(self).__name__} of {stream!r}: {where}>"

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self._sampler)

    def __array__(self, *_: object, **__: object) -> NoReturn:
        """Raise TypeError that says how to train with Keras, which takes the loader for an array.

        Without this method, Keras would only say that the type is not recognized.
        """
        raise TypeError(_NO_ARRAY.format(type(self).__name__))

    @property
    def shape(self) -> NoReturn:
        """Raise AttributeError that says how to train with Keras, whose `fit` asks for a shape."""
        raise AttributeError(_NO_ARRAY.format(type(self).__name__))

    def __iter__(self) -> Iterator[B]:
        """Iterate over the batches, from the position to the end of the epoch."""
        self._end_pass_and_tracking()
        epoch, start = self._cursor.start_pass()
        self.meter.start(start)
        running = self._start_pass(epoch, start)
        yield from self._iterate_pass(running, self._count_received, batches=len(self) - start)

    def _iterate_pass(
        self,
        running: Pass,
        received: Callable[[], bool],
        *,
        batches: int | None = None,
        divided: bool = False,
    ) -> Iterator[Any]:
        """Yield the batches of a pass, and end the pass after the last one.

        Args:
            running: the pass. It is `self._current_pass` until something else ends it.
            received: is called before each batch is yielded, to count it. It returns whether the
                batch is the last one of its epoch.
            batches: the number of batches, if it is known.
            divided: whether something else gives each process its part of the batches.

        Raises:
            RuntimeError: something else has ended the pass, such as another pass.
        """
        if not divided:
            warn_unsharded(self._sampler)
        self._current_pass = running
        try:
            for batch in self._timed(running, batches):
                is_last = received()
                yield batch
                if self._current_pass is not running:
                    if is_last:
                        return
                    raise RuntimeError(_PASS_WAS_ENDED)
        finally:
            if self._current_pass is running:  # no later pass has begun
                self._end_pass()

    def _timed(self, running: Pass, batches: int | None) -> Iterator[Any]:
        """Yield the batches of a pass, and measure how long the loop waits for each.

        `batches` is their number, or None if the iterator decides when the pass ends.

        Raises:
            RuntimeError: something else has ended the pass, or it has fewer than `batches`.
        """
        for _ in count() if batches is None else range(batches):
            requested = perf_counter_ns()
            try:
                batch = next(running, _END)
                was_ended = batch is _END and batches is not None
            except Exception:
                if self._current_pass is running:
                    raise
                was_ended = True  # the error follows from the end of the pass
            if was_ended or self._current_pass is not running:  # another thread has ended the pass
                running.close()
                raise RuntimeError(_PASS_WAS_ENDED)
            if batch is _END:
                return
            self.meter.received(requested)
            yield batch

    def report(self) -> PassReport:
        """Return how long each stage of the last pass took, so far: see `PassReport`.

        If a loop waits at many steps, the data slow the loop down. Print the report, or take
        `as_dict()` for a log.
        """
        return self.meter.report()

    def _count_received(self) -> bool:
        """Count a batch that the loop has received; return whether it is the last of its epoch."""
        self._received_epochs.add(self._cursor.epoch)
        if self._ledger is not None:
            self._ledger.delivered(self.global_step)
        return self._cursor.advance()

    @property
    def epoch(self) -> int:
        """Epoch of the next batch that the loop receives."""
        return self._cursor.epoch

    @property
    def step(self) -> int:
        """Step of the next batch that the loop receives, in `[0, len(loader))`."""
        return self._cursor.step

    @property
    def global_step(self) -> int:
        """Number of batches before the position, over all epochs: a step for logs.

        It is `epoch * len(loader) + step`. After the last batch of an epoch `step` is 0 again, and
        `global_step` goes on. A saved state restores both.
        """
        return self.epoch * len(self) + self.step

    def set_epoch(self, epoch: int, /) -> None:
        """Set the epoch of the next pass. After `load_state_dict`, the loaded epoch keeps its step.

        Warns, once, if a training epoch that the loop has received starts again, or if the rest of
        an epoch that the loop has started is skipped.
        """
        self._end_pass_and_tracking()
        self._position_was_set = True
        previous_epoch, step = self.epoch, self.step
        self._cursor.set_epoch(epoch)
        if not self._sampler.evaluation:
            self._warn_of_jump(previous_epoch, step)

    def _warn_of_jump(self, previous_epoch: int, step: int) -> None:
        """Warn, once, if `set_epoch` has repeated an epoch, or skipped the rest of an epoch.

        `previous_epoch` and `step` are the position before `set_epoch`.
        """
        problem = ""
        if self.epoch in self._received_epochs and self.step == 0:
            problem = (
                f"epoch {self.epoch} begins again by set_epoch, so the same batches come again: "
                f"give each training a loader of its own"
            )
        elif previous_epoch in self._received_epochs and step and self.epoch != previous_epoch:
            missing, (loaded_epoch, loaded_step) = len(self) - step, self._loaded_position
            advice = f"for epochs of {step} batches set batches_per_epoch={step} of the sampler"
            if missing == loaded_step and loaded_epoch not in self._received_epochs:
                advice = (
                    f"the trainer counts the {missing} that the loaded state has of epoch "
                    f"{loaded_epoch}: resume from a checkpoint that was saved while fit ran"
                )
            problem = (
                f"{missing} of {len(self)} batches of epoch {previous_epoch} do not come, "
                f"as set_epoch began epoch {self.epoch}: {advice}"
            )
        if problem and not self._warned_of_jump:
            self._warned_of_jump = True
            warnings.warn(problem, stacklevel=3)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, with the stream and the records: a small dict that JSON can hold.

        A loader with another number of ranks or workers, with another container of the same
        records, or of another framework can continue from the state.
        """
        return self._cursor.state_dict()

    def state_at(self, epoch: int, step: int, /) -> dict[str, Any]:
        """Return the state before a step; `step=len(loader)` is the end of the epoch."""
        return {**self.state_dict(), **self._sampler.state_at(epoch, step)}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Set the position to that of a state: the next pass continues there.

        Warns if the state has no digest of the records, so that they cannot be compared.

        Raises:
            StateMismatchError: a state of other records or another sampler.
        """
        self._end_pass_and_tracking()
        self._check_state(state)
        self._cursor.load_state_dict(state)
        self._position_was_set = True
        self._received_epochs.clear()
        self._loaded_position = self.epoch, self.step
        if self._ledger is not None:
            self._ledger.loaded(self.global_step)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise StateMismatchError for a state of another sampler."""
        self._sampler.position_of(state)

    def close(self) -> None:
        """Stop the running pass and close the files; a later pass opens them again."""
        self._end_pass_and_tracking()
        if self._ledger is not None:
            self._ledger.close()

    def _end_pass_and_tracking(self) -> None:
        """End the running pass, and the tracking of a framework's passes."""
        self._end_pass()
        self.external_passes.stop_tracking()

    def _end_pass(self) -> None:
        """End the running pass, if there is one; see `_stop`, which also ends the tracking."""
        if self._current_pass is not None:
            running, self._current_pass = self._current_pass, None
            self._cursor.end()
            self.meter.end()
            with suppress(ValueError):  # a generator that another thread runs, and will close
                running.close()
