"""Validation of the stored class order of an index."""

from __future__ import annotations

import numpy as np

from twinfeed.loaders.support.array_types import Array


def check_class_order(*, records: Array, starts: Array, sizes: Array, num_records: int) -> None:
    """Raise ValueError unless the classes of an index contain every record exactly once.

    `records` has the record ids sorted by class: class n is records[starts[n] : starts[n] +
    sizes[n]]. For example, records [2, 0, 1] with starts [0, 1] and sizes [1, 2].
    """
    if any(array.ndim != 1 or array.dtype.kind != "i" for array in (records, starts, sizes)):
        raise ValueError("its arrays are not of integers in one dimension")
    if len(records) != num_records or len(starts) != len(sizes):
        raise ValueError(f"{len(records)} records, {len(starts)} starts and {len(sizes)} sizes")
    order = np.argsort(starts)
    bounds = np.append(starts[order], num_records)
    if bounds[0] != 0 or (sizes < 1).any() or (sizes[order] != np.diff(bounds)).any():
        raise ValueError("its classes overlap, or leave records out")
    for low in range(0, num_records, SEEN):
        is_in_class = np.zeros(min(SEEN, num_records - low), np.bool_)  # of the ids from `low` on
        for start in range(0, num_records, READ):
            ids = records[start : start + READ] - low
            is_in_class[ids[(ids >= 0) & (ids < len(is_in_class))]] = True
        if not is_in_class.all():
            raise ValueError(f"record {low + int(is_in_class.argmin())} is in no class")


READ = 1 << 20
"""The number of records (or labels) read at a time."""


SEEN = 1 << 28
"""The number of records that are checked at a time, with one byte each."""
