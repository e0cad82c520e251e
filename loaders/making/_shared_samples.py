"""Decoded samples that several uses share: read-only, and checked for changes all the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from twinfeed.loaders.errors import DecodeError
from twinfeed.loaders.reading.source import read_only
from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.support.checksum import crc32c

_PIECE = 1 << 18  # items that are copied for a checksum at once: a copy of all takes long

_IMMUTABLE = (bytes, str, int, float, complex, bool, type(None), np.generic)


def with_read_only_arrays(sample: Mapping[str, Any], /) -> Mapping[str, Any]:
    """Return the sample with read-only views of its arrays."""
    return {
        name: read_only(value) if isinstance(value, np.ndarray) else value
        for name, value in sample.items()
    }


def lent(sample: Mapping[str, Any], /) -> dict[str, Any]:
    """Return a sample for one use: the arrays themselves, and copies of what no flag protects."""
    return {
        name: value if isinstance(value, (np.ndarray, *_IMMUTABLE)) else copy.deepcopy(value)
        for name, value in sample.items()
    }


@contextmanager
def unchanged(sample: Mapping[str, Any], /) -> Iterator[None]:
    """Raise DecodeError if the block changes an array of the sample.

    numpy keeps to the lock. torch does not: `torch.from_numpy(array).add_(1)` writes to the array,
    and every later use would get a changed image.
    """
    sums = {
        name: _checksum(value)
        for name, value in sample.items()
        if isinstance(value, np.ndarray) and value.dtype != object
    }
    yield
    for name, before in sums.items():
        if _checksum(sample[name]) != before:
            raise DecodeError(
                f"transform wrote to the array of field {name!r}, which other uses share",
                advice="write to array.copy(), or to torch.tensor(array)",
            )


def _checksum(array: Array) -> int:
    flat, checksum = np.ascontiguousarray(array).reshape(-1), 0
    for start in range(0, flat.size, _PIECE):
        checksum = crc32c(flat[start : start + _PIECE].tobytes(), checksum)
    return checksum
