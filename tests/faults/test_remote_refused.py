"""Places that are refused, and places that do not answer: in words, with few requests."""

from __future__ import annotations

import http.server
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.inside import Location, open_store, unquoted
from support.servers import RangeServer

from twinfeed.loaders import (
    DiskCache,
    Index,
    LoaderError,
    Reader,
    UnsafeContentError,
    build_index,
    open_index,
    pack,
    verify,
)

SECRET = "S3CRET"
ANSWER = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>SlowDown</Code><Message>Reduce your
request rate.</Message><RequestId>1</RequestId></Error>"""


class Answers(http.server.BaseHTTPRequestHandler):
    """Answer as S3 does: with the status that the bucket is named after."""

    def do_GET(self) -> None:
        self.send_response(int(self.path[1:4]))
        self.send_header("Content-Length", str(len(ANSWER)))
        self.end_headers()
        self.wfile.write(ANSWER)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@dataclass
class World:
    """A shard of eight records, at a server too; and what one row changes."""

    server: RangeServer
    other: RangeServer
    answers: str
    local: Index
    far: Index
    shard: str
    patch: pytest.MonkeyPatch = field(default_factory=pytest.MonkeyPatch)
    network: Callable[..., None] = lambda **_: None
    out: Path = Path()

    def at(self, place: str) -> str:
        """A URL, in which HOST is the server and OTHER is a server that nobody may ask."""
        return place.replace("HOST", self.server.url[7:]).replace("OTHER", self.other.url[7:])

    def read(self, cache: DiskCache | None = None) -> object:
        with Reader(open_index(self.local.path, root=self.server.url, cache=cache)) as reader:
            return reader.read([5])["x"]


Call = Callable[[World], object]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, s3: str) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("served")
    local = pack(({"x": bytes([n] * 1000)} for n in range(8)), folder, shard_records=8)["data"]
    shard = local.shard_paths[0]
    with (
        RangeServer(folder) as server,
        RangeServer(folder) as other,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as answers,
    ):
        threading.Thread(target=answers.serve_forever, args=(0.02,), daemon=True).start()
        (folder / "data").symlink_to(folder)
        far = build_index(f"{server.url}/data/{shard}", tmp_path_factory.mktemp("far") / "x.index")
        yield World(server, other, f"http://127.0.0.1:{answers.server_port}", local, far, shard)
        answers.shutdown()


@pytest.fixture
def world(
    made: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    network: Callable[..., None],
) -> World:
    """The world as it was made, with short pauses."""
    made.patch, made.network, made.out = monkeypatch, network, tmp_path / "out"
    server = made.server
    server.fail, server.headers, server.moved, server.tags = lambda _path, _start: None, {}, {}, {}
    for one in (server, made.other):
        one.clear()
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(open_store, "_stores", {})
    network(first_pause=0.01, longest_pause=0.02, retry_seconds=0.09)
    return made


def built(shards: str) -> Call:
    return lambda w: build_index([w.at(shards)], w.out)


def opened(place: str, **variables: str | None) -> Call:
    return under(lambda w: open_index(w.at(place)), **variables)


def read(fate: int | str | None = None, **changes: float) -> Call:
    """Read a record where the server answers so, and the network is used in another way."""

    def call(w: World) -> object:
        w.server.fail = lambda _path, _start: fate
        w.network(**changes)
        return w.read()

    return call


def header(name: str, value: str | None) -> Call:
    return lambda w: (w.server.headers.update({name: value}), read(retry_seconds=60)(w))


def redirected(to: str) -> Call:
    return lambda w: (w.server.moved.update({f"/{w.shard}": w.at(to)}), read(retry_seconds=0)(w))


def changing(w: World) -> object:
    """Open an index of which each request finds another state."""
    w.server.fail = lambda name, start: w.server.tags.update({name: f'"{start}"'})
    w.network(part_bytes=1300)
    return open_index(f"{w.server.url}/data.index")


def under(call: Call, **variables: str | None) -> Call:
    """In an environment with these variables, or without those that are None."""

    def changed(w: World) -> object:
        for name, value in variables.items():
            if value is None:
                w.patch.delenv(name)
            else:
                w.patch.setenv(name, w.at(value))
        return call(w)

    return changed


def answered(place: str, **variables: str | None) -> Call:
    """In a store whose answer has the status that the bucket is named after."""

    def call(w: World) -> object:
        w.network(retry_seconds=0)
        at = {"AWS_ENDPOINT_URL": w.answers, **variables}
        return under(built(place) if "*" in place else opened(place), **at)(w)

    return call


def cached(make: Callable[[Path], object], *below: str) -> Call:
    """Through a cache in a folder that is made so."""

    def call(w: World) -> object:
        folder = w.out.with_name("cache")
        make(folder)
        return w.read(DiskCache(folder.joinpath(*below), bytes=10**9))

    return call


def holding(folder: Path) -> None:
    """Make a folder in which a folder has the name of a file of a cache."""
    folder.mkdir(mode=0o700)
    (folder / "used").mkdir()


URLS = {
    "s3://bucket": "names no file",
    "s3://": "no host or bucket",
    "s3:///a.tar": "no host or bucket",
    "s3://bucket/a//b.tar": "an empty name",
    "s3://bucket/../a.tar": "the name [.] or [.][.]",
    "s3://bucket/./a.tar": "the name [.] or [.][.]",
    "s3://bucket/a\0b.tar": "a control character",
    "s3://bucket/a\nb.tar": "a control character",
    "s3://bucket/a\udc80.tar": "not UTF-8",
    "s3://bu?ket/a.tar": "no host or bucket",
    "abfss://box@evil.example/a.tar": "no host or bucket",
    "http://host/%2e%2e/a.tar": "the name [.] or [.][.]",
    "http://host/a%00b.tar": "a control character",
    "http://host/a\\b.tar": "a backslash",
    "http://host/a.tar#part": "a fragment",
    "http://host/a.tar?part": "a query",
    "http:///a.tar": "no host or bucket",
    "http://host:port/a.tar": "no host or bucket",
    "memory://a/b::file:///etc/passwd": "a chain of file systems",
    "zip://x::http://host/a.zip": "no host or bucket",
    f"pipe://user:{SECRET}@host/x": "commands are never run",
    f"pipe:curl http://u:{SECRET}@host/x": "commands are never run",
}
NO_KEYS: Any = {
    **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")),
    "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1",
}
NONE, GONE = "s3://no-such-bucket/x.index", FileNotFoundError
CACHE = {"TWINFEED_CACHE": "x"}

REFUSED: list[tuple[Call, type[Exception], str, int]] = [
    *((built(url), LoaderError, word, 0) for url, word in URLS.items()),
    *(
        (lambda w, url=url: build_index(w.local.root, url), ValueError, "is a URL: write to", 0)
        for url in URLS
        if "commands" not in URLS[url]
    ),
    (lambda w: Location.of("bucket/a.tar"), LoaderError, "not a URL", 0),
    (lambda w: unquoted("a%2Fb"), UnsafeContentError, "encoded /", 0),
    # An index that leads elsewhere, and the places that the environment allows
    (lambda w: open_index(w.far.path), UnsafeContentError, "lie elsewhere(.|\n)*root='http", 0),
    (lambda w: verify(w.far.path), UnsafeContentError, "lie elsewhere", 0),
    *(
        (under(lambda w: open_index(w.far.path), TWINFEED_ROOTS=roots), LoaderError, word, 0)
        for roots, word in (
            ("", "lie elsewhere"),
            ("http://HOST/dat", "lie elsewhere"),
            ("http://HOST/data/sub", "lie elsewhere"),
            ("http://127.0.0.1 s3://b", "lie elsewhere"),
            (f"https://user:{SECRET}@host", "TWINFEED_ROOTS .*a user or a password"),
        )
    ),
    # Answers that a later attempt cannot change, and others
    (read(400), LoaderError, "data-0000", 1),
    (read(403), LoaderError, "carry no credentials", 1),
    (read(404), GONE, "data-0000", 1),
    (read("whole"), LoaderError, "does not support range requests", 1),
    *(
        (read(fate, retry_seconds=0.03), LoaderError, r"bytes \d+ to \d+\n.*\(3 attempts in", 3)
        for fate in (500, 429, "reset", "short")
    ),
    (read("hang", retry_seconds=0.01, request_seconds=0.3), LoaderError, "Time.*2 attempts", 2),
    *(
        (under(read(503), TWINFEED_PATIENCE=patience), LoaderError, "TWINFEED_PATIENCE", attempts)
        for patience, attempts in (("0", 1), ("0.03", 3), ("0.06", 5))
    ),
    *(
        (under(read(), TWINFEED_PATIENCE=text), ValueError, f"seconds, 0 or more, got '{text}'", 0)
        for text in ("soon", "-1", "nan")
    ),
    *(
        (header(name, value), LoaderError, f"wrong header {name}", 1)
        for name, value in (
            ("Content-Length", "1"),
            ("Content-Range", None),
            ("Content-Range", "bytes 1-9/*"),
            ("Content-Range", "bytes 3-12/1000"),
            ("Content-Range", "items"),
            ("Content-Encoding", "gzip"),
        )
    ),
    (built("http://HOST/d-*.tar"), LoaderError, r"does not list(.|\n)*train-{00000\.\.00063}", 2),
    (opened("http://HOST/x.index"), GONE, "no index here .*twinfeed index SHARDS --out", 1),
    (changing, LoaderError, "the file changed during the download", 2),
    (
        lambda w: build_index(w.local.root, w.at("http://HOST/x.index")),
        ValueError,
        "is a URL: write to a local folder, and upload the folder",
        0,
    ),
    (under(built("ftp://127.0.0.1:1/a"), TWINFEED_PATIENCE="0"), LoaderError, "be reached", 0),
    (under(built("http://127.0.0.1:1/a"), TWINFEED_PATIENCE="0"), LoaderError, "be reached", 0),
    (
        lambda w: Reader(open_index(w.local.path, root="http://127.0.0.1:1")).read([5]),
        LoaderError,
        "be reached(.|\n)*data-0000",
        0,
    ),
    (built("memory://bucket/gone.tar"), GONE, "no such file; check the URL", 0),
    (built("s3://bucket/gone/*.tar"), GONE, "^no shard matches 's3://bucket/gone/.*check the", 0),
    (built("memory://bucket/*.tar"), GONE, "^no shard matches 'memory://bucket/.*check the na", 0),
    (built("/nowhere/*.tar"), GONE, "^no shard matches '/nowhere/.*check the name", 0),
    # URLs that a server redirects to
    *(
        (redirected(to), LoaderError, "redirects to another URL, which is not allowed", 1)
        for to in (
            "http://OTHER/a.tar",
            "ftp://OTHER/a.tar",
            "file:///etc/passwd",
            f"http://other.example/a.tar#access_token={SECRET}",
            f"http://other.example/a.tar;token={SECRET}",
            f"http://user:{SECRET}@OTHER/a.tar",
            f"https://user:{SECRET}@OTHER/a.tar",
        )
    ),
    (
        redirected("/data-00000-of-00001.tfrecord"),
        LoaderError,
        "redirects to another URL, which is not allowed",
        5,
    ),
    (
        redirected(f"https://127.0.0.1:1/a b?X-Amz-Signature={SECRET} x"),
        LoaderError,
        "the server cannot be reached",
        1,
    ),
    *(
        (redirected(to), LoaderError, "is malformed", 1)
        for to in (
            f"https://user:a/{SECRET}@other.example/a.tar",
            f"https://h:99999999/a?sig={SECRET}",
        )
    ),
    # Proxies, which are never bypassed
    *(
        (under(read(), http_proxy=proxy), LoaderError, "the proxy that the environment names", 0)
        for proxy in (
            f"socks5://user:{SECRET}@OTHER",
            f"socks5h://{SECRET}@OTHER",
            f"http://user:a/{SECRET}@OTHER",
            f"http://user:a#{SECRET}@OTHER",
            f"http://user:a?{SECRET}@OTHER",
            f"http://user:a@{SECRET}@OTHER",
            f"user:a/{SECRET}@OTHER",
            f"http://user:{SECRET}@OTHER/path",
        )
    ),
    # Stores, and what the environment says of them (obstore panics at some endpoints)
    (opened("s3://bucket/plian"), GONE, "no index here .* --out train.index", 0),
    (built("s3://no-such-bucket/*.tar"), LoaderError, "(?s)no-such-bucket.*NoSuchBucket", 0),
    (answered("s3://403/*.tar"), LoaderError, "(?s)refuses to serve.*set AWS_ACCESS_KEY_ID", 0),
    (answered("s3://403/x"), LoaderError, "403 Forbidden: SlowDown: Reduce your request", 0),
    (answered("s3://200/x"), LoaderError, "does not support range requests", 0),
    (answered("s3://400/x"), LoaderError, "(?s)refuses the request.*400 Bad Request: SlowDown", 0),
    (answered("s3://503/x"), LoaderError, "(?s)be reached.*503 Service Unavailable: SlowDown", 0),
    (answered("s3://301/x"), LoaderError, "(?s)refuses the.*Received redirect without LOC", 0),
    *(
        (answered(place, **NO_KEYS), LoaderError, "(?s)^no credentials .*set AWS_ACC.*profiles", 0)
        for place in ("s3://403/*.tar", "s3://403/x")
    ),
    (answered("s3://403/x", AWS_ALLOW_HTTP=None), LoaderError, "set AWS_ALLOW_HTTP=true", 0),
    (
        answered("s3://403/x", AWS_ENDPOINT_URL_S3="https://127.0.0.1:1"),  # which counts
        LoaderError,
        r"error sending request \(Connect\)",
        0,
    ),
    (opened(NONE, AWS_S3_EXPRESS="perhaps"), LoaderError, "(?s)perhaps.*correct or unset", 0),
    *(
        (opened(NONE, AWS_ENDPOINT_URL=given), LoaderError, "AWS_ENDPOINT_URL .*not the URL of", 0)
        for given in (
            *("", " ", "localhost:9000", "http://", "http://a:99999", "http://[a"),
            *(f"http://user:{SECRET}@host:99999", f"user:{SECRET}@host"),
            f"http://user:a#{SECRET}@host",
        )
    ),
    (opened("az://box/x", AZURE_ENDPOINT=""), LoaderError, "AZURE_ENDPOINT .* not the URL", 0),
    (opened("gs://box/x", GOOGLE_BASE_URL=""), LoaderError, "GOOGLE_BASE_URL .* not the URL", 0),
    # Caches
    (lambda w: DiskCache("x", bytes=0), ValueError, "bytes must be at least 1, got 0", 0),
    (under(World.read, **CACHE), ValueError, "TWINFEED_CACHE_BYTES a number of bytes", 0),
    (
        under(World.read, **CACHE, TWINFEED_CACHE_BYTES="a lot"),
        ValueError,
        "'a lot' must be a number of bytes, such as 100M",
        0,
    ),
    (
        cached(lambda folder: folder.mkdir(mode=0o755)),
        UnsafeContentError,
        "only its owner may",
        0,
    ),
    (cached(Path.touch), LoaderError, "cache cannot be used(.|\n)*path: .*/cache", 0),
    (
        cached(Path.touch, "below"),
        LoaderError,
        "cache cannot be used(.|\n)*path: .*/cache/below",
        0,
    ),
    (cached(holding), LoaderError, "cache cannot be used(.|\n)*path: .*/cache", 0),
]


@pytest.mark.parametrize(("call", "kind", "word", "asked"), REFUSED)
def test_refusal_sends_no_more_requests_and_shows_no_secret(
    world: World, call: Call, kind: type[Exception], word: str, asked: int
) -> None:
    with pytest.raises(kind, match=word) as caught:
        call(world)
    shown = f"{caught.value}{caught.value!r}{vars(caught.value)}"
    assert SECRET not in shown
    assert "<?xml" not in shown
    shown.encode()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert world.server.asked.total() == asked
    assert not world.other.asked
    assert not world.out.exists()
