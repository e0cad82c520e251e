"""The records sorted by class, in memory that does not grow with their number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from twinfeed.loaders._checks import Array, Int64s
from twinfeed.loaders.index._store import Store
from twinfeed.samplers import ClassOrder
from twinfeed.samplers._state import digest

SORTED = 1 << 23
"""So many records are sorted at a time. The labels are read once for each such piece."""

READ = 1 << 20


def write_class_order(store: Store, labels: Int64s, /) -> str:
    """Write the arrays of the `ClassOrder` of labels to `store`; return its digest."""
    values, sizes, first = _census(labels)
    narrow = np.int32 if len(labels) < 1 << 31 else np.int64
    records = store.new("classorder-records", narrow, labels.shape)
    ends = np.cumsum(sizes)
    low = 0
    while low < len(values):
        start = int(ends[low] - sizes[low])
        high = max(low + 1, int(np.searchsorted(ends, start + SORTED, side="right")))
        pieces = list(_between(labels, values[low], values[high - 1])) if high > low + 1 else []
        if pieces:
            ids, held = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
            records.add(ids[ClassOrder(held).records])
        else:  # a single class is in order already, however large it is
            for ids, _ in _between(labels, values[low], values[low]):
                records.add(ids)
        low = high
    by_first = np.argsort(first)
    store.add({"classorder-starts": (ends - sizes)[by_first], "classorder-sizes": sizes[by_first]})
    return digest(labels)


def _between(labels: Int64s, low: int, high: int) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield ids of records whose labels lie in [low, high], with these labels."""
    for start in range(0, len(labels), READ):
        piece = labels[start : start + READ]
        found = np.flatnonzero((piece >= low) & (piece <= high))
        yield found + start, piece[found]


def _census(labels: Int64s) -> tuple[Array, Int64s, Int64s]:
    """Return the labels that occur, sorted; how many records each has; and its first record."""
    values, sizes, first = labels[:0], np.zeros(0, np.int64), np.zeros(0, np.int64)
    for start in range(0, len(labels), READ):
        new, place, count = np.unique(
            labels[start : start + READ], return_index=True, return_counts=True
        )
        both, where = np.unique(np.concatenate([values, new]), return_inverse=True)
        counts, least = np.zeros(len(both), np.int64), np.full(len(both), len(labels))
        np.add.at(counts, where, np.concatenate([sizes, count]))
        np.minimum.at(least, where, np.concatenate([first, place + start]))
        values, sizes, first = both, counts, least
    return values, sizes, first
