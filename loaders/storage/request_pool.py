"""The request threads of a process, with limits on the requests and bytes in flight."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

from twinfeed.loaders.storage import retries
from twinfeed.loaders.support.fork import PerProcess


class _Submitted(NamedTuple):
    """A request: a function that fetches `size` bytes, and the future of its result."""

    call: Callable[[], Any]
    size: int
    future: Future[Any]


class RequestPool:
    """A pool of request threads with two priorities: urgent (a batch is waiting) and prefetch.

    Idle threads exit, so that they do not delay interpreter shutdown, at which requests that are
    not in flight are cancelled.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._urgent: OrderedDict[int, _Submitted] = OrderedDict()
        self._prefetch: OrderedDict[int, _Submitted] = OrderedDict()
        self._threads = 0
        self._bytes = 0

    def submit(self, call: Callable[[], Any], size: int, /, *, urgent: bool = True) -> Future[Any]:
        """Queue `call`, a function that fetches `size` bytes, and return the future of its result.

        Urgent requests start before all others.
        """
        job = _Submitted(call, size, Future())
        with self._lock:
            (self._urgent if urgent else self._prefetch)[id(job.future)] = job
        self._grow()
        return job.future

    def promote(self, futures: Iterable[Future[Any]], /) -> None:
        """Make those of the requests urgent that have not started."""
        with self._lock:
            for key in map(id, futures):
                if key in self._prefetch:
                    self._urgent[key] = self._prefetch.pop(key)
        self._grow()

    def _grow(self) -> None:
        """Start threads for queued requests, up to the limits on threads and bytes in flight.

        Threads are started without the lock, to avoid a deadlock. Starting a thread may run the
        garbage collector, and with it any destructor, such as one that joins a thread that waits
        for the lock.
        """
        while True:
            with self._lock:
                free = self._threads < retries.NETWORK.requests
                job = self._next() if free else None
                if job is None:
                    return
                self._threads += 1
            threading.Thread(target=self._work, args=(job,), name="twinfeed-request").start()

    def _next(self) -> _Submitted | None:
        """Pop the next request, urgent ones first, if its bytes fit in the limit; else None.

        While the interpreter exits, all queued requests are cancelled. The caller has the lock.
        """
        if not threading.main_thread().is_alive():
            for job in (*self._urgent.values(), *self._prefetch.values()):
                job.future.cancel()
            self._urgent.clear()
            self._prefetch.clear()
        while queue := self._urgent or self._prefetch:
            key, job = next(iter(queue.items()))
            if self._bytes and self._bytes + job.size > retries.NETWORK.in_flight:
                return None
            del queue[key]
            if job.future.set_running_or_notify_cancel():
                self._bytes += job.size
                return job
        return None

    def _work(self, job: _Submitted | None) -> None:
        """Run requests, `job` first, until none is left or fits in the limits.

        This is the function of a request thread.
        """
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
