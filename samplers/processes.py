"""How many processes train together. Samplers import no framework: each backend gives a probe."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Protocol

_PROBES: list[Callable[[], int]] = []
_warned: list[str] = []


class Sharded(Protocol):
    """A stream that knows whether its `shard` was called."""

    sharded: bool


def add_probe(probe: Callable[[], int], /) -> None:
    """Add a probe: a function that returns how many processes a framework knows of."""
    _PROBES.append(probe)


def processes() -> int:
    """Return how many processes train together, as the backends or a launcher say.

    Launchers such as torchrun set `WORLD_SIZE`. A sampler that is used without a backend of this
    library has no other sign.

    >>> processes()
    1
    """
    launched = os.environ.get("WORLD_SIZE", "")
    known = int(launched) if launched.isdecimal() else 1
    return max([known, *(probe() for probe in _PROBES)])


def warn_unsharded(stream: Sharded, /) -> None:
    """Warn, once, if each of several processes would get every batch."""
    if stream.sharded or _warned:
        return
    ranks = processes()
    if ranks > 1:
        said = (
            f"there are {ranks} ranks, and each gets every batch of {stream!r}: give each rank "
            f"its part, shard(rank, world_size) of the sampler or the feed; shard(0, 1) says that "
            f"all of them are meant to get every batch"
        )
        _warned.append(said)
        warnings.warn(said, stacklevel=4)
