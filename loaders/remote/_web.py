"""Web servers, asked for ranges over http and https. No credentials are ever sent."""

from __future__ import annotations

import base64
import http.client
import io
import ipaddress
import re
import socket
import ssl
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from functools import lru_cache
from html.parser import HTMLParser
from typing import Any, cast
from urllib.parse import unquote, urljoin, urlsplit

import numpy as np

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.remote import network as _network
from twinfeed.loaders.remote.location import Location
from twinfeed.loaders.remote.network import PassingError, failed, no_ranges
from twinfeed.loaders.remote.stores import Facts, Piece, Store

_CHUNK = 1 << 20
_PAGE, _PAGES = 1 << 24, 10_000
"""Most bytes of a page of links, and most pages."""
_REST = 1 << 16
"""An answer that nobody wants is read up to so many bytes, to keep its connection."""
_HOPS = 5
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_SURE = {
    "Content-Encoding": ("identity", "identity"),
    "Content-Length": (r"\d{1,18}", "a number of bytes"),
}
"""The headers that every answer may have in one form alone: a pattern, and the form in words."""
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "twinfeed"}


class Web(Store):
    """Ask a web server, over connections that are kept."""

    gives_facts = True

    def __init__(self, root: Location) -> None:
        super().__init__(root)
        self._idle: dict[str, deque[_Connection]] = {}
        self._home: str | None = None  # what kind of network the server of the root is in

    def _facts(self, path: str, /) -> Facts:
        with self._asked(path, range=(0, 1)) as answer:
            if answer.status == 200:
                return Facts(answer.length, answer.getheader("ETag"))
            if answer.status == 416:
                return Facts(0, answer.getheader("ETag"))
            return self._checked(path, answer, 0, 1)

    def _read(self, path: str, start: int, stop: int, /) -> Piece:
        if stop <= start:
            return Piece(memoryview(b""))
        with self._asked(path, range=(start, stop)) as answer:
            if answer.status == 416:  # the file ends before the range begins
                return Piece(memoryview(b""), self._facts(path))
            if answer.status == 200:
                raise no_ranges(self.url(path))
            facts = self._checked(path, answer, start, stop)
            return Piece(answer.filled(min(stop, facts.bytes or 0) - start), facts)

    def _stream(self, path: str, /) -> Iterator[memoryview]:
        with self._asked(path) as answer:
            while chunk := answer.read(_CHUNK):
                yield memoryview(chunk)
            if answer.length:
                raise PassingError(f"a short body: {answer.length} bytes are missing")

    def _checked(self, path: str, answer: _Answer, start: int, stop: int) -> Facts:
        """Return what the headers of an answer tell of the file; the headers must be whole."""
        header = answer.getheader("Content-Range")
        match = _CONTENT_RANGE.fullmatch(header or "")
        if not match:
            raise self._headers(path, "Content-Range", header, f"bytes {start}-{stop - 1}/SIZE")
        first, last, size = map(int, match.groups())
        if first != start or not start <= last < min(stop, size):
            raise self._headers(path, "Content-Range", header, f"bytes {start}-{stop - 1}/SIZE")
        length = answer.getheader("Content-Length")
        if length != str(last + 1 - first):
            raise self._headers(path, "Content-Length", length, last + 1 - first)
        return Facts(size, answer.getheader("ETag"))

    def _headers(self, path: str, name: str, found: object, expected: object) -> LoaderError:
        return LoaderError(
            f"the server answers the request for a range with a wrong header {name}, or without",
            path=self.url(path),
            expected=f"{name}: {expected}",
            found="no such header" if found is None else f"{name}: {found}",
            advice="copy the shards here, or to a server that supports HTTP range requests",
        )

    def _walk(self) -> Iterator[str]:
        """Yield the files that pages of links lead to, each page from its own folder."""
        folders, seen = [""], {""}
        while folders:
            if len(seen) > _PAGES:
                raise self._too_much(f"more than {_PAGES} pages")
            folder = folders.pop()
            base = f"{self.root}/{folder}"
            for link in _Page(self._page(folder)).links:
                name = urljoin(base, link).partition("#")[0]
                name = name[len(base) :] if name.startswith(base) else ""
                if not name or "?" in name or "/" in name[:-1] or name in ("./", "../"):
                    continue
                if not name.endswith("/"):
                    yield folder + name
                elif folder + name not in seen:
                    seen.add(folder + name)
                    folders.append(folder + name)

    def _page(self, folder: str) -> str:
        with self._asked(folder) as answer:
            if "html" not in answer.getheader("Content-Type", ""):
                return ""
            page = answer.read(_PAGE + 1)
            if len(page) > _PAGE:
                raise self._too_much(f"a page of more than {_PAGE} bytes")
            return page.decode("utf-8", "replace")

    def _too_much(self, found: str) -> LoaderError:
        return LoaderError(
            "the pages of links below this place are too much to read",
            path=self.root,
            found=found,
            advice="name the shards without a pattern, or begin the pattern further down",
        )

    @contextmanager
    def _asked(self, path: str, *, range: tuple[int, int] | None = None) -> Iterator[_Answer]:  # noqa: A002
        """Give the answer to a request, with its body unread; keep the connection if it can be."""
        url = f"{self.root}/{path}" if path.endswith("/") or not path else self.url(path)
        headers = dict(_HEADERS)
        if range is not None:
            headers["Range"] = f"bytes={range[0]}-{range[1] - 1}"
        seconds = _network.NETWORK.request_seconds if range else None
        with _passing(url):
            origin, connection, answer = self._follow(url, headers, seconds)
            try:
                if answer.status not in ((200, 206, 416) if range else (200,)):
                    asks = answer.getheader("Retry-After")
                    raise failed(url, answer.status, answer.reason, _seconds(asks))
                for name, (pattern, expected) in _SURE.items():
                    found = answer.getheader(name)
                    if found is not None and not re.fullmatch(pattern, found):
                        raise self._headers(path, name, found, expected)
                yield answer
            finally:
                self._keep(origin, connection, answer)

    def _follow(
        self, url: str, headers: dict[str, str], seconds: float | None
    ) -> tuple[str, _Connection, _Answer]:
        """Return the answer to a request, that of another server where the first one sends on."""
        target = url
        for _ in range(_HOPS):
            sent_on = target != url
            origin, connection, answer = self._request(target, headers, seconds, sent_on=sent_on)
            to = answer.getheader("Location")
            if answer.status not in (301, 302, 303, 307, 308) or to is None:
                return origin, connection, answer
            self._keep(origin, connection, answer)
            target = urljoin(target, to)
            parts = urlsplit(target)
            safe = parts.scheme == "https" or f"{parts.scheme}://{parts.netloc}" == origin
            if not (self.root.typed and safe and parts.netloc) or "@" in parts.netloc:
                raise _sent_on(url, target, self.root.typed)
        raise _sent_on(url, target, self.root.typed)

    def _request(
        self, url: str, headers: dict[str, str], seconds: float | None, *, sent_on: bool
    ) -> tuple[str, _Connection, _Answer]:
        """Make one request, on a kept connection if there is one that still works."""
        scheme, host, path, query, _ = urlsplit(url)
        origin = f"{scheme}://{host}"
        idle = self._idle.setdefault(origin, deque())
        while True:
            try:
                connection, kept = idle.pop(), True
            except IndexError:
                connection, kept = _connect(scheme, host), False
            connection.begin(seconds)
            try:
                if not kept:
                    connection.connect()
                    self._check_network(connection, sent_on, origin)
                whole = f"{path or '/'}?{query}" if query else path or "/"
                connection.request("GET", connection.prefix + whole, headers=headers)
                return origin, connection, cast(_Answer, connection.getresponse())
            except BaseException as error:
                connection.close()
                if not kept or not isinstance(error, (OSError, http.client.HTTPException)):
                    raise  # a server may close a kept connection at any time

    def _check_network(self, connection: _Connection, sent_on: bool, origin: str) -> None:
        """Raise LoaderError where another server sends on into a network that it may not name."""
        kind = network_of(connection.proxied_host or connection.sock.getpeername()[0])
        if not sent_on:
            self._home = kind
        elif kind not in ("public", self._home):
            raise _sent_on(str(self.root), f"{origin} ({kind} address)", typed=True)

    def _keep(self, origin: str, connection: _Connection, answer: _Answer) -> None:
        """Keep a connection whose answer is read to the end, or nearly so; close any other."""
        try:
            if answer.length is not None and 0 < answer.length <= _REST:
                answer.read()
            if answer.isclosed() and connection.sock is not None:
                self._idle[origin].append(connection)
                return
        except (OSError, http.client.HTTPException):
            pass
        answer.close()
        connection.close()


