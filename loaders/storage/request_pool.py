"""The request threads of a process, with limits on the requests and bytes in flight."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

from twinfeed.loaders.storage import retries
from twinfeed.loaders.support.fork import PerProcess


class _Request(NamedTuple):
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
        self._urgent: OrderedDict[int, _Request] = OrderedDict()
        self._prefetch: OrderedDict[int, _Request] = OrderedDict()
        self._num_threads = 0
        self._in_flight = 0

    def submit(self, call: Callable[[], Any], size: int, /, *, urgent: bool = True) -> Future[Any]:
        """Queue `call`, a function that fetches `size` bytes, and return the future of its result.

        Urgent requests start before prefetch requests.
        """
        request = _Request(call, size, Future())
        with self._lock:
            (self._urgent if urgent else self._prefetch)[id(request.future)] = request
        self._start_threads()
        return request.future

    def promote(self, futures: Iterable[Future[Any]], /) -> None:
        """Make requests urgent, unless they have started already."""
        with self._lock:
            for key in map(id, futures):
                if key in self._prefetch:
                    self._urgent[key] = self._prefetch.pop(key)
        self._start_threads()

    def _start_threads(self) -> None:
        """Start threads for queued requests, up to the limits on threads and bytes in flight.

        Threads are started without the lock, to avoid a deadlock. Starting a thread may run the
        garbage collector, and with it any destructor, such as one that joins a thread that waits
        for the lock.
        """
        while True:
            with self._lock:
                may_start = self._num_threads < retries.NETWORK.requests
                request = self._pop_next() if may_start else None
                if request is None:
                    return
                self._num_threads += 1
            threading.Thread(target=self._run, args=(request,), name="twinfeed-request").start()

    def _pop_next(self) -> _Request | None:
        """Pop the next request, urgent ones first, if its bytes fit in the limit; else None.

        While the interpreter exits, all queued requests are cancelled. The caller has the lock.
        """
        if not threading.main_thread().is_alive():
            for request in (*self._urgent.values(), *self._prefetch.values()):
                request.future.cancel()
            self._urgent.clear()
            self._prefetch.clear()
        while queue := self._urgent or self._prefetch:
            key, request = next(iter(queue.items()))
            if self._in_flight and self._in_flight + request.size > retries.NETWORK.in_flight:
                return None
            del queue[key]
            if request.future.set_running_or_notify_cancel():
                self._in_flight += request.size
                return request
        return None

    def _run(self, request: _Request | None) -> None:
        """Run requests, `request` first, until none is queued or none fits in the limits.

        This is the function of a request thread.
        """
        while request is not None:
            try:
                request.future.set_result(request.call())
            except BaseException as error:
                request.future.set_exception(error)
            with self._lock:
                self._in_flight -= request.size
                request = self._pop_next()
                if request is None:
                    self._num_threads -= 1
            self._start_threads()  # the bytes of this request are free for others now


request_pool = PerProcess(RequestPool)
"""Return the `RequestPool` of this process."""
