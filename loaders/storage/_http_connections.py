"""HTTP connections: proxies, deadlines, and checks of the addresses that are connected to."""

from __future__ import annotations

import base64
import http.client
import ipaddress
import logging
import re
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any
from urllib.parse import unquote, urlsplit

from urllib3 import HTTPConnectionPool, PoolManager, ProxyManager
from urllib3.connection import HTTPConnection, HTTPSConnection

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.storage import retries as _retries
from twinfeed.loaders.storage.url import masked

Check = Callable[[str], None]
"""Raise an error for an IP address that must not be connected to."""

_PROXY = re.compile(
    r"(?i:https?://)?(?:([^/?#@]*)@)?((?:\[[0-9A-Fa-f:.]+\]|[^\s/?#@:]+)(?::\d+)?)/?"
)
_IPV4_PREFIXES = (0, 0xFFFF, 0xFFFF0000, 0x64FF9B << 64)
"""The IPv6 prefixes (96 bits) that embed an IPv4 address: compatible, mapped, translated, NAT64."""
_DEADLINE: ContextVar[float] = ContextVar("until")


def _is_of_other_library(_: logging.LogRecord) -> bool:
    """Filter of urllib3's logs: drop what a request of this library logs, since its URL may have a
    secret. Only requests of this library have a deadline.
    """
    return _DEADLINE.get(None) is None


class ClosedError(Exception):
    """A reused keep-alive connection that the server has closed meanwhile."""


@contextmanager
def deadline(seconds: float, /) -> Iterator[None]:
    """Set a deadline, in seconds from now, for all socket operations in the `with` block."""
    token = _DEADLINE.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def _remaining_seconds() -> float:
    """Return the seconds until the deadline; raise TimeoutError after it."""
    seconds = _DEADLINE.get() - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


