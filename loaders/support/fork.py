"""Values of one process that a forked child does not share, and children that end with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from multiprocessing import parent_process
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

T = TypeVar("T")

_CHECK_INTERVAL = 1.0  # seconds between two checks whether the parent is alive


class PerProcess(Generic[T]):
    """A value per process, made at the first call: a forked child does not share its parent's.

    After a fork, a lock of the parent may stay locked for ever, and its threads do not exist. The
    child does not free the parent's value, whose destructor might wait for such a thread.

    Pickling and copying leave the values out.

    >>> folders = PerProcess(dict)
    >>> folders() is folders()
    True
    """

    def __init__(self, make: Callable[[], T], /) -> None:
        self._make = make
        self._values: dict[int, T] = {}

    def __call__(self) -> T:
        """Return the value of this process."""
        process = os.getpid()
        if process not in self._values:
            # If two threads make a value at the same time, both get the first one.
            self._values.setdefault(process, self._make())
        return self._values[process]

    def __reduce__(self) -> tuple[type[PerProcess[T]], tuple[Callable[[], T]]]:
        return PerProcess, (self._make,)

    def pop(self) -> T | None:
        """Return the value of this process, if there is one; the next call makes another."""
        return self._values.pop(os.getpid(), None)


@cache
def end_with_parent() -> None:
    """Let this child process of multiprocessing exit soon after its parent has ended."""
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent, os.getppid()), daemon=True).start()


def _exit_after(parent: BaseProcess, parent_id: int) -> None:
    """Exit this process when its parent has ended; `parent_id` is the parent's process id."""
    # Neither check is enough alone. The sentinel, a pipe that is closed when the parent ends, stays
    # open if a process that was forked later has inherited it. The id of the parent process does
    # not change if a fork server has started this process, since the server is its parent.
    while os.getppid() == parent_id and not wait([parent.sentinel], _CHECK_INTERVAL):
        pass
    os._exit(1)
