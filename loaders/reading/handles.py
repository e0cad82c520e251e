"""A bounded set of open files, shared by the threads of one process."""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable


class Handle:
    """Own a file descriptor; it closes when the last reference goes, so that no reader ever loses
    one in use.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


class Handles:
    """Keep the files used last open, at most `limit` of them, opened by `open_file(number) -> fd`
    when first asked for.
    """

    def __init__(self, open_file: Callable[[int], int], limit: int) -> None:
        self.limit = limit
        self._open_file = open_file
        self._lock = threading.Lock()
        self._held: OrderedDict[int, Handle] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, numbers: Iterable[int], /) -> dict[int, Handle]:
        """Return the handle of each file; hold on to the result for as long as they are read."""
        held, result = self._held, {}
        with self._lock:
            for number in numbers:
                handle = held.get(number)
                if handle is None:
                    while len(held) >= self.limit:
                        held.popitem(last=False)
                    handle = held[number] = Handle(self._open_file(number))
                else:
                    held.move_to_end(number)
                result[number] = handle
        return result

    def close(self) -> None:
        """Let go of every file."""
        with self._lock:
            self._held.clear()


def default_limit() -> int:
    """Return a quarter of the files this process may open, and no more than 1,024."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft == resource.RLIM_INFINITY else max(1, min(1024, soft // 4))
