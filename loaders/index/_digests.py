"""Digests of what an index holds, the same whatever container holds it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from twinfeed.loaders._checks import Array

_ROWS = 1 << 18


def content_digests(
    kinds: Mapping[str, str], tables: Mapping[str, Array], columns: Mapping[str, Array], /
) -> dict[str, str]:
    """Return a SHA-256 for each bytes field and each column, by name.

    A field's digest is taken over the CRC-32C of each record as int64, -1 where a record lacks the
    field, in the order of the ids. A column's digest is taken over its values as int64 or float64.
    Both begin with the shape. Lists have no digest, since each container stores lists in a way of
    its own.

    >>> sorted(content_digests({}, {}, {"label": np.array([1, 2])}))
    ['label']
    """
    found = {
        name: _digest("crc32c", table) for name, table in tables.items() if kinds[name] == "bytes"
    }
    for name, column in columns.items():
        found[name] = _digest("<f8" if column.dtype.kind == "f" else "<i8", column)
    return found


def _digest(kind: str, values: Array) -> str:
    """Return the digest of a table's checksums, or of values of the type `kind`; piece by piece."""
    digest = hashlib.sha256(f"{kind} {list(values.shape)}\n".encode())
    for start in range(0, len(values), _ROWS):
        piece = values[start : start + _ROWS]
        if kind == "crc32c":
            held = np.where(piece["length"] < 0, -1, piece["crc"].astype(np.int64))
            digest.update(held.astype("<i8").tobytes())
        else:
            digest.update(piece.astype(kind).tobytes())
    return digest.hexdigest()
