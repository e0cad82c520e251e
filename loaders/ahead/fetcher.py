"""What requests ranges and gives the bytes of rows, from a disk or a network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from twinfeed.loaders.ahead.ranges import Extents, Rows, gap_of
from twinfeed.loaders.ahead.schedule import Schedule
from twinfeed.loaders.index import Index
from twinfeed.loaders.support.checksum import crc32c


class Requester:
    """Hear from a planner what coming batches need."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.gap = gap_of(index)

    def ahead(self, extents: Extents, /) -> None:
        """Begin to fetch these `EXTENT`s in this order, without waiting."""
        return

    def left(self, spans: Sequence[tuple[int, int]], /) -> None:
        """Note the step that needs each of these spans last; a span's first record names it."""
        return

    def passed(self, step: int, /) -> None:
        """Note that all batches before this step have been read."""
        return

    def begin(self, step: int, planned: int | None, /) -> None:
        """Begin a plan at this step. The plan before has ended, at step `planned`.

        With None, all that was fetched for the plan before is dropped.
        """
        return

    def waits(self, extents: Extents, /) -> bool:
        """Whether reading some of these `EXTENT`s would wait for a disk or a network."""
        return True

    def follow(
        self, schedule: Schedule, fields: Sequence[str], planned: bool, step: int, /
    ) -> None:
        """Note which batch is read now, without waiting. `planned`: a planner requested it."""
        return


class Fetcher(Requester, ABC):
    """Give the bytes of rows, which may be requested before they are needed."""

    def __init__(self, index: Index, checksums: bool) -> None:
        super().__init__(index)
        self.checksums = checksums

    @abstractmethod
    def fetch(self, rows: Rows, /, *, neighbours: bool = True) -> list[bytes]:
        """Return the bytes of each row. `neighbours` says that some rows may lie side by side."""

    def close(self) -> None:
        """Close open files, if there are any."""
        return


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
