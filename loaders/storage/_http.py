"""Web servers, read by HTTP range requests. No credentials are ever sent to them."""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPResponse, InvalidURL
from urllib.parse import urljoin, urlsplit

from urllib3 import BaseHTTPResponse, HTTPConnectionPool, Retry
from urllib3.exceptions import HTTPError, ProxyError

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.storage import retries as _retries
from twinfeed.loaders.storage._http_connections import (
    ClosedError,
    connection_pool,
    deadline,
    network_of,
)
from twinfeed.loaders.storage.retries import TransientError, no_ranges_error, status_error
from twinfeed.loaders.storage.store import ObjectInfo, RangeData, Store
from twinfeed.loaders.storage.url import Location, masked

Response = BaseHTTPResponse | HTTPResponse
_MAX_DRAIN = 1 << 16
"""An unwanted body of at most this many bytes is read, so that its connection can be reused."""
_MAX_REDIRECTS = 5
_CONTENT_RANGE = re.compile(r"(?i:bytes) (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_NO_RANGE = re.compile(r"(?i:bytes) \*/(\d{1,18})")
_STRICT_HEADERS = {
    "Content-Encoding": (r"|(?i:identity)", "identity"),
    "Content-Length": (r"\d{1,18}", "a number of bytes"),
}
"""Headers that must match a pattern if they are present, and the pattern in words."""
_CHECKED = {*_STRICT_HEADERS, "Content-Range", "Etag"}
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "twinfeed"}


