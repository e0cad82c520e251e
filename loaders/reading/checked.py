"""Compare the bytes of rows with the lengths and checksums in the index."""

from __future__ import annotations

from twinfeed.loaders.reading.prefetch.read_plan import Rows
from twinfeed.loaders.support.checksum import crc32c


class WrongBytes(Exception):  # noqa: N818, caught and turned into the errors of this library
    """The bytes of a row have another length or checksum than in the index.

    `row` is its index among the rows that were read, and `found` are the bytes.
    """

    def __init__(self, row: int, found: bytes) -> None:
        super().__init__(row, found)  # both arguments, so that the error can be pickled
        self.row = row
        self.found = found


def slice_rows(range_data: bytes, rows: Rows, checksums: bool, first: int) -> list[bytes]:
    """Slice the bytes of each row out of the bytes of a range, and check them.

    `range_data` begins at the offset of rows[0]. For errors, `first` is the number of this row
    among all rows that are read.

    Raises:
        WrongBytes: a wrong length or, with `checksums`, a wrong CRC-32C.
    """
    base = int(rows["offset"][0])
    out: list[bytes] = []
    for offset, length, _, crc in rows.tolist():
        data = range_data[offset - base : offset - base + length]
        if len(data) != length or (checksums and crc32c(data) != crc):
            raise WrongBytes(first + len(out), data)
        out.append(data)
    return out
