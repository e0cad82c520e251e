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
    """Own a file descriptor, and close it with the last reference, so never during a read."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


class Handles:
    """Keep the files used last open, at most `limit` files. `open_file(number) -> fd` opens a file.

    All pools of a process share a limit: the largest of their limits and of `default_limit()`. So a
    reader that is never closed does not use up the files of others.
    """

    _pools: ClassVar[WeakSet[Handles]] = WeakSet()
    _lock: ClassVar[PerProcess[threading.Lock]] = PerProcess(threading.Lock)

    def __init__(self, open_file: Callable[[int], int], limit: int) -> None:
        self.limit = limit
        self._open_file = open_file
        self._open: OrderedDict[int, Handle] = OrderedDict()
        with self._lock():
            self._pools.add(self)

    def __len__(self) -> int:
        return len(self._open)

    def get(self, numbers: Iterable[int], /) -> dict[int, Handle]:
        """Return the handle of each file. Keep the handles as long as the files are read."""
        open_files, result = self._open, {}
        with self._lock():
            for number in numbers:
                handle = open_files.get(number)
                if handle is None:
                    self._make_room()
                    handle = open_files[number] = Handle(self._open_with_room(number))
                else:
                    open_files.move_to_end(number)
                result[number] = handle
        return result

    def close(self) -> None:
        """Drop every file."""
        with self._lock():
            self._open.clear()

    def _open_with_room(self, number: int) -> int:
        """Open a file. Drop other files where the process may open no more."""
        while True:
            try:
                return self._open_file(number)
            except OSError as error:
                if error.errno != errno.EMFILE or not self._open:
                    raise
                self._open.popitem(last=False)

    def _make_room(self) -> None:
        """Drop the file used longest ago, from this pool if it is full, else from the fullest pool
        if all pools together are full.
        """
        if len(self) >= self.limit:
            self._open.popitem(last=False)
        elif sum(map(len, self._pools)) >= max(self.limit, default_limit()):
            max(self._pools, key=len)._open.popitem(last=False)


def default_limit() -> int:
    """Return a quarter of the files this process may open, and no more than 1,024."""
    limit = file_limit()
    return 1024 if limit is None else max(1, min(1024, limit // 4))
