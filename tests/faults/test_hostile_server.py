"""A web server that answers what it likes: an error of this library, soon, and in little memory."""

from __future__ import annotations

import socketserver
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.inside import Location, store_of
from support.shards import write_tar

from twinfeed.loaders import LoaderError, ShardWarning, build_index, open_index

RANGE = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-0/9\r\nContent-Length: 1\r\n"
DIGITS = b"9" * 5000
"""More than Python makes an integer of."""


@contextmanager
def answering(*pieces: bytes) -> Iterator[str]:
    """Give the URL of a server that answers every request alike, and then closes."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            for piece in pieces:
                try:
                    self.wfile.write(piece)
                except OSError:
                    return

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINFEED_PATIENCE", "0")


def test_fault_96_body_longer_than_its_headers_takes_no_memory() -> None:
    chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    with answering(RANGE + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 64) as url:
        store = store_of(Location.of(url))
        tracemalloc.start()
        try:
            data = store.read("a.tar", 0, 1).data
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert bytes(data) == b"\0"
    assert peak < 8 << 20


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: " + DIGITS,
        b"HTTP/1.1 206 OK\r\nContent-Length: 1",
        b"HTTP/1.1 206 OK\r\nContent-Length: 1\r\nContent-Range: bytes 0-0/" + DIGITS,
        b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: https://[::1",
        b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: https://h:99999999/",
        b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: https:///a.tar",
        b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nRetry-After: " + DIGITS,
        b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nRetry-After: Wed, 21 Oct 99999 07:28:00 GMT",
        b"HTTP/1.1 " + DIGITS + b" OK",
        b"HTTP/1.1 206 OK\r\n" + b"A: b\r\n" * 500,
        b"HTTP/1.1 206 OK\r\nA: " + b"b" * (1 << 17),
        b"\0\xff" * (1 << 17),
        b"",
    ],
)
def test_fault_96_malformed_headers_are_an_error(tmp_path: Path, head: bytes) -> None:
    with answering(head + b"\r\n\r\n") as url:
        for place in (f"{url}/a.tar", f"{url}/*.tar"):
            with pytest.raises(LoaderError, match=url):
                build_index([place], tmp_path / "x.index")


def test_errors_hold_no_terminal_controls(tmp_path: Path) -> None:
    """A traceback shows what a server, an index or a shard says."""
    with (
        answering(b"HTTP/1.1 403 \x1b[2J\x9b\r\nContent-Length: 0\r\n\r\n") as url,
        pytest.raises(LoaderError, match="status 403") as caught,
    ):
        build_index([f"{url}/a.tar"], tmp_path / "x.index")
    assert r"\x1b[2J\x9b" in str(caught.value)
    error = LoaderError(
        "no \x1b[0m", path="a\x07", key="k\u202e", found="one\ntwo\r", advice="\x7f"
    )
    assert all(line.isprintable() for line in str(error).split("\n"))
    assert "one\n" in str(error)
    assert str(ShardWarning("a\x1b[2J.tar: no end")) == r"a\x1b[2J.tar: no end"
    (tmp_path / "\x1b[2J.tar").write_bytes(
        write_tar(tmp_path / "a", [("k", {"x": b""})]).read_bytes()
    )
    index = build_index([tmp_path / "\x1b[2J.tar"], tmp_path / "x.index")
    (tmp_path / "\x1b[2J.tar").unlink()
    with pytest.raises(FileNotFoundError, match="missing here") as gone:
        open_index(index.path)
    assert str(gone.value).isprintable()
