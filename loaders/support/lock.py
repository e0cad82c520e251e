"""A lock that an object keeps through a fork and a pickle."""

from __future__ import annotations

import _thread
import os
from weakref import WeakSet

_LOCKS: WeakSet[Lock] = WeakSet()


class Lock(_thread.RLock):  # type: ignore[misc]
    """A reentrant lock. A pickle and a forked child have one of their own, which nobody has locked:
    a thread that has locked that of the parent does not exist there.

    >>> lock = Lock()
    >>> with lock, lock:
    ...     print("locked")
    locked
    """

    def __init__(self) -> None:
        _LOCKS.add(self)

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()


def _after_fork() -> None:
    """In a forked child, make all locks anew."""
    for lock in list(_LOCKS):
        lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_after_fork)
