"""How many processes torch knows of, and whether this process is a worker of a DataLoader."""

from __future__ import annotations

import torch.distributed as dist
from torch.utils.data import get_worker_info

from twinfeed.samplers.processes import add_probe


def world_size() -> int:
    """Return the number of ranks of the default process group; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def check_not_in_worker() -> None:
    """Raise RuntimeError if this process is a worker of a DataLoader that was made of a loader.

    Each worker has a copy of the loader, and would give all of its batches.
    """
    if get_worker_info() is not None:
        raise RuntimeError(
            "each worker of a DataLoader would give every batch of the TorchLoader: iterate over "
            "TorchLoader(feed, num_workers=…) itself"
        )


add_probe(world_size)
