"""The processes that share the work of a command: each is served by a thread, through a pipe that
ends when the process does, whatever it died of.

Ctrl-C reaches every process of a terminal. A worker would print where it was interrupted, as often
as not in an import; so workers never hear of it (their threads block interrupts, and processes
inherit that), and the command ends them.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from signal import SIG_BLOCK, SIGINT, SIGKILL, Signals, pthread_sigmask
from typing import Any, ParamSpec, TypeVar

from twinfeed.loaders.command_line.wording import show_warning
from twinfeed.loaders.errors import WorkerDiedError

P = ParamSpec("P")
T = TypeVar("T")

_PATIENCE = 5.0
"""A pipe ends a moment before its process; more seconds than this are not waited for it."""


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
    pool = _Pool(jobs)
    try:
        yield pool
    except KeyboardInterrupt:
        pool.end()
        raise
    finally:
        pool.shutdown()


class _Pool(Executor):
    """Run tasks in processes, started when there is work for them. When one dies, all end, and
    what was to be done fails with the WorkerDiedError.
    """

    def __init__(self, jobs: int) -> None:
        resource_tracker.ensure_running()  # now, since its own start unblocks interrupts
        self._threads = ThreadPoolExecutor(
            jobs, initializer=pthread_sigmask, initargs=(SIG_BLOCK, {SIGINT})
        )
        self._lock = threading.Lock()
        self._own = threading.local()
        self._started: list[tuple[SpawnProcess, Connection]] = []
        self._ended: WorkerDiedError | None = None

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a process call a function; all of it must be picklable."""
        return self._threads.submit(self._call, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait until all is done, and for the processes to end."""
        try:
            self._threads.shutdown(wait, cancel_futures=cancel_futures)
        except KeyboardInterrupt:
            self.end()
            raise
        for process, connection in self._started:
            connection.close()
            process.join()

    def end(self, died: SpawnProcess | None = None) -> WorkerDiedError:
        """End all processes, by default since nobody waits any more, and return why."""
        with self._lock:
            if self._ended is None:
                self._ended = _why(died)
                for process, _ in self._started:
                    process.terminate()
            return self._ended

    def _call(self, *task: Any) -> Any:
        """Do one task in this thread's own process."""
        process, connection = self._process()
        try:
            connection.send(task)
            done, value = connection.recv()
        except (EOFError, OSError) as error:
            raise self.end(process) from error
        if not done:
            raise value
        return value

    def _process(self) -> tuple[SpawnProcess, Connection]:
        """Return this thread's own process, started if need be, and its pipe."""
        if not hasattr(self._own, "process"):
            with self._lock:
                if self._ended is not None:
                    raise self._ended
                ours, theirs = get_context("spawn").Pipe()
                process = get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                self._own.process = process, ours
                self._started.append(self._own.process)
        own: tuple[SpawnProcess, Connection] = self._own.process
        return own


def _serve(connection: Connection) -> None:
    """Do what comes through the pipe until it ends, and warn as the command does."""
    warnings.showwarning = show_warning
    with suppress(EOFError, ConnectionError):  # the command has ended
        while True:
            function, args, kwargs = connection.recv()
            try:
                answer = True, function(*args, **kwargs)
            except Exception as error:
                answer = False, error
            connection.send(answer)


def _why(process: SpawnProcess | None) -> WorkerDiedError:
    """Say how a process ended."""
    if process is None:
        return WorkerDiedError("the worker processes were ended")
    process.join(_PATIENCE)
    code = process.exitcode or 0
    if code == -SIGKILL:
        advice = "the system may have run out of memory (see dmesg): lower --jobs"
    else:
        advice = "run with --jobs 1 to see where it happens"
    how = f"was killed by {Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
    return WorkerDiedError(f"a worker process {how}", advice=advice)