class HttpStore(Store):
    """A store on a web server, read over keep-alive connections."""

    sends_info = True

    def __init__(self, root: Location) -> None:
        super().__init__(root)
        self._pools: dict[tuple[str, bool], HTTPConnectionPool] = {}
        self._home_network: str | None = None  # the network of the root's server: see `network_of`

    def _stat(self, path: str, /) -> ObjectInfo:
        """Return the size and ETag of a file, by a request for its first byte.

        The response to such a request has the size of the whole file in a header.
        """
        with self._request_range(path, "bytes=0-0") as response:
            if response.status == 200:  # the server ignores ranges, and sends the whole file
                return ObjectInfo(response.length_remaining, response.headers.get("ETag"))
            if response.status == 416:  # range not satisfiable: an empty file has no first byte
                return ObjectInfo(_size(response) or 0, response.headers.get("ETag"))
            # 206: the first byte. The result is (length of the range, size and ETag of the file).
            return self._check_range(path, response, 0, 1)[1]

    def _read(self, path: str, start: int, stop: int, /) -> RangeData:
        """Return the bytes [start, stop) of a file, by a range request."""
        if stop <= start:
            return RangeData(memoryview(b""))
        with self._request_range(path, f"bytes={start}-{stop - 1}") as response:
            if response.status == 416:  # range not satisfiable: the file ends before it
                info = ObjectInfo(_size(response), response.headers.get("ETag"))
                return RangeData(memoryview(b""), self._stat(path) if info.bytes is None else info)
            if response.status == 200:
                raise no_ranges_error(self.url(path))
            return self._read_range(path, response, start, stop)

    def send(self, path: str, start: int, stop: int, /) -> Callable[[], RangeData | None] | None:
        """Send a request for the bytes [start, stop) of a file, if a connection is idle.

        It was opened by `_request`, which has checked its address; no proxy is used.
        """
        url = self.url(path)
        origin = _origin(url)
        pool = self._pools.get((origin, False))
        idle = pool.pool if pool and not pool.proxy else None
        if idle is None or idle.empty():
            return None
        connection = idle.get(block=False)
        until = time.monotonic() + _retries.NETWORK.request_seconds

        def receive() -> RangeData | None:
            """Return the bytes; None after any failure or redirect."""
            is_reusable = False
            try:
                with suppress(Exception), deadline(until - time.monotonic()):
                    # urllib3's own response would take a fifth of the time.
                    response = HTTPConnection.getresponse(connection)
                    if response.status == 206 and not _has_repeated(response):
                        found = self._read_range(path, response, start, stop)
                        is_reusable = response.length == 0
                        return found if len(found.data) == stop - start else None
                return None
            finally:
                if not is_reusable:
                    connection.close()
                idle.put(connection)

        if not connection.is_connected:
            idle.put(connection)
            return None
        try:
            connection.request(
                "GET",
                _target(url, origin),
                headers={**_HEADERS, "Range": f"bytes={start}-{stop - 1}"},
                preload_content=False,
                decode_content=False,
            )
        except BaseException:
            connection.close()
            idle.put(connection)
            raise
        return receive

    def _list(self) -> Iterator[str]:
        """Raise LoaderError: HTTP has no listing."""
        raise LoaderError(
            "a web server does not list its files",
            path=self.root,
            advice="name the shards, as in train-{00000..00063}.tar, or give a list of their URLs",
        )

    def _read_range(self, path: str, response: Response, start: int, stop: int) -> RangeData:
        """Return the bytes [start, stop) of a file from a response with status 206."""
        self._check_headers(path, response)
        length, info = self._check_range(path, response, start, stop)
        return RangeData(memoryview(response.read(length)), info)

    def _check_headers(self, path: str, response: Response) -> None:
        """Raise LoaderError for a header of a response that is not as `_STRICT_HEADERS` has it."""
        for name, (pattern, expected) in _STRICT_HEADERS.items():
            found = response.headers.get(name)
            if found is not None and not re.fullmatch(pattern, found):
                raise self._header_error(path, name, found, expected)

    def _check_range(
        self, path: str, response: Response, start: int, stop: int
    ) -> tuple[int, ObjectInfo]:
        """Return (length of the range, size and ETag of the file) of a response, after a check of
        its headers.
        """
        header = response.headers.get("Content-Range")  # such as "bytes 0-99/1234"
        match = _CONTENT_RANGE.fullmatch(header or "")
        if match:
            first, last = int(match[1]), int(match[2])
            size = None if match[3] == "*" else int(match[3])
            if first == start <= last < (stop if size is None else min(stop, size)):
                length = response.headers.get("Content-Length")
                if length not in (None, str(last + 1 - first)):
                    raise self._header_error(path, "Content-Length", length, last + 1 - first)
                return last + 1 - first, ObjectInfo(size, response.headers.get("ETag"))
        raise self._header_error(path, "Content-Range", header, f"bytes {start}-{stop - 1}/SIZE")

    def _header_error(self, path: str, name: str, found: object, expected: object) -> LoaderError:
        """Return the error for a header of a response that is missing or wrong."""
        return LoaderError(
            f"the server answers a range request with a missing or wrong header {name}",
            path=self.url(path),
            expected=f"{name}: {expected}",
            found="no such header" if found is None else f"{name}: {found}",
            advice="copy the shards here, or to a server that supports HTTP range requests",
        )

    @contextmanager
    def _request_range(self, path: str, range_header: str) -> Iterator[BaseHTTPResponse]:
        """Request a range of a file, and yield the response, whose body is not read yet."""
        url = self.url(path)
        with _translated_errors(url), deadline(_retries.NETWORK.request_seconds):
            response = self._follow_redirects(url, {**_HEADERS, "Range": range_header})
            try:
                if response.status not in (200, 206, 416):
                    reason, retry_after = response.reason or "", _retry_after(response)
                    raise status_error(url, response.status, reason, retry_after)
                self._check_headers(path, response)
                yield response
            finally:
                _release(response)

    def _follow_redirects(self, url: str, headers: dict[str, str]) -> BaseHTTPResponse:
        """Request a URL, follow redirects, and return the last response.

        A redirect is only followed to https or the same server, and only if the URL is from the
        user, not from an index.
        """
        target = url
        for _ in range(_MAX_REDIRECTS):
            response = self._request(target, headers, redirected=target != url)
            redirect = response.headers.get("Location")
            if response.status not in (301, 302, 303, 307, 308) or redirect is None:
                return response
            _release(response)
            origin, target = _origin(target), urljoin(target, redirect)
            parts = urlsplit(target)
            is_safe = parts.scheme == "https" or _origin(target) == origin
            has_plain_host = parts.netloc and "@" not in parts.netloc  # no user or password
            if not (self.root.from_user and is_safe and has_plain_host):
                break
        raise _redirect_error(url, target)

    def _request(self, url: str, headers: dict[str, str], *, redirected: bool) -> BaseHTTPResponse:
        """Send a GET request for a URL, and return the response.

        A connection of an earlier request is reused; if the server has closed it meanwhile, the
        next one is tried. A URL from a redirect (`redirected`) must not lead into a private
        network.
        """
        origin = _origin(url)
        while True:
            pool = self._pools.get((origin, redirected))
            if pool is None:
                pool = connection_pool(url, partial(self._check_network, origin, redirected))
                self._pools[origin, redirected] = pool
            with suppress(ClosedError):
                return pool.urlopen(
                    "GET",
                    # A proxy gets the whole URL, unless it makes a tunnel.
                    url if pool.proxy and url.startswith("http:") else _target(url, origin),
                    headers=headers,
                    redirect=False,
                    assert_same_host=False,
                    preload_content=False,
                    decode_content=False,
                )

    def _check_network(self, origin: str, redirected: bool, address: str) -> None:
        """Raise LoaderError if a redirect leads to an IP address in another, private network.

        The address of the first server, to which no redirect leads, is remembered.
        """
        network = network_of(address)
        if not redirected:
            self._home_network = network
        elif network not in ("public", self._home_network):
            raise _redirect_error(str(self.root), f"{origin} ({network} address)")


