"""The surroundings of a sampler: a rank's environment, known random states, a deadline."""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import numpy as np


class OutOfTimeError(BaseException):
    """The deadline has come. No sampler catches it by `except Exception`."""


def random_states() -> dict[str, bytes]:
    """Return the global random states of python, of numpy, and of torch if it is imported."""
    states: dict[str, Any] = {"random": random.getstate(), "numpy": np.random.get_state()}
    if torch := sys.modules.get("torch"):
        states["torch"] = torch.get_rng_state().numpy()
    return {name: pickle.dumps(state) for name, state in states.items()}


@contextmanager
def seeded(salt: int) -> Iterator[None]:
    """Seed the global random states by `salt`, and put the states back afterwards."""
    states = random_states()
    random.seed(salt)
    np.random.seed(salt)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(salt)
    try:
        yield
    finally:
        random.setstate(pickle.loads(states["random"]))
        np.random.set_state(pickle.loads(states["numpy"]))
        if torch and "torch" in states:
            torch.set_rng_state(torch.from_numpy(pickle.loads(states["torch"])))


def has_alarm() -> bool:
    """Return whether a signal can interrupt what runs here: in the main thread alone."""
    return threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")


@contextmanager
def deadline(until: float) -> Iterator[None]:
    """Raise `OutOfTimeError` at a time of `time.monotonic`, if signals can do so, and not in C."""
    if not has_alarm():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise OutOfTimeError

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, stop)
    # Again and again, as a bare `except:` in a sampler catches the first.
    before = signal.setitimer(signal.ITIMER_REAL, max(0.01, until - started), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if before[0]:  # the caller has a timer, as pytest-timeout has
            remaining = before[0] - (time.monotonic() - started)
            signal.setitimer(signal.ITIMER_REAL, max(0.001, remaining), before[1])


@contextmanager
def isolated(
    rank: int, world_size: int, *, salt: int, until: float, pretend: bool
) -> Iterator[None]:
    """Run as a rank, with random states of `salt`, until a deadline.

    The environment names the rank, as torchrun does, if there are several. With `pretend`,
    `torch.distributed` has a process group in which this is the rank, and whose collectives raise.
    """
    before = dict(os.environ)
    with ExitStack() as stack:
        stack.callback(os.environ.update, before)
        stack.callback(os.environ.clear)
        if world_size > 1 or pretend:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
            os.environ.update({name: str(value) for name, value in names.items()})
        if pretend and "torch" in sys.modules:
            from twinfeed.loaders.torch.process_groups import pretended_group

            stack.enter_context(pretended_group(rank, world_size))
        stack.enter_context(seeded(salt))
        stack.enter_context(deadline(until))
        yield
