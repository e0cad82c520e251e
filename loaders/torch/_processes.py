"""Refuse to iterate over a loader in a worker of a DataLoader."""

from __future__ import annotations

from torch.utils.data import get_worker_info


def check_not_in_worker() -> None:
    """Raise RuntimeError if this process is a worker of a DataLoader that was made of a loader.

    Each worker has a copy of the loader, and would give all of its batches.
    """
    if get_worker_info() is not None:
        raise RuntimeError(
            "each worker of a DataLoader would give every batch of the TorchLoader: iterate over "
            "TorchLoader(feed, num_workers=…) itself"
        )
