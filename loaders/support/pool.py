"""A process pool whose workers ignore SIGINT; the parent stops them.

Ctrl-C is sent to the whole process group, and workers would print tracebacks. So SIGINT is blocked
in the thread that spawns them, and they inherit the mask. `ProcessPoolExecutor` cannot do this, and
hangs if a worker is killed before it has all its arguments (CPython 94777, mended in 3.11.5).
"""

from __future__ import annotations

import pickle
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import SpawnProcess
from multiprocessing.resource_tracker import ensure_running
from signal import SIG_BLOCK, Signals, pthread_sigmask
from traceback import format_exc
from typing import Any, ParamSpec, TypeVar

from twinfeed.loaders.errors import sendable
from twinfeed.loaders.support.fork import end_with_parent
from twinfeed.loaders.support.system import describe_exit

P = ParamSpec("P")
T = TypeVar("T")


class Pool(ThreadPoolExecutor):
    """Call functions in processes. Each thread has a process, and waits for what it returns.

    Functions, arguments and results must be picklable. The warnings of a call are given again here.
    Once a process has died, all calls raise `BrokenProcessPool`, which says how it died.
    """

    def __init__(self, jobs: int) -> None:
        # The start of this process of multiprocessing would let interrupts through again.
        ensure_running()
        super().__init__(jobs, initializer=pthread_sigmask, initargs=(SIG_BLOCK, {Signals.SIGINT}))
        self._lock = threading.Lock()
        self._started: dict[int, tuple[SpawnProcess, Connection]] = {}
        self._died = ""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in a process."""
        return super().submit(self._call, fn, *args, **kwargs)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):  # no caller waits for the rest
            self._end("a worker process was interrupted")
        self.shutdown(cancel_futures=True)
        for process, pipe in self._started.values():
            pipe.close()
            process.join()

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = pickle.dumps((function, args, kwargs))
        process, pipe = self._process()
        try:
            pipe.send_bytes(call)
            answer = pipe.recv_bytes()
        except (EOFError, OSError):
            with self._lock:  # a start elsewhere would take how it ended, as it is reaped
                process.join()
            self._end(f"a worker process {describe_exit(process.exitcode or 0)}")
            raise BrokenProcessPool(self._died) from None
        result, error, warned = pickle.loads(answer)
        for one in warned:
            warnings.warn_explicit(*one)
        if error is not None:
            raise error
        return result

    def _process(self) -> tuple[SpawnProcess, Connection]:
        """Return the process of this thread, which the first call starts."""
        with self._lock:
            if self._died:
                raise BrokenProcessPool(self._died)
            thread = threading.get_ident()
            if thread not in self._started:
                here, there = Pipe()
                with there:
                    process = SpawnProcess(target=_serve, args=(there,))
                    process.start()
                self._started[thread] = process, here
            return self._started[thread]

    def _end(self, why: str) -> None:
        """End all processes."""
        with self._lock:
            self._died = self._died or why
            for process, _ in self._started.values():
                process.terminate()


def _serve(pipe: Connection) -> None:
    """Answer calls until the pipe is closed, or the process at its other end has ended."""
    end_with_parent()
    with suppress(EOFError, OSError):
        while True:
            pipe.send_bytes(_answer(pipe.recv_bytes()))


def _answer(call: bytes) -> bytes:
    """Call a function; return its result, its error and its warnings."""
    function, args, kwargs = pickle.loads(call)
    with warnings.catch_warnings(record=True) as caught:
        result, failed = None, None
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            error.add_note(format_exc())
            failed = sendable(error)
    warned = [(one.message, one.category, one.filename, one.lineno) for one in caught]
    return pickle.dumps((result, failed, warned))
