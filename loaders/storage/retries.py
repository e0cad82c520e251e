"""Network settings, retries with exponential back-off, and the errors that are retried."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.storage.url import masked

_Result = TypeVar("_Result")

PATIENCE = "TWINFEED_PATIENCE"
"""The environment variable with the retry budget: how long all pauses between the retries of a
request may take together, in seconds.
"""

_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Network:
    """Network settings. `NETWORK` has the values in force.

    - `requests`, `in_flight`: the maximum number of requests and bytes in flight, per process.
    - `small_requests`: the maximum of small requests (at most `small_bytes`) besides, on open
      connections.
    - `buffer_bytes`: the maximum number of bytes prefetched and not yet used, per reader.
    - `part_bytes`: longer ranges are requested in parts of this size.
    - `retry_seconds`: how long all pauses between the retries of a request may take together.
    - `first_pause`, `longest_pause`: the pause between two attempts, which doubles at each retry.
    - `request_seconds`, `connect_seconds`: the timeouts of a range, and of opening a connection.
    """

    requests: int = 32
    small_requests: int = 128
    small_bytes: int = 1 << 17
    in_flight: int = 1 << 28
    buffer_bytes: int = 1 << 29
    part_bytes: int = 1 << 23
    retry_seconds: float = 6.0
    first_pause: float = 0.2
    longest_pause: float = 10.0
    request_seconds: float = 60.0
    connect_seconds: float = 10.0


NETWORK = Network()
"""The network settings in force."""


class TransientError(Exception):
    """A transient failure (timeout, 429, 5xx): retry after at least `after` seconds (at most 3600).

    `problem` and `advice` are those of the final error, once the retry budget is spent.
    """

    def __init__(
        self,
        reason: str,
        /,
        *,
        after: float = 0.0,
        problem: str = "the server cannot be reached, or fails",
        advice: str = "check the URL, the network, the credentials and the endpoint; "
        f"{PATIENCE}=60 in the environment tries for a minute",
    ) -> None:
        super().__init__(masked(reason))
        self.after, self.problem, self.advice = min(after, _HOUR), problem, advice


class RefusedError(LoaderError):
    """Refused credentials (401 or 403)."""


def with_retries(url: str, requested: str, call: Callable[[], _Result], /) -> _Result:
    """Return `call()`, retried after each `TransientError` with exponential back-off and jitter.

    All pauses take at most the retry budget; then a LoaderError has the URL, what was `requested`,
    and the number of attempts.
    """
    started = time.monotonic()
    budget, pause, attempts = retry_budget(), NETWORK.first_pause, 0
    while True:
        attempts += 1
        try:
            return call()
        except TransientError as error:
            # No retries at interpreter shutdown, which joins all threads.
            if budget <= 0 or not threading.main_thread().is_alive():
                seconds = time.monotonic() - started
                asks = f"; the server asks to wait {error.after:.0f} seconds" if error.after else ""
                raise LoaderError(
                    error.problem,
                    path=url,
                    expected=requested,
                    found=f"{error} ({attempts} attempts in {seconds:.1f} seconds{asks})",
                    advice=error.advice,
                ) from error
            retry_after = error.after
        pause = min(max(pause, retry_after), budget)
        time.sleep(max(random.uniform(pause / 2, pause), min(retry_after, pause)))
        budget -= pause
        pause = min(NETWORK.longest_pause, 2 * pause)


def retry_budget() -> float:
    """Return how long all pauses between the retries of a request may take together, in seconds.

    This is the value of TWINFEED_PATIENCE in the environment, or else `NETWORK.retry_seconds`.

    Raises:
        ValueError: the variable is not a number of seconds.
    """
    text = os.environ.get(PATIENCE)
    try:
        seconds = float(text) if text else NETWORK.retry_seconds
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"{PATIENCE} must be a number of seconds, 0 or more, got {text!r}")
    return seconds


def is_final(status: int | None, /) -> bool:
    """Return whether an HTTP status is final, so that a retry cannot help.

    These are 3xx and 4xx, except 408 (timeout), 425 (too early) and 429 (too many requests).
    """
    return status is not None and 300 <= status < 500 and status not in (408, 425, 429)


def not_found(url: str, /) -> FileNotFoundError:
    """Return the error for a URL at which there is no file."""
    missing = "no such file; check the URL, and whether you may read there"
    return FileNotFoundError(errno.ENOENT, missing, url)


def refused_error(url: object, found: str, advice: str, who: str = "server") -> LoaderError:
    """Return the error of a request that the server or proxy refuses, which is not retried."""
    return LoaderError(f"the {who} refuses the request", path=url, found=found, advice=advice)


def status_error(url: str, status: int, reason: str, after: float, /) -> Exception:
    """Return the error for a response with an HTTP error status.

    It is a `TransientError` if a retry may help, after at least `after` seconds. `reason` is the
    text that the server sends with the status.
    """
    found = masked(f"status {status} {reason}")
    if status in (404, 410):
        return not_found(url)
    if status in (401, 403):
        return RefusedError(
            "the store refuses to serve this",
            path=url,
            found=found,
            advice="for an object store, use s3://bucket/shard: https URLs carry no credentials",
        )
    if is_final(status):
        advice = "check the URL, and the password of a proxy"
        return refused_error(url, found, advice, "proxy" if status == 407 else "server")
    return TransientError(found, after=after)


def no_ranges_error(url: str, /) -> LoaderError:
    """Return the error of a server that does not support range requests."""
    return LoaderError(
        "the server does not support range requests: it sends the whole file",
        path=url,
        advice="copy the shards here, or to a server that supports HTTP range requests",
    )
