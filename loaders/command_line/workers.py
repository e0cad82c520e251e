"""The processes that share the work of a command, and say nothing at an interrupt.

Ctrl-C reaches every process of a terminal. A worker would print where it was interrupted, as often
as not in an import; so workers never hear of it, and the command ends them.
"""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from signal import SIG_BLOCK, SIG_SETMASK, SIGINT, pthread_sigmask, raise_signal, signal
from threading import current_thread, main_thread
from typing import Any

from twinfeed.loaders.command_line.wording import show_warning


@contextmanager
def workers(jobs: int) -> Iterator[Executor | None]:
    """Give a pool of processes, if there is to be more than one; an interrupt ends them at once.

    >>> with workers(1) as executor:
    ...     print(executor)
    None
    """
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1, not {jobs}")
    if jobs == 1:
        yield None
        return
    context = _Context()
    pool = ProcessPoolExecutor(jobs, context, _warn_as_main_does)
    try:
        yield pool
    except KeyboardInterrupt:
        # In this order, and with the pool kept: else its thread complains of the deaths.
        pool.shutdown(wait=False, cancel_futures=True)
        atexit.register(pool.shutdown)
        context.end()
        raise
    except BaseException:
        pool.shutdown()
        raise
    pool.shutdown()


class _Process(SpawnProcess):
    """A process that no interrupt reaches."""

    def start(self) -> None:
        """Start the process whole, and with interrupts blocked."""
        resource_tracker.ensure_running()  # now, since its own start unblocks them
        in_main = current_thread() is main_thread()  # others have no interrupts
        with _without_interrupts() if in_main else nullcontext():
            super().start()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let interrupts wait, here and for good in a process that is started meanwhile: it inherits
    what is blocked.
    """
    came: list[int] = []
    handler = signal(SIGINT, lambda number, _: came.append(number))  # another thread may get it
    blocked = pthread_sigmask(SIG_BLOCK, {SIGINT})
    try:
        yield
    finally:
        pthread_sigmask(SIG_SETMASK, blocked)
        signal(SIGINT, handler)
        if came:
            raise_signal(SIGINT)


class _Context(SpawnContext):
    """Start such processes, and remember them."""

    def __init__(self) -> None:
        self._made: list[_Process] = []

    def Process(self, *args: Any, **options: Any) -> _Process:  # type: ignore[override]  # noqa: N802
        """Make a process, under the name that a pool asks for it by."""
        process = _Process(*args, **options)
        self._made.append(process)
        return process

    def end(self) -> None:
        """End every process that was started, and wait until all have ended."""
        started = [process for process in self._made if process.pid is not None]
        for process in started:
            process.terminate()
        for process in started:
            process.join()


def _warn_as_main_does() -> None:
    """Let a worker print warnings as the command does."""
    warnings.showwarning = show_warning
