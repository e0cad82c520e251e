"""Bytes of rows, compared with what the index says."""

from __future__ import annotations

from twinfeed.loaders.reading.prefetch.read_plan import Rows
from twinfeed.loaders.support.checksum import crc32c


class WrongBytes(Exception):  # noqa: N818, caught and turned into the errors of this library
    """Say which row has other bytes than the index says, and what was read instead."""

    def __init__(self, place: int, found: bytes) -> None:
        super().__init__(place, found)  # both arguments, so that the error can be pickled
        self.place = place
        self.found = found


def cut_rows(piece: bytes, rows: Rows, checksums: bool, place: int) -> list[bytes]:
    """Cut one piece into the rows' bytes, and check each."""
    base = int(rows["offset"][0])
    out: list[bytes] = []
    for offset, length, _, crc in rows.tolist():
        data = piece[offset - base : offset - base + length]
        if len(data) != length or (checksums and crc32c(data) != crc):
            raise WrongBytes(place + len(out), data)
        out.append(data)
    return out
