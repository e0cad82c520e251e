"""Questions that one process asks another: many at once over one connection."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from twinfeed.loaders.errors import sendable

_LOOK = 5.0
"""Seconds after which a process that waits for an answer looks whether its parent lives."""


class Link:
    """Ask questions that `answer` answers at the other end. Several threads may share a link.

    A closed end tells that the other process has ended. The end of a parent may stay open after the
    parent has ended, since its children may have inherited it. So a link also looks at the parent.
    """

    def __init__(self, connection: Connection, /) -> None:
        self._connection = connection
        self._parent = os.getppid()
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._count = 0
        self.ended = False
        threading.Thread(target=self._listen, daemon=True, name="twinfeed-link").start()

    def ask(self, *question: object) -> Any:
        """Return the answer; raise what answering raised, and EOFError where the other process has
        ended.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self.ended:
                raise EOFError
            self._count += 1
            self._waiting[self._count] = future
            with suppress(OSError):  # the other process has ended, and `_listen` finds out
                self._connection.send((self._count, question))
        return future.result()

    def _listen(self) -> None:
        """Hand out answers until the other process ends."""
        with suppress(EOFError, OSError):
            while self._connection.poll(_LOOK) or os.getppid() == self._parent:
                if not self._connection.poll(0):
                    continue
                number, error, value = self._connection.recv()
                future = self._waiting.pop(number)
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)
        with self._lock:
            self.ended = True
            for future in self._waiting.values():
                future.set_exception(EOFError())


def answer(connection: Connection, call: Callable[..., Any], threads: int, /) -> None:
    """Answer questions with `call`, on `threads` threads, until the connection closes."""
    lock = threading.Lock()

    def reply(number: int, question: tuple[Any, ...]) -> None:
        error, value = None, None
        try:
            value = call(*question)
        except Exception as caught:
            error = sendable(caught)
        with lock, suppress(OSError):
            connection.send((number, error, value))

    pool = ThreadPoolExecutor(threads, "twinfeed-answer")
    with suppress(EOFError, OSError):
        while True:
            pool.submit(reply, *connection.recv())
    pool.shutdown(wait=False, cancel_futures=True)
