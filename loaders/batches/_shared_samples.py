"""Protect decoded samples that are used several times from changes by the user's functions."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from twinfeed.loaders.errors import DecodeError
from twinfeed.loaders.reading.source import read_only
from twinfeed.loaders.support.array_types import Array

Fields = Mapping[str, Any]
"""The fields of a sample by name."""

IMMUTABLE = (bytes, str, int, float, complex, bool, type(None), np.generic)


def with_read_only_arrays(sample: Fields, /) -> Fields:
    """Return a copy of a sample (a dict by field) that has read-only views of its arrays."""
    return {
        name: read_only(value) if isinstance(value, np.ndarray) else value
        for name, value in sample.items()
    }


def with_writable_arrays(sample: Fields, /) -> dict[str, Any]:
    """Return a copy of a sample (a dict by field) in which read-only arrays are copied."""
    return {
        name: value.copy() if isinstance(value, np.ndarray) and not value.flags.writeable else value
        for name, value in sample.items()
    }


def with_private_copies(sample: Fields, /, *, arrays: bool) -> dict[str, Any]:
    """Return a copy of a sample (a dict by field) with deep copies of its mutable values.

    Arrays are only copied if `arrays` is true.
    """
    copies = dict(sample)
    for name, value in sample.items():
        if not isinstance(value, IMMUTABLE) and (arrays or not isinstance(value, np.ndarray)):
            with suppress(Exception):  # an open file, a tensor with a gradient
                copies[name] = copy.deepcopy(value)
    return copies


@contextmanager
def check_not_mutated(sample: Fields, /) -> Iterator[None]:
    """Raise DecodeError if a transform within the `with` block changes an array of the sample.

    Other samples share the arrays. They are read-only in numpy, but
    `torch.from_numpy(array).add_(1)` ignores this. So their checksums are compared.
    """
    checksums = {
        name: _checksum(value)
        for name, value in sample.items()
        if isinstance(value, np.ndarray) and value.dtype != object
    }
    yield
    for name, checksum in checksums.items():
        if _checksum(sample[name]) != checksum:
            raise DecodeError(
                f"transform wrote to the array of field {name!r}, which other uses share",
                advice="write to array.copy(), or to torch.tensor(array)",
            )


def _checksum(array: Array) -> int:
    """Return the CRC-32 of the values of an array."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