class _Timed(io.RawIOBase):
    """Read a socket until a deadline."""

    def __init__(self, connection: _Connection, sock: socket.socket) -> None:
        self._connection, self._sock = connection, sock
        self._file = sock.makefile("rb", 0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._connection.left())
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    """Read an answer within the time of its request."""

    length: int | None

    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        connection = options.pop("connection")
        super().__init__(sock, *arguments, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_Timed(connection, sock), _CHUNK >> 3)

    def filled(self, length: int, /) -> memoryview:
        """Return so many bytes of the body, fewer if it ends before; whatever else is there."""
        view, done = np.empty(length, np.uint8).data, 0  # a bytearray would be zeroed first
        while done < length and (more := self.readinto(view[done:])):
            done += more
        return view[:done].toreadonly()


class _Connection(http.client.HTTPConnection):
    """Connect to a server, and time each request as a whole."""

    prefix = ""  # of the paths in requests to a proxy
    proxied_host: str | None = None

    def __del__(self) -> None:
        self.close()

    def begin(self, seconds: float | None, /) -> None:
        """Begin a request that may take so many seconds, or that may pause for some."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self.timeout = _network.NETWORK.connect_seconds
        self.response_class = self._answer  # type: ignore[assignment]

    def _answer(self, *arguments: Any, **options: Any) -> _Answer:
        return _Answer(*arguments, connection=self, **options)

    def left(self) -> float:
        """Return how many seconds may pass without a byte."""
        if self._deadline is None:
            return _network.NETWORK.silent_seconds
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left


class _Secure(_Connection, http.client.HTTPSConnection):
    """Connect to a server over TLS."""


def network_of(host: str, /) -> str:
    """Return what kind of network an address is in: loopback, link-local, private or public. The
    name of a host is public, since a proxy looks it up.
    """
    try:
        found: Any = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return "loopback" if host == "localhost" else "public"
    found = getattr(found, "ipv4_mapped", None) or getattr(found, "sixtofour", None) or found
    if found.is_loopback:
        return "loopback"
    if found.is_link_local:
        return "link-local"
    return "public" if found.is_global else "private"


@lru_cache(1)
def _context() -> ssl.SSLContext:
    return ssl.create_default_context()


def _connect(scheme: str, host: str) -> _Connection:
    """Return a connection to be opened, through the proxy that the environment names, if any."""
    name = urlsplit(f"//{host}").hostname or ""
    proxy = urllib.request.getproxies().get(scheme)
    through = None if not proxy or urllib.request.proxy_bypass(host) else urlsplit(proxy)
    if through is None or not through.hostname:
        return _Secure(host, context=_context()) if scheme == "https" else _Connection(host)
    headers = {}
    if through.username:
        pair = f"{unquote(through.username)}:{unquote(through.password or '')}"
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    port = through.port or 80
    if scheme == "https":
        connection: _Connection = _Secure(through.hostname, port, context=_context())
        connection.set_tunnel(host, headers=headers)
    else:
        connection = _Connection(through.hostname, port)
        connection.prefix = f"http://{host}"
    connection.proxied_host = name
    return connection


def _seconds(header: str | None) -> float:
    """Return how many seconds a server asks to wait."""
    if header is None:
        return 0.0
    try:
        if header.strip().isdecimal():
            return float(header)
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (OverflowError, TypeError, ValueError):
        return 0.0


def _sent_on(url: str, target: str, typed: bool) -> LoaderError:
    """Return the error of a redirection that is not followed."""
    place = target.partition("?")[0].rpartition("@")[2]
    rule = (
        "only over https, five times at most, and never into this machine or its network"
        if typed
        else "never for a place that an index remembers"
    )
    return LoaderError(
        f"the server sends on to another place, which is followed {rule}",
        path=url,
        found=place,
        advice="if you trust the other place, give its own URL; or give root= the URL of the "
        "shards, which says that you trust their server",
    )


@contextmanager
def _passing(url: str) -> Iterator[None]:
    """Turn the errors of connections into the errors of this library."""
    try:
        yield
    except (FileNotFoundError, LoaderError, PassingError):
        raise
    except ssl.SSLCertVerificationError as error:
        raise LoaderError(
            "the certificate of this server is not valid here",
            path=url,
            found=error.verify_message,
            advice="check the URL; SSL_CERT_FILE names the certificates to trust",
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no URL, no text
        raise PassingError(f"{type(error).__name__}: {error}") from error


class _Page(HTMLParser):
    """Collect the links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]