class _Socket(socket.socket):
    """A socket with a deadline for a whole response (a plain timeout restarts at each byte)."""

    def recv(self, *arguments: Any) -> bytes:
        self.settimeout(_remaining_seconds())
        return super().recv(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        self.settimeout(_remaining_seconds())
        return super().recv_into(*arguments)


class _SecureSocket(_Socket, ssl.SSLSocket):
    """A TLS socket with a deadline for a whole response."""


class _Response(http.client.HTTPResponse):
    """A response that skips interim responses, such as 103 (Early Hints)."""

    def _read_status(self) -> tuple[str, int, str]:
        version, status, reason = super()._read_status()  # type: ignore[misc]
        return version, 100 if 101 < status < 200 else status, reason


class _Connection(HTTPConnection):
    """A connection whose IP address passes `check` before it is connected to."""

    response_class = _Response

    def __init__(self, check: Check | None, **options: Any) -> None:
        super().__init__(**options)
        self._check, self._reused = check, False

    def _new_conn(self) -> socket.socket:
        """Return a socket that is connected to the host.

        The addresses of the host are tried in turn, each after it has passed `check`.
        """
        self._reused = False
        host, last = self._dns_host.strip("[]"), OSError("this host has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, self.port, type=socket.SOCK_STREAM
        ):
            if self._check:
                self._check(str(address[0]))
            sock = _Socket(family, kind, protocol)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.settimeout(min(_retries.NETWORK.connect_seconds, _remaining_seconds()))
                sock.connect(address)
                return sock
            except OSError as error:
                sock.close()
                last = error
        raise last

    def getresponse(self) -> Any:
        """Return the response to the request that was sent.

        Raises:
            ClosedError: the server has closed this connection since the last request.
        """
        reused, self._reused = self._reused, True
        try:
            return super().getresponse()
        except ConnectionError:
            if reused:
                raise ClosedError from None
            raise


class _SecureConnection(_Connection, HTTPSConnection):
    """A TLS connection whose IP address passes `check` before it is connected to."""


def connection_pool(url: str, check: Check, /) -> HTTPConnectionPool:
    """Return a pool of connections to the server of a URL, through a proxy if one is set.

    `check` raises an error for an IP address that must not be connected to; through a proxy, it
    gets the host of the URL, once.
    """
    scheme, host = urlsplit(url)[:2]
    for name in ("connection", "connectionpool"):  # their logs contain URLs, which may have secrets
        logging.getLogger(f"urllib3.{name}").addFilter(_is_of_other_library)
    network = _retries.NETWORK
    options: Any = {
        "maxsize": network.requests + network.small_requests,
        "retries": False,
        "ssl_context": tls_context(),
    }
    options["timeout"] = network.connect_seconds
    proxy = urllib.request.getproxies().get(scheme)
    if not proxy or urllib.request.proxy_bypass(host):
        manager = PoolManager(**options)
    else:
        check(urlsplit(url).hostname or "")
        headers, proxy_url = _proxy_of(url, proxy)
        manager = ProxyManager(
            proxy_url, proxy_headers=headers, proxy_ssl_context=tls_context(), **options
        )
    pool: Any = manager.connection_from_url(url)
    while not pool.pool.empty():  # placeholders, which would hide idle connections
        pool.pool.get()
    connection_class = _SecureConnection if pool.scheme == "https" else _Connection
    pool.ConnectionCls = partial(connection_class, None if pool.proxy else check)
    return pool  # type: ignore[no-any-return]


def _proxy_of(url: str, proxy: str) -> tuple[dict[str, str], str]:
    """Return the headers that authenticate at a proxy, and the proxy's URL without the password.

    `proxy` is the setting in the environment, as http://user:password@host:3128.
    """
    match = _PROXY.fullmatch(proxy)
    if not match:
        raise LoaderError(
            "the proxy that the environment names cannot be used",
            path=url,
            found=masked(proxy),
            advice="write it as http://user:password@host:3128, with %2F for a / in the password",
        )
    headers = {}
    if match[1]:
        pair = base64.b64encode(unquote(match[1]).encode()).decode()
        headers["Proxy-Authorization"] = f"Basic {pair}"
    return headers, f"{'https' if proxy.lower().startswith('https:') else 'http'}://{match[2]}"


def network_of(host: str, /) -> str:
    """Return the kind of network of an IP address: loopback, link-local, private or public.

    `host` may also be the name of a host. It counts as public, since a proxy resolves it, unless it
    is localhost.
    """
    host = host.strip("[]").partition("%")[0]
    with suppress(OSError, UnicodeError):  # 127.1 and 0x7f000001 are 127.0.0.1
        host = socket.inet_ntoa(socket.inet_aton(host))
    try:
        address: Any = ipaddress.ip_address(host)
    except ValueError:
        name = host.rstrip(".").lower()
        return "loopback" if f".{name}".endswith(".localhost") else "public"
    if address.is_loopback or address.is_unspecified:
        return "loopback"
    if address.is_link_local:
        return "link-local"
    if address.version == 6 and (embedded := _ipv4_in(address)):
        return network_of(str(embedded))
    return "public" if address.is_global else "private"


def _ipv4_in(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that is embedded in an IPv6 address, or None.

    It is in the last 32 bits behind `_IPV4_PREFIXES`, of a local NAT64 (RFC 8215) and of ISATAP
    (RFC 5214). `ipaddress` decodes 6to4 and Teredo.
    """
    prefix, last = divmod(int(address), 1 << 32)
    is_local_nat64 = prefix >> 48 == 0x64FF9B0001
    is_isatap = prefix % (1 << 32) in (0x5EFE, 0x2005EFE)
    if prefix in _IPV4_PREFIXES or is_local_nat64 or is_isatap:
        return ipaddress.IPv4Address(last)
    teredo_client = address.teredo[1] if address.teredo else None  # of the pair (server, client)
    return address.sixtofour or teredo_client


@lru_cache(1)
def tls_context() -> ssl.SSLContext:
    """Return the TLS context, which verifies certificates."""
    context = ssl.create_default_context()
    context.sslsocket_class = _SecureSocket
    return context
