"""A bounded set of open files, shared by the threads of one process."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import ClassVar
from weakref import WeakSet

from twinfeed.loaders.support.fork import PerProcess
from twinfeed.loaders.support.system import file_limit


class Handle:
    """Own a file descriptor, which is closed with the last reference, so never during a read."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


class Handles:
    """An LRU cache of at most `limit` open files. `open_file(number) -> fd` opens a file.

    All caches of a process share a limit: the largest of their limits and of `default_limit()`. So
    a reader that is never closed does not use up the file descriptors of others.
    """

    _caches: ClassVar[WeakSet[Handles]] = WeakSet()
    _lock: ClassVar[PerProcess[threading.Lock]] = PerProcess(threading.Lock)

    def __init__(self, open_file: Callable[[int], int], limit: int) -> None:
        self.limit = limit
        self._open_file = open_file
        self._open: OrderedDict[int, Handle] = OrderedDict()
        with self._lock():
            self._caches.add(self)

    def __len__(self) -> int:
        return len(self._open)

    def get(self, numbers: Iterable[int], /) -> dict[int, Handle]:
        """Return the handle of each file by its number, opening files that are not open.

        The caller must keep a handle while it reads the file: another thread may evict it from the
        cache, and the file is closed with the last reference.
        """
        handles = {}
        for number in numbers:
            try:
                self._open.move_to_end(number)  # the most recently used file is the last one
                handles[number] = self._open[number]
            except KeyError:  # it is not open, or another thread has evicted it just now
                handles[number] = self._open_now(number)
        return handles

    def _open_now(self, number: int) -> Handle:
        """Return the handle of a file that was not open just now, and keep it in the cache."""
        with self._lock():
            if number not in self._open:
                self._close_oldest_if_full()
                self._open[number] = Handle(self._open_or_evict(number))
            return self._open[number]

    def close(self) -> None:
        """Close every file that is not being read."""
        with self._lock():
            self._open.clear()

    def _open_or_evict(self, number: int) -> int:
        """Return the descriptor of a file that is opened now.

        If the process has too many open files, close the least recently used ones of this cache.
        """
        while True:
            try:
                return self._open_file(number)
            except OSError as error:
                if error.errno != errno.EMFILE or not self._open:
                    raise
                self._open.popitem(last=False)

    def _close_oldest_if_full(self) -> None:
        """Make room for another open file, if this cache or all caches of the process are full.

        If this cache is full, close its least recently used file. If all caches together are full,
        close the least recently used file of the largest cache. Together they may have
        `default_limit()` open files; or `limit` files, if the user has allowed this cache more than
        the default, so that it can reach its limit.
        """
        if len(self) >= self.limit:
            self._open.popitem(last=False)
        elif sum(map(len, self._caches)) >= max(self.limit, default_limit()):
            max(self._caches, key=len)._open.popitem(last=False)


def default_limit() -> int:
    """Return a quarter of the number of files that this process may open, but at most 1,024."""
    limit = file_limit()
    return 1024 if limit is None else max(1, min(1024, limit // 4))
