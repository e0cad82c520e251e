"""Build the user's sampler again and again, and draw from it as a training loop does."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np

from twinfeed.loaders.audit.declared import Declared
from twinfeed.loaders.audit.isolation import OutOfTimeError, isolated, random_states
from twinfeed.samplers.types import Int64s

PARAMETERS = ("rank", "world_size", "epoch", "seed", "start", "workers")
METHODS = ("set_epoch", "state_dict", "load_state_dict")
_PARTS = ("", "sampler.", "batch_sampler.", "batch_sampler.sampler.", "dataset.")


class StoppedError(Exception):
    """The sampler did something in place of an answer; the text says what, as a phrase."""


class TimeOverError(StoppedError):
    """The seconds of the audit are over."""


@dataclass(frozen=True, eq=False)
class DrawnPass:
    """The ids of a pass, and the number of ids of each item. `ended` is False if it was cut,
    `length` is what `len` said, and `seconds` are those to the first item and those of all others.
    """

    ids: Int64s
    sizes: Int64s
    batched: bool
    ended: bool
    length: int | str | None
    seconds: tuple[float, float]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def key(self) -> bytes:
        """The ids as bytes, which are equal for equal passes."""
        return self.ids.tobytes()

    def after(self, items: int) -> Int64s:
        """Return the ids after the first items."""
        return self.ids[int(self.sizes[:items].sum()) :]

    def window(self, first: int, stop: int) -> DrawnPass:
        """Return the items that start at the ids from `first` to `stop`, as a pass."""
        starts = np.cumsum(self.sizes) - self.sizes
        inside = (starts >= first) & (starts < stop)
        ids = self.ids[np.repeat(inside, self.sizes)]
        return replace(self, ids=ids, sizes=self.sizes[inside])

    def batch_sizes(self, size: int | None) -> Int64s:
        """Return the sizes of batches; of single ids, `size` make a batch, if it is known."""
        if self.batched or size is None:
            return self.sizes
        return np.diff(np.append(np.arange(0, len(self.ids), size), len(self.ids)))


@dataclass(frozen=True, eq=False)
class Stream:
    """The passes of a new sampler, which of `METHODS` it has, and the global random states around
    the first pass.
    """

    passes: list[DrawnPass]
    methods: set[str]
    states: tuple[dict[str, bytes], dict[str, bytes]]
    seconds: float  # to build it


def parameters_of(make: Callable[..., Any]) -> dict[str, Any]:
    """Return which of PARAMETERS a function takes, and their defaults; TypeError for others."""
    try:
        signature = inspect.signature(make)
        defaults = {name: p.default for name, p in signature.parameters.items()}
        takes = {name: defaults[name] for name in PARAMETERS if name in defaults}
        signature.bind(**takes)
    except ValueError:  # of a builtin
        return {}
    except TypeError as error:
        rule = f"that builds a sampler, and takes no other names than {', '.join(PARAMETERS)}"
        raise TypeError(f"make must be a function {rule}: {error}") from None
    return {name: 0 if value is inspect.Parameter.empty else value for name, value in takes.items()}


def method_of(sampler: Any, name: str) -> Any:
    """Return a method of an object, or of the sampler that it iterates over; else None."""
    for part in _PARTS:
        with suppress(AttributeError):
            if callable(method := attrgetter(part + name)(sampler)):
                return method
    return None


class Maker:
    """Builds samplers by `make`, and draws from them; what they raise becomes a `StoppedError`."""

    def __init__(self, make: Callable[..., Any], declared: Declared) -> None:
        self.takes = parameters_of(make)
        self.until = time.monotonic() + declared.max_seconds
        self._make, self._declared = make, declared
        self._where, self._most, self._items = "", 0, list[Any]()

    @contextmanager
    def running(
        self, where: str, rank: int = 0, world_size: int = 1, *, salt: int = 0
    ) -> Iterator[None]:
        """Run as a rank. An error of the sampler becomes a phrase that says where it was."""
        self._where, self._items = where, []
        self._most = self._declared.most // world_size + 1000
        of_rank = f"rank {rank} of {world_size}, " if world_size > 1 else ""
        pretends = world_size == 1 or not self._declared.processes
        try:
            with isolated(rank, world_size, salt=salt, until=self.until, pretend=pretends):
                yield
        except OutOfTimeError:
            raise TimeOverError(
                f"{of_rank}{self._where}: {len(self._items):,} items came, then the "
                f"{self._declared.max_seconds:g} s were over: a hang, or too many records"
            ) from None
        except (Exception, SystemExit) as error:
            text = str(error) if isinstance(error, StoppedError) else phrase(error)
            if world_size > 1 and pretends and ("ollective" in text or not str(error)):
                text += "; if it is a collective of torch.distributed, pass processes=True"
            raise StoppedError(f"{of_rank}{self._where}: {text}") from None

    def build(self, **arguments: Any) -> Any:
        """Build a sampler; it gets those of the arguments that `make` takes, or their defaults."""
        takes = self.takes.items()
        sampler = self._make(**{name: arguments.get(name, default) for name, default in takes})
        if not hasattr(sampler, "__iter__") and not hasattr(sampler, "__getitem__"):
            raise StoppedError(f"make returned {str(sampler)[:60]}, which cannot be iterated")
        return sampler

    def set_epoch(self, sampler: Any, epoch: int) -> None:
        """Call `set_epoch`, if there is one, unless `make` takes the epoch."""
        if "epoch" not in self.takes and (method := method_of(sampler, "set_epoch")):
            method(epoch)

    def draw(
        self, epochs: Iterable[int], rank: int = 0, world_size: int = 1, salt: int = 0, **more: Any
    ) -> Stream:
        """Draw epochs as a training loop does: of one sampler, `set_epoch` before each pass.

        A generator is built anew for each pass. An endless pass is the only one.
        """
        passes, states, sampler = list[DrawnPass](), list[dict[str, bytes]](), None
        with self.running("make", rank, world_size, salt=salt):
            states.append(random_states())
            for epoch in epochs:
                if sampler is None or "epoch" in self.takes:
                    self._where, started = "make", time.perf_counter()
                    sampler = self.build(rank=rank, world_size=world_size, epoch=epoch, **more)
                    seconds = time.perf_counter() - started
                    more.pop("start", None)
                    methods = {name for name in METHODS if method_of(sampler, name)}
                self._where = f"epoch {epoch}"
                self.set_epoch(sampler, epoch)
                length, started = length_of(sampler), time.perf_counter()
                iterator = iter(sampler)  # which may draw the whole epoch
                passes.append(self.read(iterator, length, started))
                if len(passes) == 1:
                    states.append(random_states())
                if not passes[-1].ended:
                    break
                sampler = None if iterator is sampler else sampler
        return Stream(passes, methods, (states[0], states[1]), seconds)

    def read(
        self, items: Iterable[Any], length: int | str | None = None, started: float = 0.0
    ) -> DrawnPass:
        """Draw a pass up to its end, or to as many ids as are wanted and twice its `length`."""
        iterator = iter(items)
        self._items = [*islice(iterator, 1)]
        first = time.perf_counter()
        ids, _, batched = self._arrays()
        most = max(self._most // max(1, len(ids)), 2 * length if isinstance(length, int) else 0)
        self._items.extend(islice(iterator, most))  # what came is counted, if it raises
        ended, seconds = len(self._items) <= most, (first - started, time.perf_counter() - first)
        ids, sizes, batched = self._arrays()
        self._items = []  # a process may get this object
        if not ended and not len(ids):
            raise StoppedError(f"{most:,} empty batches came in a row")
        return DrawnPass(ids, sizes, batched, ended, length, seconds)

    def _arrays(self) -> tuple[Int64s, Int64s, bool]:
        """Return the ids of the items, the number of ids of each, and whether they are batches."""
        find, items = self._declared.ids, self._items
        items = items if find is None else [*map(find, items)]
        if {*map(type, items)} <= {int}:  # fast
            whole = np.array(items, dtype=None if items else np.int64)
            if whole.dtype == np.int64:
                return whole, np.ones_like(whole), False
        arrays = [ids_of(item) for item in items]
        batched = arrays[0].ndim > 0
        for position, array in enumerate(arrays):
            if (array.ndim > 0) != batched:
                kind = "one id" if batched else "a batch"
                raise StoppedError(f"item {position} is {kind}, and those before are not")
        sizes = np.array([array.size for array in arrays])
        return np.concatenate([array.reshape(-1) for array in arrays]), sizes, batched


def ids_of(item: Any) -> Int64s:
    """Return an id, or the ids of a batch, however it is nested, as an array."""
    try:
        array = np.asarray(item.numpy() if hasattr(item, "numpy") else item)
    except Exception as error:
        if isinstance(item, list | tuple) and isinstance(error, ValueError):  # of unequal lengths
            return np.concatenate([ids_of(part).reshape(-1) for part in item])
        raise StoppedError(f"an item has no ids: {phrase(error)}") from None
    if array.dtype.kind not in "iu" and (array.size or array.dtype.kind != "f"):
        text = f"{type(item).__name__} {str(item)[:40]}"
        advice = "pass ids=, a function that takes an item and returns its ids"
        raise StoppedError(f"an item has no ids: {text}; {advice}")
    return array.astype(np.int64)


def length_of(sampler: Any) -> int | str | None:
    """Return what `len` says: a number, the error that it raises, or None if there is no `len`."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError, AttributeError):
        return None
    except Exception as error:
        return phrase(error)


def phrase(error: BaseException) -> str:
    """Return the type and the text of an error, in one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
