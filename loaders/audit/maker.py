"""Build the user's sampler again and again, and draw passes from it as a training loop does."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from twinfeed.loaders.audit.isolation import OutOfTimeError, isolated
from twinfeed.loaders.audit.promises import Promises
from twinfeed.loaders.audit.streams import NotAskedError, Pass, PassReader, StoppedError, phrase

PARAMETERS = ("rank", "world_size", "epoch", "seed", "start", "workers")
_PARTS = ("", "sampler", "batch_sampler", "batch_sampler.sampler", "dataset")


class TimeOverError(StoppedError):
    """The seconds of the audit are over."""


def parameters_of(make: Callable[..., Any]) -> frozenset[str]:
    """Return which of PARAMETERS a function takes; TypeError if it needs another one."""
    if not callable(make):
        raise TypeError(f"make must be a function that builds a sampler, got {make!r}")
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:  # of a builtin
        return frozenset()
    for p in parameters:
        named = p.name in PARAMETERS and p.kind is not p.POSITIONAL_ONLY
        if not named and p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            raise TypeError(
                f"make must take no other names than {', '.join(PARAMETERS)}, got {p.name!r}: give "
                "it a default"
            )
    return frozenset(p.name for p in parameters) & frozenset(PARAMETERS)


def method_of(sampler: Any, name: str) -> Callable[..., Any] | None:
    """Return a method of an object, or of the sampler that it iterates over."""
    for path in _PARTS:
        part = sampler
        for step in filter(None, path.split(".")):
            part = getattr(part, step, None)
        method = getattr(part, name, None)
        if callable(method):
            return method  # type: ignore[no-any-return]
    return None


class Maker:
    """Builds samplers by `make`, and draws from them; what they raise becomes a `StoppedError`."""

    def __init__(self, make: Callable[..., Any], promises: Promises) -> None:
        self.takes = parameters_of(make)
        self.until = time.monotonic() + promises.max_seconds
        self._make = make
        self._promises = promises
        self._reader = PassReader(promises.ids, promises.most)
        self._where = ""

    @contextmanager
    def running(
        self, where: str, rank: int = 0, world_size: int = 1, *, salt: int = 0
    ) -> Iterator[None]:
        """Run as a rank. An error of the sampler becomes a phrase that says where it was."""
        self._where, self._reader.count = where, 0
        error_type: type[StoppedError]
        try:
            with isolated(
                rank, world_size, salt=salt, until=self.until, pretend=not self._promises.processes
            ):
                yield
            return
        except OutOfTimeError:
            error_type = TimeOverError
            seconds = self._promises.max_seconds
            text = f"{self._reader.progress:,} items came, then the {seconds:g} s were over: a hang"
            text += ", or too many records"
        except NotAskedError:
            raise
        except StoppedError as error:
            error_type, text = StoppedError, str(error)
        except (Exception, SystemExit) as error:
            error_type, text = StoppedError, phrase(error)
            if (
                world_size > 1
                and not self._promises.processes
                and ("ollective" in text or not str(error))
            ):
                text += "; if it is a collective of torch.distributed, pass processes=True"
        of_rank = f"rank {rank} of {world_size}, " if world_size > 1 else ""
        raise error_type(f"{of_rank}{self._where}: {text}")

    def build(self, **arguments: Any) -> Any:
        """Build a sampler; it gets those of the arguments that `make` takes."""
        sampler = self._make(**{name: arguments[name] for name in self.takes & arguments.keys()})
        if not hasattr(sampler, "__iter__") and not hasattr(sampler, "__getitem__"):
            raise StoppedError(f"make returned {str(sampler)[:60]}, which cannot be iterated")
        return sampler

    def read(self, items: Iterable[Any], length: int | str | None = None) -> Pass:
        """Draw one pass."""
        return self._reader.read(items, length)

    def set_epoch(self, sampler: Any, epoch: int) -> None:
        """Call `set_epoch`, where there is one, unless `make` takes the epoch."""
        method = None if "epoch" in self.takes else method_of(sampler, "set_epoch")
        if method is not None:
            method(epoch)

    def passes(
        self,
        epochs: Iterable[int],
        rank: int = 0,
        world_size: int = 1,
        *,
        salt: int = 0,
        **arguments: Any,
    ) -> list[Pass]:
        """Draw epochs as a training loop does: of one sampler, `set_epoch` before each pass.

        A sampler that is its own iterator, as a generator is, has one pass, and is built anew.
        `start`, if it is an argument, is of the first epoch. An endless pass is the only one.
        """
        found: list[Pass] = []
        sampler: Any = None
        self._reader.most = self._promises.most // world_size + 1000
        with self.running("make", rank, world_size, salt=salt):
            for epoch in epochs:
                if sampler is None or "epoch" in self.takes:
                    self._where = "make"
                    sampler = self.build(rank=rank, world_size=world_size, epoch=epoch, **arguments)
                    arguments.pop("start", None)
                self._where = f"epoch {epoch}"
                self.set_epoch(sampler, epoch)
                length = length_of(sampler)
                iterator = iter(sampler)
                found.append(self.read(iterator, length))
                if not found[-1].ended:
                    break
                if iterator is sampler:
                    sampler = None
        return found


def length_of(sampler: Any) -> int | str | None:
    """Return what `len` says: a number, the error that it raises, or None if there is no `len`."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError, AttributeError):
        return None
    except Exception as error:
        return phrase(error)
