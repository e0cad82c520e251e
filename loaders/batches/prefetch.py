"""Run an iterator ahead of its consumer on a background thread."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from twinfeed.loaders.support.closing import Closing

T = TypeVar("T")

# Seconds between two calls of `while_waiting` or `while_closing`.
_POLL = 0.1

# To wake a thread takes as long as to make a small batch. So a consumer that waits is not woken for
# an item that was made in less than `_QUICK` seconds, but for two. It looks by itself after
# `_PATIENCE` seconds, as the next item may take longer.
_QUICK, _PATIENCE = 0.001, 0.002

# Seconds for which `close` waits for a thread that still makes its last item.
_CLOSE_TIMEOUT = 5.0


class Prefetcher(Iterator[T], Closing, Generic[T]):
    """Iterate over `source` on a background thread, up to `depth` items ahead of the consumer.

    An exception in `source` is raised in the consumer with its traceback, after the items before
    it, and ends the iteration. While the consumer waits for an item, it calls `while_waiting` every
    tenth of a second. An exception in this call ends the iteration too. The thread ends

    - by `close`, which calls `while_closing` every tenth of a second while it waits for the thread,
    - at the end of the iteration,
    - when the prefetcher is garbage collected, and at interpreter exit.

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
        self._while_waiting = while_waiting
        self._ready = _Ready(depth)
        self._thread = threading.Thread(
            target=_produce, args=(source, self._ready), name="twinfeed-prefetch", daemon=True
        )
        self._finalize = weakref.finalize(self, _stop, self._thread, self._ready, while_closing)
        self._thread.start()

    def __next__(self) -> T:
        timeout = _PATIENCE
        while not self._ready.stopped:
            try:
                item, error = self._ready.items.popleft()
            except IndexError:  # none is ready
                is_woken = self._ready.woken.acquire(timeout=timeout)
                if not is_woken and timeout == _POLL:
                    self._wait()
                timeout = _PATIENCE if is_woken else _POLL
                continue
            if error is None:
                self._ready.permits.put(None)
                return item  # type: ignore[no-any-return]
            self.close()
            try:
                raise error
            finally:
                del error  # which refers to this frame: a reference cycle
        raise StopIteration

    def _wait(self) -> None:
        """Call `while_waiting`; stop the thread if that raises an error."""
        try:
            self._while_waiting()
        except BaseException:
            self.close()  # now: a thread that runs C++ at interpreter exit would abort the process
            raise

    @property
    def busy(self) -> bool:
        """Whether the thread is still running, as it may after `close`."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop the thread after its current item; a second call does nothing."""
        self._finalize()


class _Ready:
    """The items (item, None) that are ready, in order, and at the end (None, error).

    `woken` is a lock that the consumer acquires to wait, and the thread releases to wake it.
    `permits` has an entry for each item that the thread may still put; it is implemented in C, as a
    bounded Queue takes longer than a small batch. With `stopped`, a permit means to stop.
    """

    def __init__(self, depth: int) -> None:
        self.items: deque[tuple[Any, BaseException | None]] = deque()
        self.woken, self.stopped = threading.Lock(), False
        self.woken.acquire()
        self.permits: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self.permits.put(None)
        self._enough, self._last_put = min(depth, 2), time.monotonic()

    def put(self, item: Any, error: BaseException | None = None) -> None:
        """Add an item or the last error, and wake the consumer unless another item comes soon."""
        self.items.append((item, error))
        now = time.monotonic()
        is_quick, self._last_put = now - self._last_put < _QUICK, now
        another_comes_soon = is_quick and error is None and len(self.items) < self._enough
        if not another_comes_soon and self.woken.locked():  # only this thread releases it
            self.woken.release()


def _produce(source: Iterator[Any], ready: _Ready) -> None:
    """Put each item of `source` into `ready`, after taking a permit of the consumer, and at the end
    an error. This is the function of the background thread.
    """
    try:
        for item in source:
            ready.permits.get()  # waits until the consumer has taken an earlier item
            if ready.stopped:
                return
            ready.put(item)
        ready.put(None, StopIteration())
    except BaseException as error:
        ready.put(None, error)
    finally:
        if hasattr(source, "close"):  # as a generator has
            source.close()


def _stop(thread: threading.Thread, ready: _Ready, while_closing: Callable[[], object]) -> None:
    """Stop the background thread, and call `while_closing` until it has ended, for
    `_CLOSE_TIMEOUT` seconds at most.
    """
    ready.stopped = True
    ready.permits.put(None)  # the thread may be waiting for a permit: this wakes it
    if thread is threading.current_thread():
        return
    deadline = time.monotonic() + _CLOSE_TIMEOUT
    while thread.is_alive() and time.monotonic() < deadline:
        while_closing()
        thread.join(_POLL)
