"""The number of processes that train together.

Samplers import no framework. torch is asked if the program has imported it, since samplers go into
a `DataLoader` without a backend. Another backend adds a probe, a function that asks its framework.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any


def _torch_world_size() -> int:
    """Return the number of ranks of torch's default process group; 1 without torch or a group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return int(distributed.get_world_size())


# The modules of torch whose batch samplers iterate over a sampler of ids.
_BATCHING = {"torch.utils.data.sampler", "torchdata.stateful_dataloader.sampler"}

_PROBES: list[Callable[[], int]] = [_torch_world_size]
_warned: list[str] = []


def add_probe(probe: Callable[[], int], /) -> None:
    """Add a probe: a function that returns the number of processes of a framework."""
    _PROBES.append(probe)


def num_processes() -> int:
    """Return the number of processes that train together: the largest of `WORLD_SIZE`, which
    launchers such as torchrun set, and of what the probes find.

    >>> num_processes()
    1
    """
    variable = os.environ.get("WORLD_SIZE", "")
    world_size = int(variable) if variable.isdecimal() else 1
    return max([world_size, *(probe() for probe in _PROBES)])


def check_not_batched(stream: Any, /) -> None:
    """Raise TypeError if a batch sampler of torch, which batches ids, iterates over a stream: torch
    would batch its batches, and arrays would give another shape without an error.
    """
    frame, _ = caller()
    if frame and frame.f_globals.get("__name__") in _BATCHING:
        raise TypeError(
            f"torch would make batches of the batches of {stream!r}: write "
            f"DataLoader(dataset, batch_sampler=…), without sampler=, batch_size= and drop_last="
        )


def warn_unsharded(stream: Any, /) -> None:
    """Warn, once, if there are several processes and each would get every batch of a stream."""
    ranks = num_processes()
    if ranks > 1 and not stream.sharded and not _warned:
        message = (
            f"there are {ranks} ranks, and each gets every batch of {stream!r}: give each rank "
            f"its part, shard(rank, world_size) of the sampler or the feed; shard(0, 1) says that "
            f"all of them are meant to get every batch"
        )
        _warned.append(message)
        warn(message)


def warn(message: str, /) -> None:
    """Warn at the line outside of this library that led here."""
    warnings.warn(message, stacklevel=caller()[1])


def caller() -> tuple[FrameType | None, int]:
    """Return the innermost frame outside of this library, and its level for a warning."""
    frame: FrameType | None = sys._getframe()
    level = 0
    while frame and str(frame.f_globals.get("__name__")).startswith("twinfeed."):
        frame, level = frame.f_back, level + 1
    return frame, level
