"""Bytes of rows, compared with what the index says."""

from __future__ import annotations

from twinfeed.loaders.reading.prefetch.read_plan import Rows
from twinfeed.loaders.support.checksum import crc32c


class WrongBytes(Exception):  # noqa: N818, caught and turned into the errors of this library
    """A row whose bytes are not those that the index says: its number, and what was read."""

    def __init__(self, row: int, found: bytes) -> None:
        super().__init__(row, found)  # both arguments, so that the error can be pickled
        self.row = row
        self.found = found


def cut_rows(range_data: bytes, rows: Rows, checksums: bool, first: int) -> list[bytes]:
    """Cut the bytes of a range into those of its rows, and check each; `first` counts from 0."""
    base = int(rows["offset"][0])
    out: list[bytes] = []
    for offset, length, _, crc in rows.tolist():
        data = range_data[offset - base : offset - base + length]
        if len(data) != length or (checksums and crc32c(data) != crc):
            raise WrongBytes(first + len(out), data)
        out.append(data)
    return out
