"""Compare the record ids that a loader delivered with those of a `NumpyLoader`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from twinfeed import Feed, NumpyLoader


def report(delivered: Sequence[Any], sampler: Any) -> None:
    """Print how many ids were delivered, and whether a NumpyLoader has the same from its start."""
    feed = Feed({"number": np.arange(sampler.num_records)}, sampler)
    loader, ids = NumpyLoader(feed), np.concatenate([np.asarray(batch) for batch in delivered])
    expected = np.empty(0, np.int64)
    while len(expected) < len(ids):
        expected = np.concatenate([expected, *(batch["id"] for batch in loader)])
    same = digest(ids) == digest(expected[: len(ids)])
    print(f"{len(ids)} ids:", "those of NumpyLoader" if same else "NOT those of NumpyLoader")


def digest(ids: np.ndarray) -> str:
    """Return the digest of ids in their order."""
    return hashlib.sha256(ids.astype(np.int64).tobytes()).hexdigest()
