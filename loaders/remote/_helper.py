"""A helper process makes requests for a process that was forked from a process with obstore."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.remote import network
from twinfeed.loaders.remote.link import Link
from twinfeed.loaders.remote.network import PassingError
from twinfeed.loaders.remote.stores import Facts, Piece, Store


class Helped(Store):
    """Let a helper process make the requests, with its own threads and connections."""

    gives_facts = True

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
        for start in range(0, size, network.NETWORK.piece):
            yield self._read(path, start, min(size, start + network.NETWORK.piece)).data

    def _walk(self) -> Iterator[str]:
        yield from self._there("_walk")

    def _folders(self) -> Sequence[str]:
        found: list[str] = self._there("_folders")
        return found

    def _write(self, path: str, file: Path, /) -> None:
        self._there("_write", path, file)

    def _delete(self, path: str, /) -> None:
        self._there("_delete", path)


_RUN = __name__.replace("_helper", "_helping")  # which this module cannot import

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
                    f"from {_RUN} import serve; serve({there.fileno()})"
                )
                process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    pass_fds=[there.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            found = Link(Connection(here.detach()))
            _helpers[os.getpid()] = found, process
        return found
