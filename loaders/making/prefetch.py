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

# Seconds after which a waiting thread looks whether the other side is still there.
_POLL = 0.1

# Seconds that `close` waits for a thread that is still at its last item.
_PATIENCE = 5.0

# The same, if the thread's source is known to be broken.
_GRACE = 1.0


def in_order(
    function: Callable[[S], T], items: Iterable[S], /, *, threads: int
) -> Generator[T, None, None]:
    """Yield `function(item)` of each item, in order, at work on `threads` items at once.

    With fewer than two threads the caller's thread does the work, and makes an item only when it is
    needed.

    >>> list(in_order(str.upper, "abc", threads=2))
    ['A', 'B', 'C']
    """
    if threads < 2:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(threads, "twinfeed-batch")
    try:
        at_work: deque[Future[T]] = deque()
        for item in items:
            at_work.append(pool.submit(function, item))
            if len(at_work) > threads:
                yield at_work.popleft().result()
        while at_work:
            yield at_work.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class Prefetcher(Iterator[T], Closing, Generic[T]):
    """Keep up to `depth` items of `source` ready, in order.

    An exception in `source` reaches the consumer with its traceback, after the items before it,
    and ends the iteration. While the consumer waits for an item, the consumer calls `while_waiting`
    now and then. An exception in this call ends the iteration too. The thread ends

    - with `close`, which calls `while_closing` now and then while it waits for the thread,
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
        halt = _Halt(threading.Event(), self._room)
        self._thread = threading.Thread(
            target=_fill, args=(source, self._ready, halt), name="twinfeed-prefetch", daemon=True
        )
        self._finalize = weakref.finalize(self, _stop, self._thread, halt, while_closing)
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
                    thread, halt, while_closing = detached[2]
                    _stop(thread, halt, while_closing, _GRACE)
                raise
        raise StopIteration

    @property
    def busy(self) -> bool:
        """Whether the thread is still at an item: it may outlive `close`."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop the thread, once the thread has finished its item; a second call does nothing.

        A thread that takes more than five seconds for its item is left alone. The thread is a
        daemon, and keeps neither the consumer nor the interpreter from ending.
        """
        self._finalize()


_Ready = queue.SimpleQueue[tuple[Any, BaseException | None]]


class _Halt(NamedTuple):
    """The event that ends the thread, and the room for items, for which the thread may wait."""

    set: threading.Event
    room: queue.SimpleQueue[None]


def _fill(source: Iterator[Any], ready: _Ready, halt: _Halt) -> None:
    """Put the items and then what ended them: StopIteration or the source's own exception."""
    try:
        for item in source:
            halt.room.get()
            if halt.set.is_set():
                return
            ready.put((item, None))
        ready.put((None, StopIteration()))
    except BaseException as error:
        ready.put((None, error))
    finally:
        getattr(source, "close", object)()


def _stop(
    thread: threading.Thread,
    halt: _Halt,
    while_closing: Callable[[], object],
    patience: float = _PATIENCE,
) -> None:
    halt.set.set()
    halt.room.put(None)
    if thread is threading.current_thread():
        return
    end = time.monotonic() + patience
    while thread.is_alive() and time.monotonic() < end:
        while_closing()
        thread.join(_POLL)
