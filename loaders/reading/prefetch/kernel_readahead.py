"""Have the kernel read ranges of local files ahead."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from twinfeed.loaders.support.system import advise


class KernelReadahead:
    """Ask the kernel to read ranges of open files ahead (`posix_fadvise`), on a thread.

    The call allocates the pages, and blocks while the disk is busy, so the reading threads do not
    make it. The thread starts with the first range, and ends when no more are queued.
    """

    def __init__(self) -> None:
        self._queue: deque[Iterator[tuple[int, int, int]]] = deque()
        self._thread: threading.Thread | None = None  # None: it ends, and takes nothing more
        self._lock = threading.Lock()
        self._stopped = False

    def add(self, ranges: Iterator[tuple[int, int, int]], /) -> None:
        """Queue ranges (descriptor, start, stop) that the kernel should read ahead."""
        with self._lock:
            self._stopped = False
            self._queue.append(ranges)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="twinfeed-advice")
                self._thread.start()

    def close(self) -> None:
        """Drop the queued ranges, and wait for the thread to end."""
        with self._lock:
            self._stopped = True
            self._queue.clear()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        """Ask the kernel to read the queued ranges, until the queue is empty."""
        while True:
            with self._lock:  # or `add` would queue ranges for a thread that ends
                if not self._queue:
                    self._thread = None
                    return
                ranges = self._queue.popleft()
            for fd, start, stop in ranges:
                if self._stopped:
                    break
                advise(fd, start, stop - start)
