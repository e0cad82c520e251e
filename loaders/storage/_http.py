"""Web servers: ranges over http and https. No credentials are ever sent to them."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from urllib.parse import urljoin, urlsplit

from urllib3 import BaseHTTPResponse, HTTPConnectionPool, Retry
from urllib3.exceptions import HTTPError, ProxyError

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.storage import retries as _retries
from twinfeed.loaders.storage._http_connections import ClosedError, connections, network_of, within
from twinfeed.loaders.storage.retries import PassingError, failed, no_ranges
from twinfeed.loaders.storage.store import Facts, Piece, Store
from twinfeed.loaders.storage.url import Location, masked

_REST = 1 << 16
"""An answer that nobody wants is read up to so many bytes, to keep its connection."""
_HOPS = 5
_CONTENT_RANGE = re.compile(r"(?i:bytes) (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_NO_RANGE = re.compile(r"(?i:bytes) \*/(\d{1,18})")
_SURE = {
    "Content-Encoding": (r"|(?i:identity)", "identity"),
    "Content-Length": (r"\d{1,18}", "a number of bytes"),
}
"""The headers that every answer may have in one form alone: a pattern, and the form in words."""
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "twinfeed"}


class Web(Store):
    """Make requests to a web server, over connections that are kept."""

    gives_facts = True

    def __init__(self, root: Location) -> None:
        super().__init__(root)
        self._pools: dict[tuple[str, bool], HTTPConnectionPool] = {}
        self._home: str | None = None  # the kind of network of the root's server

    def _facts(self, path: str, /) -> Facts:
        with self._asked(path, "bytes=0-0") as answer:
            if answer.status == 200:
                return Facts(answer.length_remaining, answer.headers.get("ETag"))
            if answer.status == 416:
                return Facts(_size(answer) or 0, answer.headers.get("ETag"))
            return self._checked(path, answer, 0, 1)[1]

    def _read(self, path: str, start: int, stop: int, /) -> Piece:
        if stop <= start:
            return Piece(memoryview(b""))
        with self._asked(path, f"bytes={start}-{stop - 1}") as answer:
            if answer.status == 416:  # the file ends before the range begins
                size = _size(answer)
                facts = (
                    self._facts(path) if size is None else Facts(size, answer.headers.get("ETag"))
                )
                return Piece(memoryview(b""), facts)
            if answer.status == 200:
                raise no_ranges(self.url(path))
            length, facts = self._checked(path, answer, start, stop)
            return Piece(memoryview(answer.read(length)), facts)

    def _walk(self) -> Iterator[str]:
        raise LoaderError(
            "a web server does not list its files",
            path=self.root,
            advice="name the shards, as in train-{00000..00063}.tar, or give a list of their URLs",
        )

    def _checked(
        self, path: str, answer: BaseHTTPResponse, start: int, stop: int
    ) -> tuple[int, Facts]:
        """Return the length of a range, and the facts of the file in its headers."""
        header = answer.headers.get("Content-Range")
        match = _CONTENT_RANGE.fullmatch(header or "")
        if match:
            first, last = int(match[1]), int(match[2])
            size = None if match[3] == "*" else int(match[3])
            if first == start <= last < (stop if size is None else min(stop, size)):
                length = answer.headers.get("Content-Length")
                if length not in (None, str(last + 1 - first)):
                    raise self._headers(path, "Content-Length", length, last + 1 - first)
                return last + 1 - first, Facts(size, answer.headers.get("ETag"))
        raise self._headers(path, "Content-Range", header, f"bytes {start}-{stop - 1}/SIZE")

    def _headers(self, path: str, name: str, found: object, expected: object) -> LoaderError:
        return LoaderError(
            f"the server answers the request for a range with a wrong header {name}, or without",
            path=self.url(path),
            expected=f"{name}: {expected}",
            found="no such header" if found is None else f"{name}: {found}",
            advice="copy the shards here, or to a server that supports HTTP range requests",
        )

    @contextmanager
    def _asked(self, path: str, wanted: str) -> Iterator[BaseHTTPResponse]:
        """Give the answer to a request for a range, with its body unread; keep the connection if it
        can be.
        """
        url = self.url(path)
        with _passing(url), within(_retries.NETWORK.request_seconds):
            answer = self._follow(url, {**_HEADERS, "Range": wanted})
            try:
                if answer.status not in (200, 206, 416):
                    raise failed(url, answer.status, answer.reason or "", _seconds(answer))
                for name, (pattern, expected) in _SURE.items():
                    found = answer.headers.get(name)
                    if found is not None and not re.fullmatch(pattern, found):
                        raise self._headers(path, name, found, expected)
                yield answer
            finally:
                _keep(answer)

    def _follow(self, url: str, headers: dict[str, str]) -> BaseHTTPResponse:
        """Return the answer to a request, after redirections to other servers."""
        target = url
        for _ in range(_HOPS):
            answer = self._request(target, headers, sent_on=target != url)
            to = answer.headers.get("Location")
            if answer.status not in (301, 302, 303, 307, 308) or to is None:
                return answer
            _keep(answer)
            origin, target = _origin(target), urljoin(target, to)
            parts = urlsplit(target)
            safe = parts.scheme == "https" or _origin(target) == origin
            if not (self.root.typed and safe and parts.netloc) or "@" in parts.netloc:
                break
        raise _sent_on(url, target)

    def _request(self, url: str, headers: dict[str, str], *, sent_on: bool) -> BaseHTTPResponse:
        """Make one request, on a kept connection if one still works."""
        key = origin, _ = _origin(url), sent_on
        path = url[len(origin) :].removeprefix("/")
        while True:
            pool = self._pools.get(key)
            if pool is None:
                pool = connections(url, partial(self._check_network, origin, sent_on))
                self._pools[key] = pool
            try:
                return pool.urlopen(
                    "GET",
                    # A proxy gets the whole URL, unless it makes a tunnel.
                    url if pool.proxy and url.startswith("http:") else f"/{path}",
                    headers=headers,
                    redirect=False,
                    assert_same_host=False,
                    preload_content=False,
                    decode_content=False,
                )
            except ClosedError:
                continue

    def _check_network(self, origin: str, sent_on: bool, address: str) -> None:
        """Raise LoaderError if another server redirects into a network that it may not name."""
        kind = network_of(address)
        if not sent_on:
            self._home = kind
        elif kind not in ("public", self._home):
            raise _sent_on(str(self.root), f"{origin} ({kind} address)")


def _origin(url: str) -> str:
    return "://".join(urlsplit(url)[:2])


def _size(answer: BaseHTTPResponse) -> int | None:
    """Return the size of a file that ends before the range begins; None if unknown."""
    match = _NO_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _keep(answer: BaseHTTPResponse) -> None:
    """Keep a connection whose answer is read to the end, or nearly so; close any other."""
    if 0 < (answer.length_remaining or 0) <= _REST:
        answer.drain_conn()
    if not answer.closed:
        answer.close()
    answer.release_conn()


def _seconds(answer: BaseHTTPResponse) -> float:
    """Return the seconds that a server wants the client to wait."""
    try:
        return Retry().get_retry_after(answer) or 0.0
    except (HTTPError, OverflowError, ValueError):
        return 0.0


def _sent_on(url: str, target: str) -> LoaderError:
    """Return the error of a redirection that is not followed."""
    return LoaderError(
        "the server sends on to another place, which is not followed from here",
        path=url,
        found=masked(target),
        advice="if you trust the other place, give its own URL; an index needs root= to be sent on",
    )


@contextmanager
def _passing(url: str) -> Iterator[None]:
    """Turn the errors of connections into the errors of this library."""
    try:
        yield
    except (FileNotFoundError, LoaderError, PassingError):
        raise
    except (HTTPError, OSError, ValueError) as error:
        who = "proxy" if isinstance(error, ProxyError) else "server"
        cause: BaseException = error
        while isinstance(cause, HTTPError) and (inner := cause.__cause__ or cause.__context__):
            cause = inner  # the same error, shorter
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise LoaderError(
                f"the certificate of this {who} is not valid here",
                path=url,
                found=cause.verify_message,
                advice="check the URL; SSL_CERT_FILE names the certificates to trust",
            ) from None
        if isinstance(error, ValueError):
            raise LoaderError(
                "the URL, or one that its server redirects to, is malformed",
                path=url,
                found=masked(str(cause)),
                advice="check the URL; if it is right, copy the shards here",
            ) from None
        raise PassingError(f"{type(cause).__name__} of the {who}: {cause}") from None
