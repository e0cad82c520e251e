"""Web servers and proxies: what they may answer, how long it may take, and who is asked at all."""

from __future__ import annotations

import base64
import logging
import os
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from support.servers import RangeServer, at_https
from support.shards import tfrecords

from twinfeed.loaders import LoaderError, Reader, build_index
from twinfeed.loaders.storage import open_store, retries
from twinfeed.loaders.storage.open_store import store_of
from twinfeed.loaders.storage.url import Location
from twinfeed.loaders.storage.url import masked as masked_text

SECRET = "S3CRET"
RANGE = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-2/9\r\n"


@contextmanager
def serving(handle: Callable[[socketserver.StreamRequestHandler], None]) -> Iterator[str]:
    """Give the address of a server that does so with each connection."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                handle(self)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def head(handler: socketserver.StreamRequestHandler) -> list[str]:
    """The lines of a request; none where the connection ends."""
    lines = []
    while line := handler.rfile.readline().strip().decode():
        lines.append(line)
    return lines


def answering(answer: bytes) -> Any:
    """A server that answers every request alike."""

    def handle(handler: socketserver.StreamRequestHandler) -> None:
        while head(handler):
            handler.wfile.write(answer)

    return serving(handle)


@pytest.fixture(autouse=True)
def without_exceptions(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every host, this machine too, asked through a proxy where there is one."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_silent_kept_connections_take_one_deadline(
    monkeypatch: pytest.MonkeyPatch, network: Callable[..., None]
) -> None:
    """As behind a NAT: nothing is refused, and nothing comes. The next attempt connects anew."""
    all_there, over = threading.Barrier(24), threading.Event()
    opened: list[object] = []
    silent: list[list[str]] = []

    def handle(handler: socketserver.StreamRequestHandler) -> None:
        opened.append(handler)
        head(handler)
        if len(opened) <= 24:
            all_there.wait(60)
        handler.wfile.write(RANGE + b"Content-Length: 3\r\n\r\nabc")
        silent.extend(filter(None, [head(handler)]))
        over.wait(60)

    monkeypatch.setenv("TWINFEED_PATIENCE", "0.01")
    with serving(handle) as address, ThreadPoolExecutor(24) as pool:
        store = store_of(Location.of(f"http://{address}"))
        list(pool.map(lambda _: store.read("a.tar", 0, 3), range(24)))
        network(first_pause=0.01, longest_pause=0.02, request_seconds=3)
        assert bytes(store.read("a.tar", 0, 3).data) == b"abc"
        over.set()
    assert len(silent) == 1
    assert len(opened) == 25


@pytest.mark.parametrize(
    ("more", "found"),
    [
        (b"", b"abc"),
        (b"X: 1\r\nx: 2\r\n", b"abc"),
        (b"CONTENT-RANGE: bytes 3-5/9\r\n", None),
        (b"content-encoding: identity\r\nContent-Encoding: gzip\r\n", None),
    ],
)
def test_response_with_a_checked_header_twice_is_requested_again(
    more: bytes, found: bytes | None
) -> None:
    """On a connection that is kept: after it, a thread of its own asks, and refuses it."""

    def handle(handler: socketserver.StreamRequestHandler) -> None:
        for extra in (b"", more):
            head(handler)
            handler.wfile.write(RANGE + extra + b"Content-Length: 3\r\n\r\nabc")

    with serving(handle) as address:
        store = store_of(Location.of(f"http://{address}"))
        assert bytes(store.read("a.tar", 0, 3).data) == b"abc"
        receive = store.send("a.tar", 0, 3)
        assert receive is not None
        result = receive()
        assert (None if result is None else bytes(result.data)) == found


def test_trickling_response_takes_one_deadline(network: Callable[..., None]) -> None:
    def handle(handler: socketserver.StreamRequestHandler) -> None:
        head(handler)
        handler.wfile.write(b"HTTP/1.1 206 Partial Content\r\nA: ")
        for _ in range(400):
            handler.wfile.write(b"b")
            time.sleep(0.05)

    network(first_pause=0.01, longest_pause=0.02, request_seconds=0.5)
    with serving(handle) as address, pytest.raises(LoaderError, match="TimeoutError"):
        store_of(Location.of(f"http://{address}")).read("a.tar", 0, 3)


def test_connection_closed_by_server_costs_no_attempt() -> None:
    """Also where it closes at the very moment of the next request."""
    answer = RANGE + b"Content-Length: 3\r\n\r\nabc"

    def handle(handler: socketserver.StreamRequestHandler) -> None:
        head(handler)
        handler.wfile.write(answer)
        head(handler)

    with serving(handle) as address:
        store = store_of(Location.of(f"http://{address}"))
        for _ in range(3):
            assert bytes(store.read("a.tar", 0, 3).data) == b"abc"


@pytest.mark.parametrize(
    "answer",
    [
        RANGE + b"Content-Length: 3\r\n\r\nabc",
        RANGE + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n",
        RANGE.replace(b"bytes", b"Bytes") + b"Content-Length: 3\r\n\r\nabc",
        RANGE.replace(b"/9", b"/*") + b"Content-Length: 3\r\n\r\nabc",
        RANGE + b"Content-Encoding:\r\nContent-Length: 3\r\n\r\nabc",
        RANGE + b"Content-Encoding: Identity\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 100 Continue\r\n\r\n" + RANGE + b"Content-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 102 Processing\r\n\r\n" * 3 + RANGE + b"Content-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + RANGE + b"\r\nabc",
    ],
)
def test_valid_responses_are_accepted(answer: bytes) -> None:
    with answering(answer) as address:
        store = store_of(Location.of(f"http://{address}"))
        for _ in range(2):
            assert bytes(store.read("a.tar", 0, 3).data) == b"abc"


def test_redirect_to_query_without_path_is_followed(server: RangeServer) -> None:
    server.moved["/a.tar"] = f"{server.url}?b"
    server.moved["/?b"] = f"{server.url}/c.tar#d"
    with pytest.raises(FileNotFoundError):
        store_of(Location.of(server.url)).read("a.tar", 0, 3)
    assert server.paths == ["/a.tar", "/?b", "/c.tar"]


@pytest.mark.parametrize(
    "to",
    ["https://[::1", "https://h:99999/", "https://h:x/", "https://a..b/", "https://a b/", "//[::1"],
)
def test_redirect_to_invalid_url_is_not_retried(server: RangeServer, to: str) -> None:
    server.moved["/a.tar"] = to
    with pytest.raises(LoaderError, match="redirects to, is malformed"):
        store_of(Location.of(server.url)).read("a.tar", 0, 3)
    assert server.paths == ["/a.tar"]


def test_size_from_a_refused_range_is_used(tmp_path: Path, server: RangeServer) -> None:
    """No file is taken for an empty file: an index would lack its records."""
    tfrecords(tmp_path, shards=1)[0].rename(tmp_path / "a.tfrecord")
    server.headers["Content-Range"] = "bytes */29150"
    server.fail = lambda _path, _start: 416
    with pytest.raises(LoaderError, match="a short body"):
        build_index(f"{server.url}/a.tfrecord", tmp_path / "x.index")
    server.headers["Content-Range"] = "bytes */0"
    assert store_of(Location.of(server.url)).read("a.tfrecord", 0, 9).info.bytes == 0


class Proxy:
    """A proxy that notes what it is asked, and leads everywhere to one server."""

    def __init__(self, target: str, password: str | None = None) -> None:
        self.target, self.password = target, password
        self.asked: list[str] = []
        self.given: set[str | None] = set()

    def __call__(self, handler: Any) -> None:
        while lines := head(handler):
            self.asked.append(lines[0])
            headers = dict(line.lower().split(": ", 1) for line in lines[1:])
            raw = dict(line.split(": ", 1) for line in lines[1:])
            self.given.add(raw.get("Proxy-Authorization"))
            if self.password and raw.get("Proxy-Authorization") != self.password:
                handler.wfile.write(b"HTTP/1.1 407 Who?\r\nContent-Length: 0\r\n\r\n")
                continue
            assert self.password or "proxy-authorization" not in headers
            method, url, version = lines[0].split()
            host, port = self.target.split(":")
            with socket.create_connection((host, int(port))) as there:
                if method == "CONNECT":
                    handler.wfile.write(b"HTTP/1.1 200 Connected\r\n\r\n")
                else:
                    path = urlsplit(url).path
                    rest = [line for line in lines[1:] if not line.startswith("Proxy-")]
                    text = "\r\n".join([f"{method} {path} {version}", *rest, "Connection: close"])
                    there.sendall(f"{text}\r\n\r\n".encode())
                back = threading.Thread(target=self._pump, args=(there.recv, handler.wfile.write))
                back.start()
                if method == "CONNECT":
                    self._pump(handler.rfile.read1, there.sendall)
                    there.shutdown(socket.SHUT_RDWR)
                back.join()
            return

    def _pump(self, read: Callable[[int], bytes], write: Callable[[bytes], object]) -> None:
        with suppress(OSError):
            while data := read(1 << 16):
                write(data)


AUTHORIZED = "Basic " + base64.b64encode("user:pa/ss#é".encode()).decode()


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("form", ["{}", "http://{}", "http://user:pa%2Fss%23%C3%A9@{}", "https"])
def test_proxy_settings_are_followed(
    tmp_path: Path,
    server: RangeServer,
    secure: RangeServer,
    scheme: str,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a scheme, with a password, and over TLS. The server is sent no password."""
    shard = tfrecords(tmp_path, shards=1)[0]
    there = server if scheme == "http" else secure
    proxy = Proxy(f"127.0.0.1:{there.server_port}", AUTHORIZED if "user" in form else None)

    def handle(handler: Any) -> None:
        if form != "https":
            proxy(handler)
            return
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.load_cert_chain(os.environ["SSL_CERT_FILE"])
        with made.wrap_socket(handler.request, server_side=True) as handler.request:
            handler.setup()
            proxy(handler)
            handler.finish()

    with serving(handle) as address:
        port = address.partition(":")[2]
        place = f"https://localhost:{port}" if form == "https" else form.format(address)
        monkeypatch.setenv(f"{scheme}_proxy", place)
        url = f"http://elsewhere.example/{shard.name}"
        if scheme == "https":
            url = f"{at_https(secure)}/{shard.name}"
        index = build_index([url], tmp_path / "x.index")
        with Reader(index) as reader:
            assert len(reader.read(range(10))["image"]) == 10
    expected = f"CONNECT localhost:{secure.server_port} " if scheme == "https" else f"GET {url} "
    assert proxy.asked
    assert all(line.startswith(expected) for line in proxy.asked)
    assert proxy.given == {proxy.password}
    assert "proxy-authorization" not in there.carried


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_proxy_that_requires_a_password_is_named(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Proxy("127.0.0.1:1", AUTHORIZED)) as address:
        monkeypatch.setenv(f"{scheme}_proxy", address)
        with pytest.raises(LoaderError, match=r"(?s)proxy.*407") as caught:
            store_of(Location.of(f"{scheme}://elsewhere.example")).read("a.tar", 0, 3)
    assert "store" not in caught.value.problem
    monkeypatch.setenv(f"{scheme}_proxy", "127.0.0.1:1")
    monkeypatch.setattr(open_store, "_stores", {})
    with pytest.raises(LoaderError, match="ConnectionRefusedError of the proxy"):
        store_of(Location.of(f"{scheme}://elsewhere.example")).read("a.tar", 0, 3)


