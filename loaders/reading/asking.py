"""Worker processes read remote shards through the process that plans for all workers."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.index import Index
from twinfeed.loaders.reading.fetcher import Fetcher
from twinfeed.loaders.reading.ranges import Rows
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.remote.link import Link, answer
from twinfeed.loaders.support.closing import Closing
from twinfeed.loaders.support.temporary import socket_folder

_PAUSE = 0.1
"""Seconds to wait where no more connections may be opened."""


class Answering(Closing):
    """Read with `reader` for worker processes. Each of these may make batches on `threads` threads.

    The workers connect to a socket in a private folder. They may be started by any method, at any
    time until `close`, or until `owner` is deleted.
    """

    def __init__(self, owner: object, reader: Reader, threads: int, /) -> None:
        self._made = reader
        self._threads = max(1, threads)
        self._process = os.getpid()
        self._address = tempfile.mktemp(dir=socket_folder())
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self._address)
        self._server.listen(128)
        self._links: set[socket.socket] = set()
        self._closed = False
        self._start(self._accept)
        weakref.finalize(owner, self.close)

    def reader(self) -> Reader:
        """Return the reader for a worker."""
        return _AskingReader(self._made.index, self._address)

    def close(self) -> None:
        """End the connections. In a forked child, do nothing."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        with suppress(OSError), socket.socket(socket.AF_UNIX) as last:
            last.connect(self._address)  # wakes `accept`
        for link in list(self._links):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            os.unlink(self._address)

    def _start(self, function: Callable[..., None], *arguments: object) -> None:
        name = "twinfeed-answering"
        threading.Thread(target=function, args=arguments, daemon=True, name=name).start()

    def _accept(self) -> None:
        """Answer each process that connects."""
        with self._server:
            while True:
                try:
                    link, _ = self._server.accept()
                except OSError:  # too many open files
                    time.sleep(_PAUSE)
                    continue
                if self._closed:
                    link.close()
                    return
                self._links.add(link)
                self._start(self._answer, link)

    def _answer(self, link: socket.socket) -> None:
        with link, Connection(os.dup(link.fileno())) as connection:
            answer(connection, self._call, self._threads)
        self._links.discard(link)

    def _call(self, name: str, *arguments: Any) -> Any:
        return getattr(self._made._fetcher, name)(*arguments)


class _AskingReader(Reader):
    """Read by asking the process at an address."""

    def __init__(self, index: Index, address: str) -> None:
        self._address = address
        super().__init__(index)

    def __reduce__(self) -> tuple[Any, ...]:
        return _AskingReader, (self.index, self._address)

    def _begin(self) -> Fetcher:
        return _Asking(self.index, self._address)


class _Asking(Fetcher):
    """Let another process fetch and check rows."""

    def __init__(self, index: Index, address: str) -> None:
        super().__init__(index, checksums=False)
        self._address = address
        self._lock = threading.Lock()
        self._link: Link | None = None

    def fetch(self, rows: Rows, /, *, neighbours: bool = True) -> list[bytes]:
        """Return the bytes of each row."""
        return self._ask("fetch", rows)  # type: ignore[no-any-return]

    def reread(self, row: np.void, /) -> bytes:
        """Read one row again."""
        return self._ask("reread", row)  # type: ignore[no-any-return]

    def _ask(self, *question: object) -> Any:
        try:
            return self._connected().ask(*question)
        except EOFError:
            raise LoaderError("the loader that reads for this worker was closed") from None

    def _connected(self) -> Link:
        """Return the link to the other process; raise EOFError if that process has ended."""
        with self._lock:
            if self._link is None:
                here = socket.socket(socket.AF_UNIX)
                try:
                    here.connect(self._address)
                except (ConnectionError, FileNotFoundError):
                    raise EOFError from None
                self._link = Link(Connection(here.detach()))
            return self._link
