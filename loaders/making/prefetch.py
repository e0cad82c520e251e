"""Run an iterator ahead of its consumer, on one background thread; map over items on several."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from twinfeed.loaders.support.closing import Closing

S = TypeVar("S")
T = TypeVar("T")

# Seconds between two checks of a thread that waits whether the other side is still there.
_POLL = 0.1

# Seconds for which `close` waits for a thread that still makes its last item.
_CLOSE_TIMEOUT = 5.0

# The same, if the thread's source is known to be broken.
_BROKEN_TIMEOUT = 1.0


def in_order(
    function: Callable[[S], T], items: Iterable[S], /, *, threads: int
) -> Generator[T, None, None]:
    """Yield `function(item)` of each item, in order, on a pool of threads.

    With fewer than two threads the caller's thread calls the function, when a result is needed.

    >>> list(in_order(str.upper, "abc", threads=2))
    ['A', 'B', 'C']
    """
    if threads < 2:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(threads, "twinfeed-batch")
    try:
        pending: deque[Future[T]] = deque()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class Prefetcher(Iterator[T], Closing, Generic[T]):
    """Keep up to `depth` items of `source` ready, in order.

    An exception in `source` reaches the consumer with its traceback, after the items before it,
    and ends the iteration. While the consumer waits for an item, it calls `while_waiting` every
    tenth of a second. An exception in this call ends the iteration too. The thread ends

    - with `close`, which calls `while_closing` as often while it waits for the thread,
    - with the iteration,
    - when the prefetcher is garbage, and at interpreter exit.

    Raises:
        ValueError: a depth below 1.

    >>> with Prefetcher(iter("abc"), depth=2) as letters:
    ...     print(next(letters), next(letters))
    a b
    """

    def __init__(
        self,
        source: Iterator[T],
        /,
        *,
        depth: int,
        while_waiting: Callable[[], object] = object,
        while_closing: Callable[[], object] = object,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self._while_waiting = while_waiting
        # Two queues of C: a bounded Queue of Python takes longer than making a small batch.
        self._ready: _Ready = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self._room.put(None)
        stop = _Stop(threading.Event(), self._room)
        self._thread = threading.Thread(
            target=_fill, args=(source, self._ready, stop), name="twinfeed-prefetch", daemon=True
        )
        self._finalize = weakref.finalize(self, _join, self._thread, stop, while_closing)
        self._thread.start()

    def __next__(self) -> T:
        while self._finalize.alive:
            with suppress(queue.Empty):
                item, error = self._ready.get(timeout=_POLL)
                if error is None:
                    self._room.put(None)
                    return item  # type: ignore[no-any-return]
                self.close()
                try:
                    raise error
                finally:
                    del error  # it refers to this frame
            try:
                self._while_waiting()
            except BaseException:
                if detached := self._finalize.detach():
                    # A thread that is within C++ at interpreter exit would end the process.
                    thread, stop, while_closing = detached[2]
                    _join(thread, stop, while_closing, _BROKEN_TIMEOUT)
                raise
        raise StopIteration

    @property
    def busy(self) -> bool:
        """Whether the thread still makes an item: it may outlive `close`."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop the thread, once the thread has finished its item; a second call does nothing.

        A thread that takes more than five seconds for its item is left alone. The thread is a
        daemon, and keeps neither the consumer nor the interpreter from ending.
        """
        self._finalize()


_Ready = queue.SimpleQueue[tuple[Any, BaseException | None]]


class _Stop(NamedTuple):
    """How to stop the thread: an event, and an entry of `room`, for which the thread may wait."""

    event: threading.Event
    room: queue.SimpleQueue[None]


def _fill(source: Iterator[Any], ready: _Ready, stop: _Stop) -> None:
    """Put the items into the queue, and then StopIteration or the source's own exception."""
    try:
        for item in source:
            stop.room.get()
            if stop.event.is_set():
                return
            ready.put((item, None))
        ready.put((None, StopIteration()))
    except BaseException as error:
        ready.put((None, error))
    finally:
        getattr(source, "close", object)()


def _join(
    thread: threading.Thread,
    stop: _Stop,
    while_closing: Callable[[], object],
    timeout: float = _CLOSE_TIMEOUT,
) -> None:
    """Stop the thread, and wait until it has ended or the timeout is over."""
    stop.event.set()
    stop.room.put(None)
    if thread is threading.current_thread():
        return
    end = time.monotonic() + timeout
    while thread.is_alive() and time.monotonic() < end:
        while_closing()
        thread.join(_POLL)
