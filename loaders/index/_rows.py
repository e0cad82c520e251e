"""The rows that say where a field lies: narrow in files, of one type in memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twinfeed.loaders._checks import Array

ROW = np.dtype([("offset", "<i8"), ("length", "<i8"), ("file", "<u4"), ("crc", "<u4")])
"""Where a field of one record lies; a `length` of -1 says that the record lacks the field."""


def row_type(where: int, length: int, /, *, whole_files: bool) -> np.dtype[np.void]:
    """Return the type of the rows of a table, given the largest offset, or number of a file for
    `whole_files`, and the largest length.

    >>> row_type(1 << 32, 1000, whole_files=False)
    dtype([('offset', '<i8'), ('length', '<i4'), ('crc', '<u4')])
    """
    place = "file" if whole_files else "offset"
    lengths = "<i4" if length < 1 << 31 else "<i8"
    return np.dtype([(place, unsigned(where)), ("length", lengths), ("crc", "<u4")])


def row_types(*, whole_files: bool) -> set[np.dtype[np.void]]:
    """Return every type that rows of a table can have."""
    return {
        row_type(where, length, whole_files=whole_files)
        for where in (0, 1 << 32)
        for length in (0, 1 << 31)
    }


def unsigned(largest: int, /) -> str:
    """Return the type of four bytes, or of eight where a number needs them."""
    return "<u4" if largest < 1 << 32 else "<i8"


def missing_rows(records: int, dtype: npt.DTypeLike, /) -> Array:
    """Return the table of a field that every record lacks.

    >>> missing_rows(2, row_type(0, 0, whole_files=True))["length"]
    array([-1, -1], dtype=int32)
    """
    table = np.zeros(records, dtype)
    table["length"] = -1
    return table
