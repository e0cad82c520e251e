"""The sizes of the records of an index, and whether they fit in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twinfeed.loaders.index.index import Index
from twinfeed.loaders.support import system

# The sample size for the mean length of a record.
_SAMPLE = 1 << 10


def exceeds_memory(index: Index, /) -> bool:
    """Return whether the shards have more bytes than half the memory that this process may use."""
    stored = int(index.shards["bytes"].sum())
    if index.container == "files":
        stored = int(len(index) * record_bytes(index))
    return 2 * stored > system.memory()


def field_bytes(index: Index, /) -> int:
    """Return the total size of all fields of all records, in bytes."""
    lengths = (index.table(field)["length"] for field in index.fields)
    return sum(int(np.maximum(length, 0).sum()) for length in lengths)


def record_bytes(index: Index, fields: Sequence[str] | None = None, /) -> float:
    """Return the mean bytes of a record's fields (default: all), over up to `_SAMPLE` records."""
    ids = np.unique(np.linspace(0, len(index) - 1, min(len(index), _SAMPLE)).astype(np.int64))
    lengths = index.rows(list(index.fields if fields is None else fields), ids)["length"]
    return float(lengths.clip(0).sum() / max(1, len(ids)))
