"""A process pool whose workers end at Ctrl-C without a traceback.

Ctrl-C sends SIGINT to the whole process group. SIGINT is blocked while a worker is started, and the
worker inherits this mask. Once the worker has started up, it sets SIGINT to its default action and
unblocks it: the signal then ends the worker without a traceback, also if it came before.
`ProcessPoolExecutor` cannot do this, and hangs if a worker is killed early (CPython's issue 94777,
fixed in Python 3.11.5).
"""

from __future__ import annotations

import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import SpawnProcess
from multiprocessing.resource_tracker import ensure_running
from queue import SimpleQueue
from signal import SIG_BLOCK, SIG_SETMASK, SIG_UNBLOCK, SIGINT, pthread_sigmask
from traceback import format_exc
from typing import Any, ParamSpec, TypeVar

from twinfeed.loaders.errors import sendable
from twinfeed.loaders.support.fork import end_with_parent
from twinfeed.loaders.support.system import describe_exit

P = ParamSpec("P")
T = TypeVar("T")
_Worker = tuple[SpawnProcess, Connection]


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise `KeyboardInterrupt` after this block if Ctrl-C is pressed within it."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(SIGINT) is not signal.default_int_handler:
        yield
        return
    received: list[int] = []
    signal.signal(SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(SIGINT, signal.default_int_handler)
        if received:
            raise KeyboardInterrupt


class Pool(ThreadPoolExecutor):
    """A process pool: each of its threads has a worker process, and waits for its results."""

    def __init__(self, jobs: int) -> None:
        # Starting the resource tracker would unblock SIGINT, so it is started before.
        ensure_running()
        super().__init__(jobs, initializer=pthread_sigmask, initargs=(SIG_BLOCK, {SIGINT}))
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._error = ""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call `fn(*args, **kwargs)` in a worker process, and return the future of its result."""
        with interrupts_deferred():
            if len(self._workers) < self._max_workers and not self._error:
                self._start_worker()
            return super().submit(self._call, fn, *args, **kwargs)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the running calls and end the workers; after an interrupt, do not wait."""
        if kind is not None and not issubclass(kind, Exception):  # such as KeyboardInterrupt
            self._terminate("a worker process was interrupted")
        with interrupts_deferred():
            self.shutdown(cancel_futures=True)
            for process, pipe in self._workers:
                pipe.close()
                process.join()

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in an idle worker, and return its result."""
        call = pickle.dumps((function, args, kwargs))
        worker = process, pipe = self._idle.get()
        try:
            if self._error:
                raise BrokenProcessPool(self._error)
            pipe.send_bytes(call)
            answer = pipe.recv_bytes()
        except (EOFError, OSError):
            with self._lock:  # starting another process would reap this one and its exit code
                process.join()
            self._terminate(f"a worker process {describe_exit(process.exitcode or 0)}")
            raise BrokenProcessPool(self._error) from None
        finally:
            self._idle.put(worker)
        result, error, warned = pickle.loads(answer)
        for warning in warned:
            warnings.warn_explicit(*warning)
        if error is not None:
            raise error
        return result

    def _start_worker(self) -> None:
        """Start a worker, before its first call is waited for: see `_serve`."""
        pipe, worker_end = Pipe()
        process = SpawnProcess(target=_serve, args=(worker_end,))
        with self._lock, worker_end:
            mask = pthread_sigmask(SIG_BLOCK, {SIGINT})
            try:
                process.start()
            finally:
                pthread_sigmask(SIG_SETMASK, mask)
            self._workers.append((process, pipe))
        self._idle.put((process, pipe))

    def _terminate(self, reason: str) -> None:
        """Terminate all workers; later calls raise an error with this `reason`."""
        with self._lock:
            self._error = self._error or reason
            for process, _ in self._workers:
                process.kill()


def _serve(pipe: Connection) -> None:
    """In a worker, answer the calls that come through a pipe, until it is closed."""
    end_with_parent()
    # Let the system end this process at SIGINT, in place of Python's KeyboardInterrupt. SIGINT was
    # blocked until here, in the thread that started this process.
    if signal.getsignal(SIGINT) is signal.default_int_handler:
        signal.signal(SIGINT, signal.SIG_DFL)
    pthread_sigmask(SIG_UNBLOCK, {SIGINT})
    with suppress(EOFError, OSError):
        while True:
            pipe.send_bytes(_run_call(pipe.recv_bytes()))


def _run_call(call: bytes) -> bytes:
    """Call a pickled (function, args, kwargs); return its pickled result, error and warnings."""
    function, args, kwargs = pickle.loads(call)
    with warnings.catch_warnings(record=True) as caught:
        result, failure = None, None
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            error.add_note(format_exc())
            failure = sendable(error)
    warned = [(w.message, w.category, w.filename, w.lineno) for w in caught]
    return pickle.dumps((result, failure, warned))
