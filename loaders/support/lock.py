"""A lock that an object keeps through a fork and a pickle."""

from __future__ import annotations

import threading

from twinfeed.loaders.support.fork import PerProcess


class Lock:
    """A reentrant lock. A pickle and a forked child have one of their own, which nobody has locked:
    a thread that has locked that of the parent does not exist there.

    >>> lock = Lock()
    >>> with lock, lock:
    ...     print("locked")
    locked
    """

    def __init__(self) -> None:
        self._lock = PerProcess(threading.RLock)

    def __enter__(self) -> None:
        self._lock().acquire()

    def __exit__(self, *error: object) -> None:
        self._lock().release()
