"""Decoded samples that several uses share: read-only, and checked for who writes all the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.errors import DecodeError
from twinfeed.loaders.formats._checksum import crc32c

_PIECE = 1 << 18  # items that are copied for a checksum at once: a copy of all costs four times it

_IMMUTABLE = (bytes, str, int, float, complex, bool, type(None), np.generic)


class SharedArrays:
    """Lock the arrays of decoded samples, and find the transform that writes to one.

    numpy keeps to the lock. torch does not: `torch.from_numpy(array).add_(1)` writes to the array,
    and every later use of the image would be another one. So the first uses are compared with a
    checksum taken before: `uses` of them, or all where `uses` is negative.
    """

    def __init__(self, uses: int, /) -> None:
        self._left = uses

    @staticmethod
    def lock(sample: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the sample with read-only views of its arrays."""
        return {name: _locked(value) for name, value in sample.items()}

    @staticmethod
    def lend(sample: Mapping[str, Any]) -> dict[str, Any]:
        """Give a sample for one use: the arrays themselves, and copies of what no flag protects."""
        return {
            name: value if isinstance(value, (np.ndarray, *_IMMUTABLE)) else copy.deepcopy(value)
            for name, value in sample.items()
        }

    def sums(self, sample: Mapping[str, Any]) -> dict[str, int]:
        """Return a checksum of each array, or nothing where uses are no longer checked."""
        if not self._left:
            return {}
        self._left -= 1
        return {
            name: _checksum(value)
            for name, value in sample.items()
            if isinstance(value, np.ndarray) and value.dtype != object
        }

    @staticmethod
    def check(sample: Mapping[str, Any], sums: Mapping[str, int]) -> None:
        """Raise DecodeError where an array is not as it was when `sums` were taken."""
        for name, before in sums.items():
            if _checksum(sample[name]) != before:
                raise DecodeError(
                    f"transform wrote to the array of field {name!r}, which other uses of the "
                    f"record share",
                    advice="write to a copy: array.copy(), or torch.tensor(array) in place of "
                    "torch.from_numpy(array)",
                )


def _locked(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.flags.writeable:
        value = value.view()
        value.flags.writeable = False
    return value


def _checksum(array: npt.NDArray[Any]) -> int:
    flat, checksum = np.ascontiguousarray(array).reshape(-1), 0
    for start in range(0, flat.size, _PIECE):
        checksum = crc32c(flat[start : start + _PIECE].tobytes(), checksum)
    return checksum
