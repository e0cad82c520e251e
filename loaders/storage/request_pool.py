"""The request threads of a process, with limits on the requests and bytes in flight."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from twinfeed.loaders.storage import retries
from twinfeed.loaders.support.fork import PerProcess

Receive = Callable[[], Any]
"""Wait for the response to a request that was sent, and return its result. If that is None, or an
exception is raised, the request is made again, by a thread of its own.
"""
_MIN_WINDOW = 8
_WAIT = 1e-3
"""The sender has waited for a response if receiving it took longer, in seconds."""
_COST = 2e-4
"""About how long the sender takes to send a request and to receive its response, in seconds."""


class _Request(NamedTuple):
    """A request: a function that fetches `size` bytes, and the future of its result.

    `send`, if any, sends the request alone, on an idle connection; it returns None if none is idle.
    """

    call: Callable[[], Any]
    size: int
    future: Future[Any]
    send: Callable[[], Receive | None] | None = None


class _Queue:
    """Requests that wait, the urgent ones first."""

    def __init__(self) -> None:
        self._urgent: OrderedDict[int, _Request] = OrderedDict()
        self._prefetch: OrderedDict[int, _Request] = OrderedDict()

    def put(self, request: _Request, *, urgent: bool, first: bool = False) -> None:
        """Add a request at the end of its kind, or as the first of it."""
        requests, key = self._urgent if urgent else self._prefetch, id(request.future)
        requests[key] = request
        requests.move_to_end(key, last=not first)

    @property
    def is_urgent(self) -> bool:
        """Whether the next request is urgent."""
        return bool(self._urgent)

    def promote(self, key: int) -> None:
        """Make the request of a future with this id urgent, if it is here."""
        if key in self._prefetch:
            self._urgent[key] = self._prefetch.pop(key)

    def first(self) -> _Request | None:
        """Return the next request, which stays in the queue; None if it is empty."""
        return next(iter((self._urgent or self._prefetch).values()), None)

    def remove_first(self) -> None:
        """Remove the next request."""
        (self._urgent or self._prefetch).popitem(last=False)

    def cancel(self) -> None:
        """Cancel and remove all requests."""
        while request := self.first():
            request.future.cancel()
            self.remove_first()


class RequestPool:
    """A pool of request threads with two priorities: urgent (a batch is waiting) and prefetch.

    A thread makes one request at a time, but for the sender, which sends small requests ahead and
    receives the results in order, so that they do not contend for the interpreter lock. Idle
    threads exit. At interpreter shutdown, requests that are not in flight are cancelled.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting, self._sendable = _Queue(), _Queue()
        self._num_threads = 0  # without the sender
        self._in_flight = 0
        self._is_sending = False
        self._is_idle = False  # whether a connection may be idle
        self._window = float(_MIN_WINDOW)  # how many requests the sender sends ahead

    def submit(
        self,
        call: Callable[[], Any],
        size: int,
        /,
        *,
        urgent: bool = True,
        send: Callable[[], Receive | None] | None = None,
    ) -> Future[Any]:
        """Queue `call`, a function that fetches `size` bytes, and return the future of its result.

        Urgent requests start before prefetch requests. `send` makes the same request in two steps,
        if a connection is idle.
        """
        request = _Request(call, size, Future(), send)
        with self._lock:
            (self._sendable if send else self._waiting).put(request, urgent=urgent)
        self._start_threads()
        return request.future

    def promote(self, futures: Iterable[Future[Any]], /) -> None:
        """Make requests urgent, unless they have started already."""
        with self._lock:
            for key in map(id, futures):
                self._waiting.promote(key)
                self._sendable.promote(key)
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
                run: Callable[[], None]
                if may_start and (request := self._pop(self._waiting)):
                    self._num_threads += 1
                    run = partial(self._run, request)
                elif (
                    (may_start or self._is_idle) and self._sendable.first() and not self._is_sending
                ):
                    self._is_sending = True
                    run = self._run_sender
                else:
                    return
            threading.Thread(target=run, name="twinfeed-request").start()

    def _pop(self, queue: _Queue) -> _Request | None:
        """Pop the next request, if its bytes fit in the limit; else None.

        While the interpreter exits, all queued requests are cancelled. The caller has the lock.
        """
        if not threading.main_thread().is_alive():
            self._waiting.cancel()
            self._sendable.cancel()
        while request := queue.first():
            if self._in_flight and self._in_flight + request.size > retries.NETWORK.in_flight:
                return None
            queue.remove_first()
            if request.future.running() or request.future.set_running_or_notify_cancel():
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
                request = self._pop(self._waiting)
                if request is None:
                    self._num_threads -= 1
                    self._is_idle = True  # the connection of this thread
            self._start_threads()  # the bytes of this request are free for others now

    def _run_sender(self) -> None:
        """Send requests ahead, and receive their results, until none is queued or can be sent."""
        sent: deque[tuple[_Request, Receive]] = deque()
        while True:
            with self._lock:
                may_open = self._num_threads < retries.NETWORK.requests  # a connection
                has_room = len(sent) < int(self._window) and (self._is_idle or may_open)
                urgent = self._sendable.is_urgent
                request = self._pop(self._sendable) if has_room else None
                if not request and not sent:
                    self._is_sending = False  # a thread that ends its request starts it again
                    return
            if not request:
                self._receive(*sent.popleft())
            elif receive := _send(request):
                sent.append((request, receive))
            else:  # no connection is idle: another thread opens one, once it may
                self._is_idle = False
                self._queue_again(request, self._waiting if may_open else self._sendable, urgent)

    def _queue_again(self, request: _Request, queue: _Queue, urgent: bool = True) -> None:
        """Put a request that has started into a queue again, as the first of its kind."""
        with self._lock:
            self._in_flight -= request.size
            queue.put(request, urgent=urgent, first=True)
        self._start_threads()

    def _receive(self, request: _Request, receive: Receive) -> None:
        """Receive the result of a request, and note whether more should be sent ahead."""
        started, result = time.monotonic(), None
        with suppress(Exception):
            result = receive()
        if result is None:
            self._queue_again(request, self._waiting)
            return
        request.future.set_result(result)
        seconds = time.monotonic() - started
        change = seconds / _COST if seconds > _WAIT else -1 / 64
        limit = retries.NETWORK.small_requests
        self._window = min(max(self._window + change, _MIN_WINDOW), limit)
        with self._lock:
            self._in_flight -= request.size
            self._is_idle = True
        self._start_threads()


def _send(request: _Request) -> Receive | None:
    """Send a request, if a connection is idle; an error is left to its `call`."""
    with suppress(Exception):
        return request.send() if request.send else None
    return None


request_pool = PerProcess(RequestPool)
"""Return the `RequestPool` of this process."""
