"""Requests made by a process of its own, for one that was forked from a process with obstore."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.remote import _network
from twinfeed.loaders.remote._network import PassingError
from twinfeed.loaders.remote._store import Backend, Facts, Piece, direct_backend


class Helped(Backend):
    """Have another process make the requests: it has threads and connections of its own."""

    tells = True

    def _ask(self, name: str, *arguments: object) -> Any:
        return _helper().ask(self.root, name, arguments)

    def facts(self, path: str, /) -> Facts:
        """Return the facts of a file."""
        found: Facts = self._ask("facts", path)
        return found

    def read(self, path: str, start: int, stop: int, /) -> Piece:
        """Return a range."""
        data, facts = self._ask("read", path, start, stop)
        return Piece(memoryview(data), facts)

    def stream(self, path: str, /) -> Iterator[memoryview]:
        """Yield the bytes of a file, asked for in ranges."""
        size = self.facts(path).bytes
        if size is None:
            raise LoaderError("the server does not tell how long this shard is", path=path)
        for start in range(0, size, _network.NETWORK.piece):
            yield self.read(path, start, min(size, start + _network.NETWORK.piece)).data

    def walk(self, folder: str, /) -> Iterator[str]:
        """Yield the paths of the files below a folder."""
        yield from self._ask("walk", folder)

    def write(self, path: str, file: Path, /) -> None:
        """Write a file."""
        self._ask("write", path, file)

    def delete(self, path: str, /) -> None:
        """Delete a file."""
        self._ask("delete", path)


class _Helper:
    """Send requests to a process over a socket, and sort its answers; it ends when the socket
    closes, as the socket does when this process ends.
    """

    def __init__(self) -> None:
        here, there = socket.socketpair()
        with there:
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; "
                f"from {__name__} import serve; serve({there.fileno()})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[there.fileno()], stdin=subprocess.DEVNULL
            )
        self._link = Connection(here.detach())
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._count = 0
        threading.Thread(target=self._listen, daemon=True, name="twinfeed-helper").start()

    def ask(self, root: str, name: str, arguments: tuple[object, ...]) -> Any:
        """Return what a backend's method returns there."""
        future: Future[Any] = Future()
        with self._lock:
            self._count += 1
            self._waiting[self._count] = future
            try:
                self._link.send((self._count, root, name, arguments))
            except OSError as error:
                raise PassingError(f"the process that reads for this one ended: {error}") from error
        return future.result()

    def _listen(self) -> None:
        """Hand out answers until the other process ends."""
        try:
            while True:
                number, error, value = self._link.recv()
                future = self._waiting.pop(number)
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)
        except (EOFError, OSError):
            with self._lock:
                _helpers.pop(os.getpid(), None)
                for future in self._waiting.values():
                    future.set_exception(PassingError("the process that reads for this one ended"))
                self._waiting.clear()


_helpers: dict[int, _Helper] = {}
_starting: dict[int, threading.Lock] = {}


def _helper() -> _Helper:
    """Return the helper of this process, started when first asked for."""
    with _starting.setdefault(os.getpid(), threading.Lock()):
        found = _helpers.get(os.getpid())
        if found is None:
            found = _helpers[os.getpid()] = _Helper()
        return found


def serve(fd: int) -> None:
    """Make the requests that come over a socket, many at once, until the socket closes."""
    link, lock = Connection(fd), threading.Lock()
    backends: dict[str, Backend] = {}

    def answer(number: int, root: str, name: str, arguments: tuple[Any, ...]) -> None:
        error, value = None, None
        try:
            with lock:
                if root not in backends:
                    backends[root] = direct_backend(root)
            value = getattr(backends[root], name)(*arguments)
            if name == "walk":
                value = list(value)
            elif name == "read":
                value = bytes(value.data), value.facts
        except Exception as caught:
            error = caught
        with lock:
            link.send((number, error, value))

    with ThreadPoolExecutor(_network.NETWORK.requests) as pool:
        while True:
            try:
                number, root, name, arguments = link.recv()
            except (EOFError, ConnectionError):
                os._exit(0)
            pool.submit(answer, number, root, name, arguments)
