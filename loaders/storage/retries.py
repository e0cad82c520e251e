"""How the network is used: requests in flight, their bytes, attempts and time-outs."""

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
"""The environment variable that says how many seconds a failing request is tried again."""

_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Network:
    """How the network is used. `NETWORK` has the values in force.

    - `requests`: most requests of one process in flight.
    - `in_flight`: most bytes that one process has requested and not received.
    - `held`: most bytes that one reader has fetched ahead and not used. Blocks in use come on top.
    - `piece`: a longer range is requested in pieces of so many bytes.
    - `patience`: a request is made again after a failure that may pass. The pauses before that take
      at most so many seconds together. TWINFEED_PATIENCE in the environment overrides this.
    - `first_pause`, `longest_pause`: seconds between two attempts. They double each time. A random
      part of each pause, at most half, is left out.
    - `request_seconds`: a request for a range fails after so many seconds.
    - `connect_seconds`, `silent_seconds`: a request fails after so many seconds without a
      connection, and an upload after so many seconds without a byte.
    """

    requests: int = 32
    in_flight: int = 1 << 28
    held: int = 1 << 29
    piece: int = 1 << 23
    patience: float = 6.0
    first_pause: float = 0.2
    longest_pause: float = 10.0
    request_seconds: float = 60.0
    connect_seconds: float = 10.0
    silent_seconds: float = 30.0


NETWORK = Network()
"""How the network is used."""


class PassingError(Exception):
    """Report a failure that may pass: the request is made again, not before `after` seconds, or an
    hour if that is less.

    `problem` and `advice` say what is wrong and what to do if it does not pass.
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
    """Report a store that refuses these credentials."""


def patiently(url: str, wanted: str, call: Callable[[], _Result], /) -> _Result:
    """Return what `call` returns, called again after a failure that may pass.

    A pause is as long as the server asks, but no longer than the patience that is left.

    Raises:
        LoaderError: a failure that stays; with the URL, what was `wanted` and the attempts.
    """
    started = time.monotonic()
    left, pause, attempts = patience(), NETWORK.first_pause, 0
    while True:
        attempts += 1
        try:
            return call()
        except PassingError as error:
            # A process that ends joins its threads, and would wait for a thread that still tries.
            if left <= 0 or not threading.main_thread().is_alive():
                seconds = time.monotonic() - started
                asks = f"; the server asks to wait {error.after:.0f} seconds" if error.after else ""
                raise LoaderError(
                    error.problem,
                    path=url,
                    expected=wanted,
                    found=f"{error} ({attempts} attempts in {seconds:.1f} seconds{asks})",
                    advice=error.advice,
                ) from error
            asked = error.after
        pause = min(max(pause, asked), left)
        time.sleep(max(random.uniform(pause / 2, pause), min(asked, left)))
        left, pause = left - pause, min(NETWORK.longest_pause, 2 * pause)


def patience() -> float:
    """Return how many seconds all pauses between attempts may take together.

    Raises:
        ValueError: the variable of the environment is not a number of seconds.
    """
    text = os.environ.get(PATIENCE)
    try:
        seconds = float(text) if text else NETWORK.patience
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"{PATIENCE} must be a number of seconds, 0 or more, got {text!r}")
    return seconds


def refused(status: int | None, /) -> bool:
    """Return whether a status is a refusal or a redirection that a later attempt cannot change."""
    return status is not None and 300 <= status < 500 and status not in (408, 425, 429)


def gone(url: str, /) -> FileNotFoundError:
    """Return the error of a file that is not there."""
    missing = "no such file; check the URL, and whether you may read there"
    return FileNotFoundError(errno.ENOENT, missing, url)


def refusal(url: object, found: str, advice: str, who: str = "server") -> LoaderError:
    """Return the error of a request that is refused for good."""
    return LoaderError(f"the {who} refuses the request", path=url, found=found, advice=advice)


def failed(url: str, status: int, reason: str, after: float, /) -> Exception:
    """Return the error of a web server's answer without data."""
    answered = masked(f"status {status} {reason}")
    if status in (404, 410):
        return gone(url)
    if status in (401, 403):
        return RefusedError(
            "the store refuses to serve this",
            path=url,
            found=answered,
            advice="name the store itself, as in s3://bucket/shard: a URL carries no credentials",
        )
    if refused(status):
        advice = "check the URL, and the password of a proxy"
        return refusal(url, answered, advice, "proxy" if status == 407 else "server")
    return PassingError(answered, after=after)


def no_ranges(url: str, /) -> LoaderError:
    """Return the error of a server without ranges."""
    return LoaderError(
        "the server does not serve ranges of a file: it sends the whole file",
        path=url,
        advice="copy the shards here, or to a server that supports HTTP range requests",
    )
