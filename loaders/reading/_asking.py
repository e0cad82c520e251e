"""Worker processes that have remote shards read by the process that plans for all of them."""

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
from multiprocessing.util import get_temp_dir
from typing import Any

import numpy as np

from twinfeed.loaders._closing import Closing
from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.index import Index
from twinfeed.loaders.reading._fetch import Fetcher, Rows
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.remote._link import Link, answer

_PAUSE = 0.1
"""Seconds to wait where no more connections may be opened."""


class Answering(Closing):
    """Read with `reader` for worker processes, which may make batches on some threads each.

    The processes connect to a socket in a folder that is its owner's alone. They may be started by
    any method, at any time until `close`.
    """

    def __init__(self, reader: Reader, threads: int, /) -> None:
        self._reader = reader
        self._address = tempfile.mktemp(dir=get_temp_dir())
        server = socket.socket(socket.AF_UNIX)
        server.bind(self._address)
        server.listen(128)
        links: set[socket.socket] = set()
        stop = threading.Event()

        def call(name: str, *arguments: Any) -> Any:
            return getattr(reader._fetcher, name)(*arguments)

        threading.Thread(
            target=_accept,
            args=(server, stop, links, call, max(1, threads)),
            daemon=True,
            name="twinfeed-answering",
        ).start()
        self._finalize = weakref.finalize(self, _stop, self._address, stop, links, os.getpid())

    def reader(self) -> Reader:
        """Return what a worker reads with."""
        return _AskingReader(self._reader.index, self._address)

    def close(self) -> None:
        """End the connections."""
        self._finalize()


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
    """Have another process fetch rows, and check them."""

    def __init__(self, index: Index, address: str) -> None:
        super().__init__(index, verify=False)
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
        """Return the link to the other process; raise EOFError where that has ended."""
        with self._lock:
            if self._link is None:
                here = socket.socket(socket.AF_UNIX)
                try:
                    here.connect(self._address)
                except (ConnectionError, FileNotFoundError):
                    raise EOFError from None
                self._link = Link(Connection(here.detach()))
            return self._link


def _accept(
    server: socket.socket,
    stop: threading.Event,
    links: set[socket.socket],
    call: Callable[..., Any],
    threads: int,
) -> None:
    """Answer each process that connects, until `stop` is set and one more connects."""
    with server:
        while not stop.is_set():
            try:
                link, _ = server.accept()
            except OSError:
                time.sleep(_PAUSE)
                continue
            links.add(link)
            threading.Thread(
                target=_answer,
                args=(link, links, call, threads),
                daemon=True,
                name="twinfeed-answering",
            ).start()


def _answer(
    link: socket.socket, links: set[socket.socket], call: Callable[..., Any], threads: int
) -> None:
    with link, Connection(os.dup(link.fileno())) as connection:
        answer(connection, call, threads)
    links.discard(link)


def _stop(address: str, stop: threading.Event, links: set[socket.socket], process: int) -> None:
    """End the threads and their connections; a forked child that ends leaves them alone."""
    if os.getpid() != process:
        return
    stop.set()
    with suppress(OSError), socket.socket(socket.AF_UNIX) as last:
        last.connect(address)
    for link in list(links):
        with suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        os.unlink(address)
