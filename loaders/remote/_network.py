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

_Result = TypeVar("_Result")

PATIENCE = "TWINFEED_PATIENCE"
"""The variable of the environment that says how long a failing request is made again."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Say how the network is used; `NETWORK` is in force.

    - `requests`: requests in flight of one process, at most.
    - `in_flight`: bytes asked for and not here yet, of one process, at most.
    - `held`: bytes that one reader has fetched ahead and holds, at most.
    - `piece`: a longer range is asked for in pieces of so many bytes.
    - `patience`: a request that fails in a way that may pass is made again, after pauses of so many
      seconds together at most. TWINFEED_PATIENCE in the environment comes before it.
    - `first_pause`, `longest_pause`: seconds between two attempts, which double each time. The
      pause is drawn between half of that and all.
    - `request_seconds`: a request for a range fails after so long.
    - `connect_seconds`, `silent_seconds`: so does one without a connection, and a download without
      a byte.
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
    """Report a failure that may pass: the request is made again."""


class NoRangesError(LoaderError):
    """Report a server that answers the request for a range with the whole file."""


def patiently(url: str, wanted: str, call: Callable[[], _Result], /) -> _Result:
    """Return what `call` returns, called again after a failure that may pass.

    Raises LoaderError, with the URL, what was `wanted` and the attempts, for a failure that stays.
    """
    started = time.monotonic()
    left, pause, attempts = patience(), NETWORK.first_pause, 0
    while True:
        attempts += 1
        try:
            return call()
        except PassingError as error:
            # Threads are joined when a process ends, and must not go on trying then.
            if left <= 0 or not threading.main_thread().is_alive():
                seconds = time.monotonic() - started
                raise LoaderError(
                    "the server of this shard cannot be reached, or fails",
                    path=url,
                    expected=wanted,
                    found=f"{error} ({attempts} attempts in {seconds:.1f} seconds)",
                    advice="check the URL, the network and the credentials, and try again; "
                    f"{PATIENCE}=60 in the environment tries for a minute",
                ) from error
        pause = min(pause, left)
        time.sleep(random.uniform(pause / 2, pause))
        left, pause = left - pause, min(NETWORK.longest_pause, 2 * pause)


def patience() -> float:
    """Return how many seconds the pauses between attempts may take together; raise ValueError where
    the environment says what is no number of seconds.
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
    """Tell whether a server's answer stays: a refusal or a redirection, but none for the moment."""
    return status is not None and 300 <= status < 500 and status not in (408, 425, 429)


def gone(url: str, /) -> FileNotFoundError:
    """Return the error of a file that is not there."""
    missing = "no such shard; check the URL, and whether you may read there"
    return FileNotFoundError(errno.ENOENT, missing, url)


def no_ranges(url: str, /) -> NoRangesError:
    """Return the error of a server without ranges."""
    return NoRangesError(
        "the server does not serve ranges of a file: it sends the whole file",
        path=url,
        advice="copy the shards here, or to a server that supports HTTP range requests",
    )
