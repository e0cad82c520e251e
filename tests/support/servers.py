"""Web servers: one of ranges, which counts requests and fails on demand, and one at https."""

from __future__ import annotations

import datetime
import http.server
import ipaddress
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from support.inside import _http_connections


class RangeServer(http.server.ThreadingHTTPServer):
    """Serve the files of a folder by ranges.

    `fail(path, start)` says what happens to a request for a range: None, a status, "reset",
    "short", "hang", "whole" or "endless". `tags` has tags that are not made of the files. `headers`
    replaces headers of answers to GET; None leaves a header out. `moved` says by path where a
    request is redirected to.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder: Path, *, delay: float = 0.0, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), _Handler)
        self.folder = folder
        self.delay = delay
        self.fail: Callable[[str, int], int | str | None] = lambda _path, _start: None
        self.tags: dict[str, str] = {}
        self.headers: dict[str, str | None] = {}
        self.moved: dict[str, str] = {}
        self.lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Count from nothing."""
        self.asked: Counter[str] = Counter()
        self.paths: list[str] = []
        self.carried: set[str] = set()
        self.ranges: list[tuple[str, int, int]] = []
        self.sent = self.now = self.most = self.bytes_now = self.most_bytes = 0

    def hold(self, count: int, *, after: int = 0) -> None:
        """Answer nothing until so many requests are in flight (a minute, and not more), `after` so
        many requests that are answered at once.
        """
        there, first = threading.Event(), iter(range(after))

        def held(_path: str, _start: int) -> None:
            if next(first, None) is None and (self.now >= count or not there.wait(60)):
                there.set()

        self.fail = held

    @property
    def url(self) -> str:
        """The URL of the folder."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that the other side closed."""

    def __enter__(self) -> RangeServer:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body leave together
    server: RangeServer

    def do_HEAD(self) -> None:
        """Send the size and the tag of a file."""
        self._note("HEAD")
        time.sleep(self.server.delay)
        self._head(200, self._file())
        with self.server.lock:
            self.server.now -= 1

    def do_GET(self) -> None:
        """Send a range of a file, or all."""
        file, asked = self._file(), self.headers.get("Range")
        self._note("GET" if asked else "WHOLE")
        size = file.stat().st_size if file.exists() else 0
        start, stop = 0, size
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(size, int(last) + 1)
        length = max(0, stop - start)
        with self.server.lock:
            self.server.ranges.append((self.path.lstrip("/"), start, stop))
            self.server.bytes_now += length
            self.server.most_bytes = max(self.server.most_bytes, self.server.bytes_now)
        self.length: int | None = length  # of the answer that is under way
        try:
            time.sleep(self.server.delay)
            self._send(file, start, stop, size, whole=not asked)
        finally:
            self._over()

    def _over(self) -> None:
        """Count an answer off, before its last byte: then the client may ask again."""
        with self.server.lock:
            if self.length is not None:
                self.server.now -= 1
                self.server.bytes_now -= self.length
            self.length = None

    def _note(self, what: str) -> None:
        with self.server.lock:
            self.server.paths.append(self.path)
            self.server.carried |= {name.lower() for name in self.headers}
            self.server.asked[what] += 1
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)

    def _send(self, file: Path, start: int, stop: int, size: int, *, whole: bool) -> None:
        if self.path in self.server.moved:
            self.send_response(307)
            self.send_header("Location", self.server.moved[self.path])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if not file.exists():
            self._head(404, None)
            return
        fate = self.server.fail(file.name, start)
        if isinstance(fate, int):
            self._head(fate, None)
            return
        if fate == "reset":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
            return
        size = file.stat().st_size  # `fail` may have changed the file
        stop = size if whole else min(size, int(self.headers["Range"].rpartition("-")[2]) + 1)
        if fate == "whole":
            whole, start, stop = True, 0, size
        if start >= size and not whole:
            self._head(416, None)
            return
        with file.open("rb") as data:
            data.seek(start)
            body = data.read(stop - start)
        self._head(200 if whole else 206, file, start, stop)
        if fate == "short":
            body, self.close_connection = body[: len(body) // 2], True
        with suppress(OSError):
            if fate == "hang":
                self.wfile.write(body[:1])
                self.wfile.flush()
                time.sleep(3)
                self.close_connection = True
                return
            self.wfile.write(body[:-1])
            self._over()
            with self.server.lock:
                self.server.sent += len(body)
            self.wfile.write(body[-1:])
            self.wfile.flush()

    def _head(self, status: int, file: Path | None, start: int = 0, stop: int = -1) -> None:
        if file is not None and not file.exists():
            status, file = 404, None
        size = 0 if file is None else file.stat().st_size
        headers: dict[str, str | None] = {"Content-Length": str(size if stop < 0 else stop - start)}
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        if file is not None:
            headers["ETag"] = self.server.tags.get(file.name, f'"{file.stat().st_mtime_ns}"')
        headers |= self.server.headers
        self.close_connection |= headers["Content-Length"] is None
        self.send_response(status)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()

    def _file(self) -> Path:
        return self.server.folder / unquote(self.path.partition("?")[0]).lstrip("/")

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def serving_securely(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    """Serve the files of a folder as localhost. SSL_CERT_FILE names the certificate and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    day = datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / "certificate.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM) + private)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    _http_connections.tls_context.cache_clear()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    with RangeServer(folder) as serving:
        serving.socket = context.wrap_socket(serving.socket, server_side=True)
        yield serving
    _http_connections.tls_context.cache_clear()


def at_https(server: RangeServer) -> str:
    return f"https://localhost:{server.server_address[1]}"


def put_folder(bucket: Any, folder: Path, key: str) -> None:
    """Upload the files of a folder to a bucket of boto3, below a key."""
    for file in filter(Path.is_file, folder.rglob("*")):
        bucket.upload_file(str(file), f"{key}/{file.relative_to(folder).as_posix()}")
