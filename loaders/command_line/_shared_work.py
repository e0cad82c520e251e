"""The processes that share the work of a command, and the warnings that they show."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from signal import Signals
from typing import Any, ParamSpec, TypeVar

from twinfeed.loaders.command_line._wording import show_warning
from twinfeed.loaders.errors import ShardWarning, WorkerDiedError
from twinfeed.loaders.support.pool import Context, Pool

P = ParamSpec("P")
T = TypeVar("T")


class Warned:
    """Count the warnings of shards that a command and its workers show."""

    def __init__(self, jobs: int) -> None:
        self._here = 0
        self._shared = SpawnContext().Value("q") if jobs > 1 else None

    @property
    def count(self) -> int:
        """How many warnings were shown so far."""
        # A worker may be killed while it holds the lock. Waiting for the lock would never end.
        return self._here if self._shared is None else self._shared.get_obj().value

    def watch(self) -> None:
        """Show every warning of this process, a repeated one too, and count warnings of shards."""
        warnings.simplefilter("always", ShardWarning)
        warnings.showwarning = self._show

    def _show(self, message: Warning | str, *_: Any, **__: Any) -> None:
        show_warning(message)
        if not isinstance(message, ShardWarning):
            return
        if self._shared is None:
            self._here += 1
            return
        with self._shared.get_lock():
            self._shared.value += 1


@contextmanager
def workers(jobs: int, warned: Warned | None = None) -> Iterator[Executor | None]:
    """Give a pool of several processes, which an interrupt ends; None for a single job.

    Warnings of the processes are shown, and counted in `warned`.

    Raises:
        WorkerDiedError: a process dies.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if jobs == 1:
        yield None
        return
    context = Context()
    pool = Pool(jobs, mp_context=context, initializer=_start, initargs=(warned,))
    # A pool that loses a process while it starts others prints a traceback of its own thread.
    print_error = threading.excepthook
    threading.excepthook = lambda error: None if context.died(wait=1) else print_error(error)
    try:
        yield pool
    except Exception as error:
        # A pool that breaks while it is given work fails in many ways: its pipes and queues close.
        if not isinstance(error, BrokenProcessPool) and not context.died():
            raise
        context.end()  # the pool would leave a process that is just starting
        pool.give_up()
        pool.shutdown()
        raise _why(context.running()) from error
    except KeyboardInterrupt:  # nobody waits for the rest
        context.end()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        threading.excepthook = print_error


def _start(warned: Warned | None) -> None:
    """Warn as the command does."""
    if warned is None:
        warnings.showwarning = show_warning
    else:
        warned.watch()


def _why(processes: Sequence[SpawnProcess]) -> WorkerDiedError:
    """Say how the first process ended; the pool terminates the others."""
    for process in processes:
        process.join()
    codes = [process.exitcode or 0 for process in processes]
    code = next((code for code in codes if code not in (0, -Signals.SIGTERM)), -Signals.SIGTERM)
    if code == -Signals.SIGKILL:
        advice = "the system may have run out of memory (see dmesg): lower --jobs"
    else:
        advice = "run with --jobs 1 to see where it happens"
    how = f"was killed by {Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
    return WorkerDiedError(f"a worker process {how}", advice=advice)
