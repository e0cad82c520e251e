"""A local web server of ranges, in a process of its own: it sends straight from the page cache."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path


@contextmanager
def server(folder: str | Path, *, delay: float = 0.0) -> Iterator[str]:
    """Yield the address of a server of the files in a folder, which answers after a delay.

    `GET /requests` gives the number of requests so far, without itself.
    """
    command = [sys.executable, __file__, str(folder), str(delay)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def serve(folder: Path, delay: float) -> None:
    """Serve for ever, after the port is printed."""
    numbers = itertools.count()

    @cache
    def opened(name: str) -> tuple[int, int] | None:
        path = folder / name
        return (os.open(path, os.O_RDONLY), path.stat().st_size) if path.is_file() else None

    def answer(client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with client:
            while request := client.recv(1 << 16):
                method, url, _ = request.split(b" ", 2)
                number = next(numbers)
                if url == b"/requests":
                    body = str(number).encode()
                    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
                    client.sendall(head + body)
                    continue
                time.sleep(delay)
                file = opened(url.decode().lstrip("/").partition("?")[0])
                if file is None:
                    client.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                else:
                    _send(client, *file, request, with_body=method == b"GET")

    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:
            client, _ = listening.accept()
            threading.Thread(target=answer, args=(client,), daemon=True).start()


def _send(client: socket.socket, file: int, size: int, request: bytes, *, with_body: bool) -> None:
    found = re.search(rb"(?i)range: bytes=(\d+)-(\d*)", request)
    start, last = (int(found[1]), int(found[2] or size - 1)) if found else (0, size - 1)
    last = min(last, size - 1)
    status = "206 Partial Content" if found else "200 OK"
    head = (
        f'HTTP/1.1 {status}\r\nETag: "1"\r\nAccept-Ranges: bytes\r\n'
        "Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n"
        f"Content-Range: bytes {start}-{last}/{size}\r\nContent-Length: {last + 1 - start}\r\n\r\n"
    )
    client.sendall(head.encode(), socket.MSG_MORE if with_body else 0)
    while with_body and start <= last:
        start += os.sendfile(client.fileno(), file, start, last + 1 - start)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), float(sys.argv[2]))