def _has_repeated(response: HTTPResponse) -> bool:
    """Return whether a response has a header twice that is checked; `get` gives the first alone."""
    names = [name for name in map(str.title, response.headers) if name in _CHECKED]
    return len(names) > len(set(names))


def _origin(url: str) -> str:
    """Return the scheme and host of a URL, as in "https://example.org"."""
    return "://".join(urlsplit(url)[:2])


def _target(url: str, origin: str) -> str:
    """Return what a request names: the path of a URL, from the slash on."""
    return "/" + url[len(origin) :].removeprefix("/")


def _size(response: BaseHTTPResponse) -> int | None:
    """Return the size of the file by a response with status 416; None if it does not say."""
    match = _NO_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _release(response: BaseHTTPResponse) -> None:
    """Return the connection of a response to its pool; close it if much of the body is unread."""
    if 0 < (response.length_remaining or 0) <= _MAX_DRAIN:
        response.drain_conn()
    if not response.closed:
        response.close()
    response.release_conn()


def _retry_after(response: BaseHTTPResponse) -> float:
    """Return the seconds of the header Retry-After of a response; 0 if it has none."""
    try:
        return Retry().get_retry_after(response) or 0.0
    except (HTTPError, OverflowError, ValueError):
        return 0.0


def _redirect_error(url: str, target: str) -> LoaderError:
    """Return the error of a redirect to the URL `target`, which is not followed."""
    return LoaderError(
        "the server redirects to another URL, which is not allowed",
        path=url,
        found=masked(target),
        advice="if you trust that URL, use it instead; for the shards of an index, as root=",
    )


@contextmanager
def _translated_errors(url: str) -> Iterator[None]:
    """Turn exceptions of HTTP connections in the `with` block into those of this library.

    An invalid certificate and a malformed URL are errors. Every other exception becomes a
    `TransientError`, which is retried.
    """
    try:
        yield
    except (FileNotFoundError, LoaderError, TransientError):
        raise
    except (HTTPError, OSError, ValueError) as error:
        who = "proxy" if isinstance(error, ProxyError) else "server"
        cause: BaseException = error
        while isinstance(cause, HTTPError) and (inner := cause.__cause__ or cause.__context__):
            cause = inner  # the innermost error is the shortest
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise LoaderError(
                f"the certificate of this {who} is not valid here",
                path=url,
                found=cause.verify_message,
                advice="check the URL; SSL_CERT_FILE names the certificates to trust",
            ) from None
        if isinstance(error, ValueError) or isinstance(cause, InvalidURL):
            raise LoaderError(
                "the URL, or one that its server redirects to, is malformed",
                path=url,
                found=masked(str(cause)),
                advice="check the URL; if it is right, copy the shards here",
            ) from None
        raise TransientError(f"{type(cause).__name__} of the {who}: {cause}") from None
