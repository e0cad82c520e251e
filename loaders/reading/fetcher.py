"""What gives the bytes of rows, whatever holds them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from twinfeed.loaders.index import Index
from twinfeed.loaders.reading.ranges import REMOTE_GAP, Extents, Rows
from twinfeed.loaders.reading.schedule import Schedule
from twinfeed.loaders.support.checksum import crc32c


class WrongBytes(Exception):  # noqa: N818, caught and turned into the errors of this library
    """Say which row's bytes were not as indexed, and what was read instead."""

    def __init__(self, place: int, found: bytes) -> None:
        super().__init__(place, found)  # both arguments, so that the error can be pickled
        self.place = place
        self.found = found


class Followed(NamedTuple):
    """What is read of which stream, and whether its ranges are told with `ahead`."""

    schedule: Schedule
    fields: tuple[str, ...]
    planned: bool


class Fetcher(ABC):
    """Give the bytes of rows."""

    gap = REMOTE_GAP
    """A gap of at most so many bytes between two ranges told ahead is read, not skipped."""

    def __init__(self, index: Index, checksums: bool) -> None:
        self.index = index
        self.checksums = checksums

    @abstractmethod
    def fetch(self, rows: Rows, /, *, neighbours: bool = True) -> list[bytes]:
        """Return the bytes of each row. `neighbours` says that some rows may lie side by side."""

    def ahead(self, extents: Extents, /, *, fresh: bool = False) -> None:
        """Begin to fetch these `EXTENT`s in this order, without waiting. A `fresh` plan replaces
        the plan before.
        """
        return

    def waits(self, extents: Extents, /) -> bool:
        """Whether reading some of these `EXTENT`s would wait for a disk or a network."""
        return True

    def follow(self, stream: Followed, epoch: int, step: int, /) -> None:
        """Note which batch of a stream is read now, without waiting."""
        return

    def close(self) -> None:
        """Close open files, if there are any."""
        return


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
