"""Compare the record ids that a loader delivered with those of a `NumpyLoader`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from twinfeed import Feed, NumpyLoader


def report(delivered: Sequence[Any], sampler: Any) -> None:
    """Print how many batches of ids were delivered, and whether they are a NumpyLoader's."""
    feed = Feed({"number": np.arange(sampler.num_records)}, sampler)
    loader, expected = NumpyLoader(feed), []
    while len(expected) < len(delivered):
        expected += [batch["id"] for batch in loader]
    same = digest(delivered) == digest(expected[: len(delivered)])
    print(f"{len(delivered)} batches:", "the ids of NumpyLoader" if same else "OTHER ids")


def digest(batches: Sequence[Any]) -> str:
    """Return the digest of ids, one batch after the other."""
    ids = np.concatenate([np.asarray(batch, np.int64) for batch in batches])
    return hashlib.sha256(ids.tobytes()).hexdigest()
