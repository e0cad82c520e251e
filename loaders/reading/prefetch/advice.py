"""Advice to the kernel: which pages of local files a plan will read."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from twinfeed.loaders.reading.prefetch.ranges import Extents
from twinfeed.loaders.reading.prefetch.read_plan import Fetch, ReadPlan, Release
from twinfeed.loaders.support.system import advise, cold

_PROBED = 16
"""Ranges that are probed for whether reading waits: a few may be in memory by chance."""

Opened = Callable[[Extents], Iterator[tuple[int, int, int]]]
"""Yield the descriptor, the start and the stop of each range whose file can be opened."""


class Advice:
    """Advise the kernel of what a plan will read, on a thread that ends after the last advice.

    The calls need a thread: each call takes memory for its pages, and waits for a busy disk.
    """

    def __init__(self) -> None:
        self._waiting: deque[Iterator[tuple[int, int, int]]] = deque()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def apply(self, opened: Opened, plan: ReadPlan, event: Fetch | Release, /) -> None:
        """Advise of the ranges of an event, or disable a probing plan that nothing would wait for.

        The page cache of the kernel needs no `Release`.
        """
        if isinstance(event, Release):
            return
        if plan.probing:
            some = event.ranges[:: max(1, len(event.ranges) // _PROBED)][:_PROBED]
            plan.enabled = any(cold(fd, stop - 1) for fd, _, stop in opened(some))
            plan.probing = False
        if plan.enabled:
            self.add(opened(event.ranges))

    def add(self, opened: Iterator[tuple[int, int, int]], /) -> None:
        """Advise of ranges of open files, after those that wait."""
        self._stopped = False
        self._waiting.append(opened)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="twinfeed-advice")
            self._thread.start()

    def close(self) -> None:
        """Stop the advice."""
        self._stopped = True
        self._waiting.clear()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with suppress(IndexError):  # nothing waits
            while not self._stopped:
                for fd, start, stop in self._waiting.popleft():
                    if self._stopped:
                        break
                    advise(fd, start, stop - start, "WILLNEED")
