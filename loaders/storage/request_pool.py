"""The requests of one process, on threads, with bounds on the requests and bytes in flight."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

from twinfeed.loaders.storage import retries
from twinfeed.loaders.support.fork import PerProcess


class _Submitted(NamedTuple):
    call: Callable[[], Any]
    size: int
    future: Future[Any]


class RequestPool:
    """Run requests on threads; the requests that a batch waits for come first.

    A thread ends when nothing is left to do. So a process that ends waits for no idle thread.
    Requests that have not begun then are cancelled.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._urgent: OrderedDict[int, _Submitted] = OrderedDict()
        self._later: OrderedDict[int, _Submitted] = OrderedDict()
        self._threads = 0
        self._bytes = 0

    def submit(self, call: Callable[[], Any], size: int, /, *, urgent: bool = True) -> Future[Any]:
        """Run `call`, which fetches `size` bytes, on a thread."""
        job = _Submitted(call, size, Future())
        with self._lock:
            (self._urgent if urgent else self._later)[id(job.future)] = job
        self._grow()
        return job.future

    def promote(self, futures: Iterable[Future[Any]], /) -> None:
        """Move requests that were submitted for later to the urgent ones."""
        with self._lock:
            for key in map(id, futures):
                if key in self._later:
                    self._urgent[key] = self._later.pop(key)
        self._grow()

    def _grow(self) -> None:
        """Start threads for what may begin.

        A thread is started without the lock. To start a thread takes long, and makes many objects.
        These may set off the garbage collector, which runs destructors of anybody's objects. If a
        destructor waited for a thread that waits for the lock, both would wait for ever.
        """
        while True:
            with self._lock:
                room = self._threads < retries.NETWORK.requests
                job = self._next() if room else None
                if job is None:
                    return
                self._threads += 1
            threading.Thread(target=self._work, args=(job,), name="twinfeed-request").start()

    def _next(self) -> _Submitted | None:
        """Take the next job, if there is room for its bytes in flight; the lock is held."""
        if not threading.main_thread().is_alive():
            for job in (*self._urgent.values(), *self._later.values()):
                job.future.cancel()
            self._urgent.clear()
            self._later.clear()
        queue = self._urgent or self._later
        while queue:
            key, job = next(iter(queue.items()))
            if self._bytes and self._bytes + job.size > retries.NETWORK.in_flight:
                return None
            del queue[key]
            if job.future.set_running_or_notify_cancel():
                self._bytes += job.size
                return job
            queue = self._urgent or self._later
        return None

    def _work(self, job: _Submitted | None) -> None:
        """Run jobs until no job may begin."""
        while job is not None:
            try:
                result = job.call()
            except BaseException as error:
                job.future.set_exception(error)
            else:
                job.future.set_result(result)
                del result
            with self._lock:
                self._bytes -= job.size
                job = self._next()
                if job is None:
                    self._threads -= 1
            self._grow()


request_pool = PerProcess(RequestPool)
"""Return the `RequestPool` of this process."""