def test_proxy_request_has_ipv6_address_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Proxy("127.0.0.1:1")
    with serving(proxy) as address:
        monkeypatch.setenv("https_proxy", address)
        with pytest.raises(LoaderError):
            store_of(Location.of("https://[2001:db8::1]:8443")).read("a.tar", 0, 3)
    assert {line.split()[1] for line in proxy.asked} == {"[2001:db8::1]:8443"}


def own_address() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("192.0.2.1", 9))
        return str(one.getsockname()[0])


@pytest.mark.parametrize("through", ["nothing", "a proxy"])
@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "0.0.0.0", "[::1]", "localhost"]
)
def test_redirect_to_loopback_is_refused_before_connecting(
    tmp_path: Path, host: str, through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it could find out which ports are open here. No proxy is asked for it either."""
    connected: list[object] = []
    proxy = Proxy("127.0.0.1:1")
    with (
        serving(connected.append) as inside,
        serving(proxy) as address,
        RangeServer(tmp_path, host="0.0.0.0") as outside,
    ):
        if through == "a proxy":
            monkeypatch.setenv("https_proxy", address)
        outside.moved["/a.tar"] = f"https://{host}:{inside.partition(':')[2]}/a.tar"
        store = store_of(Location.of(f"http://{own_address()}:{outside.server_port}"))
        with pytest.raises(LoaderError, match=r"(?s)redirects to .*loopback address"):
            store.read("a.tar", 0, 3)
    assert not connected
    assert not proxy.asked


def test_connection_uses_the_address_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is looked up once: a second answer could lead elsewhere."""
    find, asked = socket.getaddrinfo, []

    def found(host: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(host)
        return find("127.0.0.1" if host == "moving.example" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    connected: list[object] = []
    with serving(connected.append) as there:
        store = store_of(Location.of(f"http://moving.example:{there.partition(':')[2]}"))
        with pytest.raises(LoaderError, match="RemoteDisconnected"):
            store.read("a.tar", 0, 3)
    assert connected
    assert asked == ["moving.example"]


def test_logs_show_no_secret(server: RangeServer, caplog: pytest.LogCaptureFixture) -> None:
    """urllib3 logs each URL, and those of answers whose headers it cannot parse as warnings."""
    caplog.set_level(logging.DEBUG)
    with answering(RANGE + b"Content-Length: 3\r\nA header\r\n\r\nabc") as there:
        server.moved["/a.tar"] = f"{server.url}/b.tar?sig={SECRET}"
        (server.folder / "b.tar").write_bytes(b"abc")
        store_of(Location.of(server.url)).read("a.tar", 0, 3)
        with suppress(LoaderError):
            store_of(Location.of(f"http://{there}")).read("a.tar", 0, 3)
    assert SECRET not in caplog.text
    assert not [one for one in caplog.records if one.name.startswith("urllib3.connection")]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("user:S3CRET@host", "***@host"),
        ("http://user:a/S3CRET@host:3128", "http://***@host:3128"),
        ("http://user:a#S3CRET@host:3128", "***"),
        ("no route to https://h/a?b=c d&sig=S3CRET e", "no route to https://h/a?***"),
        ("https://h/a#access_token=S3CRET", "https://h/a#***"),
        ("https://h/a;token=S3CRET", "https://h/a;***"),
        ("s3://bucket/semi;colon=1", "s3://bucket/semi;colon=1"),
        ("https://h/a@b.tar", "https://h/a@b.tar"),
    ],
)
def test_masked_text_hides_possible_secrets(text: str, shown: str) -> None:
    assert masked_text(text) == str(retries.TransientError(text)) == shown
    assert SECRET not in str(retries.status_error("https://h/a", 503, text, 0))


def test_infinite_patience_sleeps_at_most_an_hour(
    tmp_path: Path, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a server asks for: time.sleep knows no such numbers."""
    slept: list[float] = []
    shard = tfrecords(tmp_path, shards=1)[0].name
    monkeypatch.setenv("TWINFEED_PATIENCE", "inf")
    monkeypatch.setattr(retries.time, "sleep", lambda pause: pause and slept.append(pause))
    asks = iter(["9" * 400, str(10**18), "Fri, 31 Dec 9999 23:59:59 GMT"])

    def busy(_path: str, _start: int) -> int | None:
        server.headers["Retry-After"] = ask = next(asks, None)
        return None if ask is None else 503

    server.fail = busy
    assert len(store_of(Location.of(server.url)).read(shard, 0, 3).data) == 3
    assert slept == [3600.0] * 3


def test_unreadable_key_is_an_error_that_names_it(tmp_path: Path, s3: str) -> None:
    """A pattern that would have to leave it out is refused."""
    bucket = boto3.resource("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"]).Bucket("bucket")
    shard = tfrecords(tmp_path, shards=1)[0].read_bytes()
    for key in ("odd/a.tfrecord", "odd/bad//b.tfrecord"):
        bucket.put_object(Key=key, Body=shard)
    with pytest.raises(LoaderError, match=r"(?s)found: .*odd/bad//b\.tfrecord"):
        build_index("s3://bucket/odd/*.tfrecord", tmp_path / "x.index")
    assert len(build_index("s3://bucket/odd/a.tfrecord", tmp_path / "x.index")) == 10
