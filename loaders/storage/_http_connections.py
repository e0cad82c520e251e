"""Connections to web servers: proxies, deadlines, and the networks that addresses are in."""

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
"""Raise an error for an address that may not be asked."""

_PROXY = re.compile(
    r"(?i:https?://)?(?:([^/?#@]*)@)?((?:\[[0-9A-Fa-f:.]+\]|[^\s/?#@:]+)(?::\d+)?)/?"
)
_BEFORE_IPV4 = (0, 0xFFFF, 0xFFFF0000, 0x64FF9B << 64)
"""The 96 bits before an IPv4 address: compatible, mapped, translated, NAT64."""
_UNTIL: ContextVar[float] = ContextVar("until")


def _foreign(_: logging.LogRecord) -> bool:
    """Whether a log line is of another library's request. Ours may have a secret in a URL."""
    return _UNTIL.get(None) is None


class ClosedError(Exception):
    """Report a kept connection that the server has closed, as it may at any time."""


@contextmanager
def within(seconds: float, /) -> Iterator[None]:
    """Limit all that this thread does on connections to so many seconds together."""
    token = _UNTIL.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _UNTIL.reset(token)


def _left() -> float:
    """Return the seconds until the deadline."""
    left = _UNTIL.get() - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class _Socket(socket.socket):
    """Receive until the deadline: a time-out alone counts from each byte anew."""

    def recv(self, *arguments: Any) -> bytes:
        self.settimeout(_left())
        return super().recv(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        self.settimeout(_left())
        return super().recv_into(*arguments)


class _SecureSocket(_Socket, ssl.SSLSocket):
    """Receive over TLS."""


class _Response(http.client.HTTPResponse):
    """Pass over answers such as 103 (Early Hints) that come before the real answer."""

    def _read_status(self) -> tuple[str, int, str]:
        version, status, reason = super()._read_status()  # type: ignore[misc]
        return version, 100 if 101 < status < 200 else status, reason


class _Connection(HTTPConnection):
    """Connect to an address that was checked, and to no other."""

    response_class = _Response

    def __init__(self, check: Check | None, **options: Any) -> None:
        super().__init__(**options)
        self._check, self._kept = check, False

    def _new_conn(self) -> socket.socket:
        """Return a socket that is connected to the first address that answers."""
        self._kept = False
        host, last = self._dns_host.strip("[]"), OSError("this host has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, self.port, type=socket.SOCK_STREAM
        ):
            if self._check:
                self._check(str(address[0]))
            made = _Socket(family, kind, protocol)
            try:
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                made.settimeout(min(_retries.NETWORK.connect_seconds, _left()))
                made.connect(address)
                return made
            except OSError as error:
                made.close()
                last = error
        raise last

    def getresponse(self) -> Any:
        kept, self._kept = self._kept, True
        try:
            return super().getresponse()
        except ConnectionError:
            if kept:
                raise ClosedError from None
            raise


class _SecureConnection(_Connection, HTTPSConnection):
    """Connect over TLS."""


def connections(url: str, check: Check, /) -> HTTPConnectionPool:
    """Return the connection pool for a URL, through the environment's proxy, if any.

    Raises:
        LoaderError: a proxy that cannot be used as it is written.
    """
    scheme, host = urlsplit(url)[:2]
    for name in ("connection", "connectionpool"):
        logging.getLogger(f"urllib3.{name}").addFilter(_foreign)
    network = _retries.NETWORK
    how: Any = {"maxsize": network.requests, "retries": False, "ssl_context": context()}
    how["timeout"] = network.connect_seconds
    proxy = urllib.request.getproxies().get(scheme)
    if not proxy or urllib.request.proxy_bypass(host):
        manager = PoolManager(**how)
    else:
        check(urlsplit(url).hostname or "")
        headers, place = _proxy(url, proxy)
        manager = ProxyManager(place, proxy_headers=headers, proxy_ssl_context=context(), **how)
    pool: Any = manager.connection_from_url(url)
    kind = _SecureConnection if pool.scheme == "https" else _Connection
    pool.ConnectionCls = partial(kind, None if pool.proxy else check)  # a proxy may be anywhere
    return pool  # type: ignore[no-any-return]


def _proxy(url: str, proxy: str) -> tuple[dict[str, str], str]:
    """Return the headers for a proxy, and its URL without a password."""
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
    """Return what kind of network an address is in: loopback, link-local, private or public. The
    name of a host is public, since a proxy looks it up.
    """
    host = host.strip("[]").partition("%")[0]
    with suppress(OSError, UnicodeError):  # 127.1 and 0x7f000001 are 127.0.0.1
        host = socket.inet_ntoa(socket.inet_aton(host))
    try:
        found: Any = ipaddress.ip_address(host)
    except ValueError:
        name = host.rstrip(".").lower()
        return "loopback" if f".{name}".endswith(".localhost") else "public"
    if found.is_loopback or found.is_unspecified:
        return "loopback"
    if found.is_link_local:
        return "link-local"
    if found.version == 6 and (inner := _ipv4_in(found)):
        return network_of(str(inner))
    return "public" if found.is_global else "private"


def _ipv4_in(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that an IPv6 address stands for."""
    before, last = divmod(int(address), 1 << 32)
    isatap = before & 0xFDFFFFFF == 0x5EFE  # in any network
    if before in _BEFORE_IPV4 or before >> 48 == 0x64FF9B0001 or isatap:  # NAT64 of a network
        return ipaddress.IPv4Address(last)
    return address.sixtofour or (address.teredo or (None, None))[1]


@lru_cache(1)
def context() -> ssl.SSLContext:
    """Return the context that certificates are checked by."""
    made = ssl.create_default_context()
    made.sslsocket_class = _SecureSocket
    return made
