"""Compare the record ids that a loader delivered with those of a `NumpyLoader`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from twinfeed import Feed, NumpyLoader


def report(delivered: Sequence[Any], sampler: Any, *, rank: int = 0, world_size: int = 1) -> None:
    """Print how many ids were delivered, and whether they are those of a NumpyLoader.

    With several ranks, each has every `world_size`-th batch, as Accelerate deals them.
    """
    loader = NumpyLoader(Feed({"number": np.arange(sampler.num_records)}, sampler))
    ids = np.concatenate([np.asarray(batch) for batch in delivered])
    batches: list[np.ndarray] = []
    while sum(map(len, batches[rank::world_size])) < len(ids):
        batches += [batch["id"] for batch in loader]
    expected = np.concatenate(batches[rank::world_size])[: len(ids)]
    same = digest(ids) == digest(expected)
    line = f"{len(ids)} ids: {'those' if same else 'NOT those'} of NumpyLoader\n"
    print(line, end="", flush=True)  # in one write, as ranks print side by side


def digest(ids: np.ndarray) -> str:
    """Return the digest of ids in their order."""
    return hashlib.sha256(ids.astype(np.int64).tobytes()).hexdigest()
