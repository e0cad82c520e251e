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

# Seconds between two checks of the parent.
_INTERVAL = 1.0


class PerProcess(Generic[T]):
    """A value per process, made at the first call: a forked child does not share its parent's.

    After a fork, a lock of the parent may stay locked for ever, and its threads do not exist. The
    child does not free the parent's value, whose destructor might wait for such a thread.

    Pickling and copying leave the values out.

    >>> lock = PerProcess(threading.Lock)
    >>> with lock():
    ...     lock() is lock()
    True
    """

    def __init__(self, make: Callable[[], T], /) -> None:
        self._make = make
        self._values: dict[int, T] = {}

    def __call__(self) -> T:
        """Return the value of this process."""
        process = os.getpid()
        if process not in self._values:
            self._values.setdefault(process, self._make())  # two threads get the same
        return self._values[process]

    def __reduce__(self) -> tuple[type[PerProcess[T]], tuple[Callable[[], T]]]:
        return PerProcess, (self._make,)

    def pop(self) -> T | None:
        """Return the value of this process, if there is one; the next call makes another."""
        return self._values.pop(os.getpid(), None)


@cache
def end_with_parent() -> None:
    """End this child process of multiprocessing soon after its parent, which may be killed.

    A child that reads from a pipe, or writes to a full one, may have the pipe's other end itself:
    it would wait for ever. In a process that is no such child, do nothing.
    """
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent, os.getppid()), daemon=True).start()


def _exit_after(parent: BaseProcess, parent_id: int) -> None:
    """Exit this process when its parent has ended; `parent_id` is the parent's process id."""
    # A process that was forked after this one may keep the sentinel's pipe open, and the parent of
    # a child of a fork server is the server.
    while os.getppid() == parent_id and not wait([parent.sentinel], _INTERVAL):
        pass
    os._exit(1)
