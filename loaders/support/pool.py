"""Processes that interrupts do not reach: who started them ends them.

Ctrl-C reaches every process of a terminal. A worker would print where it was interrupted, often in
an import. So workers are started while interrupts are blocked, and inherit this.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext, SpawnProcess
from signal import SIG_BLOCK, SIG_SETMASK, Signals, pthread_sigmask, signal
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Context(SpawnContext):
    """Remember the processes that are started, even if they die at once."""

    def __init__(self) -> None:
        self.started: list[SpawnProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override] # noqa: N802
        self.started.append(SpawnProcess(*args, **kwargs))
        return self.started[-1]

    def running(self) -> list[SpawnProcess]:
        """Return the processes that were started, also if they have ended since."""
        return [process for process in self.started if process.pid is not None]

    def died(self, *, wait: float = 0) -> bool:
        """Say whether a process ends by a signal or an error within `wait` seconds."""
        # A process that is killed closes its pipes a little before it has ended.
        end = time.monotonic() + wait
        while not any(process.exitcode for process in self.running()):
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)
        return True

    def end(self) -> None:
        """End all processes that are there."""
        for process in self.running():
            process.terminate()


class Pool(ProcessPoolExecutor):
    """Start processes that never hear of interrupts."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a process call a function; it and its arguments must be picklable."""
        if threading.current_thread() is not threading.main_thread():
            return super().submit(fn, *args, **kwargs)  # no signal handler runs here
        before = pthread_sigmask(SIG_BLOCK, {Signals.SIGINT})
        # Other threads still take the signal, and Python would raise here, in the midst of a start.
        asked: list[int] = []
        handler = signal(Signals.SIGINT, lambda number, _: asked.append(number))
        try:
            submitted = super().submit(fn, *args, **kwargs)
        except OSError as error:  # it must not pass for an error of data
            raise BrokenProcessPool(*error.args) from error
        finally:
            signal(Signals.SIGINT, handler)
            pthread_sigmask(SIG_SETMASK, before)
        if asked:
            raise KeyboardInterrupt
        return submitted

    def give_up(self) -> None:
        """Free the thread that sends work: without a reader, its pipe stays full for ever."""
        if sys.version_info >= (3, 11, 5):
            return  # Python does so itself (CPython's issue 94777)
        # The thread closes the pipe too as it ends. If two did at once, the second would close
        # whatever file has the number then. So the thread may end first, if it can.
        queue: Any = self._call_queue  # type: ignore[attr-defined]
        if queue is not None and queue._thread is not None:
            queue._thread.join(timeout=1)
            queue._reader.close()
