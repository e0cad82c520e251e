"""Validate the arrays in which an index stores the records of each class."""

from __future__ import annotations

import numpy as np

from twinfeed.loaders.support.array_types import Array

READ_ITEMS = 1 << 20
"""The number of record ids or labels that are read at a time, to bound memory."""

_CHECKED_RECORDS = 1 << 28
"""The number of records that are checked at a time. Each takes one byte of memory."""


def check_class_arrays(*, records: Array, starts: Array, sizes: Array, num_records: int) -> None:
    """Raise ValueError unless the classes of an index contain every record exactly once.

    `records` has the record ids sorted by class: class n is records[starts[n] : starts[n] +
    sizes[n]]. For example, records [2, 0, 1] with starts [0, 1] and sizes [1, 2].

    The arrays may be larger than the memory, so they are read in slices of `READ_ITEMS`. Which
    record ids were found is noted for at most `_CHECKED_RECORDS` ids at a time. If there are more
    records, the arrays are read once more for the next ids, and so on.
    """
    if any(array.ndim != 1 or array.dtype.kind != "i" for array in (records, starts, sizes)):
        raise ValueError("its arrays are not one-dimensional arrays of integers")
    if len(records) != num_records or len(starts) != len(sizes):
        raise ValueError(f"{len(records)} records, {len(starts)} starts and {len(sizes)} sizes")
    order = np.argsort(starts)
    bounds = np.append(starts[order], num_records)
    if bounds[0] != 0 or (sizes < 1).any() or (sizes[order] != np.diff(bounds)).any():
        raise ValueError("its classes overlap, or do not cover all records")
    for first in range(0, num_records, _CHECKED_RECORDS):  # usually once
        # Whether record `first`, `first + 1`, … is in a class.
        is_in_class = np.zeros(min(_CHECKED_RECORDS, num_records - first), np.bool_)
        for start in range(0, num_records, READ_ITEMS):
            positions = records[start : start + READ_ITEMS] - first
            is_in_class[positions[(positions >= 0) & (positions < len(is_in_class))]] = True
        if not is_in_class.all():
            raise ValueError(f"record {first + int(is_in_class.argmin())} is in no class")
