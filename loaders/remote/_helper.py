"""A helper process makes requests for a process that was forked from a process with obstore."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.remote import _network
from twinfeed.loaders.remote._link import Link, answer
from twinfeed.loaders.remote._network import PassingError
from twinfeed.loaders.remote._store import Facts, Piece, Store, direct_store


class Helped(Store):
    """Let a helper process make the requests, with its own threads and connections."""

    tells = True

    def _there(self, name: str, *arguments: object) -> Any:
        try:
            return _helper().ask(self.root, name, *arguments)
        except EOFError:
            raise PassingError("the process that reads for this one ended") from None

    def _facts(self, path: str, /) -> Facts:
        found: Facts = self._there("_facts", path)
        return found

    def _read(self, path: str, start: int, stop: int, /) -> Piece:
        data, facts = self._there("_read", path, start, stop)
        return Piece(memoryview(data), facts)

    def _stream(self, path: str, /) -> Iterator[memoryview]:
        size = self._facts(path).bytes
        if size is None:
            raise LoaderError("the server does not tell how long this shard is", path=path)
        for start in range(0, size, _network.NETWORK.piece):
            yield self._read(path, start, min(size, start + _network.NETWORK.piece)).data

    def _walk(self) -> Iterator[str]:
        yield from self._there("_walk")

    def _write(self, path: str, file: Path, /) -> None:
        self._there("_write", path, file)

    def _delete(self, path: str, /) -> None:
        self._there("_delete", path)


_helpers: dict[int, tuple[Link, subprocess.Popen[bytes]]] = {}
_starting: dict[int, threading.Lock] = {}


def _helper() -> Link:
    """Return the link to the helper of this process. The first call starts the helper.

    The helper ends when the socket closes. The socket closes at the latest when this process ends.
    """
    with _starting.setdefault(os.getpid(), threading.Lock()):
        found, _ = _helpers.get(os.getpid(), (None, None))
        if found is None or found.ended:
            here, there = socket.socketpair()
            with there:
                code = (
                    f"import sys; sys.path[:] = {sys.path!r}; "
                    f"from {__name__} import serve; serve({there.fileno()})"
                )
                process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    pass_fds=[there.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            found = Link(Connection(here.detach()))
            _helpers[os.getpid()] = found, process
        return found


def serve(fd: int) -> None:
    """Make the requests that come over a socket, many at once, until the socket closes."""
    lock = threading.Lock()
    stores: dict[str, Store] = {}

    def call(root: str, name: str, *arguments: Any) -> Any:
        with lock:
            if root not in stores:
                stores[root] = direct_store(root)
        value = getattr(stores[root], name)(*arguments)
        if name == "_walk":
            return list(value)
        return (bytes(value.data), value.facts) if name == "_read" else value

    answer(Connection(fd), call, _network.NETWORK.requests)
    os._exit(0)
