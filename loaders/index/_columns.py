"""What an index holds of each record: rows that say where a field lies, and strings.

Rows are narrow in files, and of one type in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders._checks import Array

ROW = np.dtype([("offset", "<i8"), ("length", "<i8"), ("file", "<u4"), ("crc", "<u4")])
"""Where a field of one record lies; a `length` of -1 says that the record lacks the field."""


def row_type(where: int, length: int, /, *, whole_files: bool) -> np.dtype[np.void]:
    """Return the type of the rows of a table, given the largest offset, or number of a file for
    `whole_files`, and the largest length.
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
    """Return the table of a field that every record lacks."""
    table = np.zeros(records, dtype)
    table["length"] = -1
    return table


class StringColumn:
    """Hold strings as `text` (uint8) and `ends` (int64[n], or uint32[n] where that is enough), so
    that they can be memory-mapped.

    >>> column = StringColumn.of(["cat", "", "dog"])
    >>> column[0], column[1], column[2], len(column)
    ('cat', '', 'dog', 3)
    """

    def __init__(self, text: npt.NDArray[np.uint8], ends: npt.NDArray[Any], /) -> None:
        self.text = text
        self.ends = ends

    @classmethod
    def of(cls, strings: Iterable[str], /) -> StringColumn:
        """Pack `strings`; a name that is not UTF-8 is kept byte for byte (surrogateescape)."""
        data = [string.encode("utf-8", "surrogateescape") for string in strings]
        ends = np.cumsum([len(item) for item in data], dtype=np.int64)
        text = np.frombuffer(b"".join(data), np.uint8)
        return cls(text, ends.astype(unsigned(len(text))))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, place: int) -> str:
        start = self.ends[place - 1] if place else 0
        return self.text[start : self.ends[place]].tobytes().decode("utf-8", "surrogateescape")

    def tolist(self) -> list[str]:
        """Return every string; for columns small enough to be a list."""
        return [self[place] for place in range(len(self))]

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Return the two arrays under the names an index stores them by."""
        return {f"{name}-text": self.text, f"{name}-ends": self.ends}
