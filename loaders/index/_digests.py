"""Digests of what an index holds, the same whatever container holds it."""

from __future__ import annotations

import hashlib

import numpy as np

from twinfeed.loaders._checks import Array


class ContentDigest:
    """Take the SHA-256 of a bytes field, or of a column, piece by piece.

    A field's digest is taken over the CRC-32C of each record as int64, -1 where a record lacks the
    field, in the order of the ids. A column's digest is taken over its values as int64 or float64.
    Both begin with a line of the type and the shape. Lists have no digest, since each container
    stores lists in a way of its own.

    >>> ContentDigest((2,), "<i8").add(np.array([1, 2])).hexdigest()[:16]
    '97f6034a7fc3364e'
    """

    def __init__(self, shape: tuple[int, ...], kind: str, /) -> None:
        self._kind = kind
        self._digest = hashlib.sha256(f"{kind} {list(shape)}\n".encode())

    def add(self, values: Array, /) -> ContentDigest:
        """Add the values of the next records, or their rows in the table of a field."""
        if self._kind == "crc32c":
            values = np.where(values["length"] < 0, -1, values["crc"].astype(np.int64))
        self._digest.update(values.astype("<f8" if self._kind == "<f8" else "<i8").tobytes())
        return self

    def hexdigest(self) -> str:
        """Return the digest of all that was added."""
        return self._digest.hexdigest()
