"""What fetches the bytes of rows, from a disk or a network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from twinfeed.loaders.index import Index
from twinfeed.loaders.reading.prefetch.buffer import RangeBuffer
from twinfeed.loaders.reading.prefetch.ranges import Rows
from twinfeed.loaders.reading.prefetch.read_plan import ReadPlan
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.support.checksum import crc32c
from twinfeed.samplers import BatchStream


class Fetcher(ABC):
    """Give the bytes of rows, which may be fetched before they are needed.

    Remote ranges are fetched into a `buffer`; local files need none, as the kernel has its own.
    """

    buffer: RangeBuffer | None = None

    def __init__(self, index: Index, checksums: bool) -> None:
        self.index = index
        self.checksums = checksums
        self._plans: dict[BatchStream, ReadPlan] = {}  # of the last pass of each stream

    @abstractmethod
    def fetch(self, rows: Rows, /, *, neighbours: bool = True) -> list[bytes]:
        """Return the bytes of each row. `neighbours` says that some rows may lie side by side."""

    @abstractmethod
    def before_read(self, plan: ReadPlan, step: int, /) -> None:
        """Begin what the plan has to do before the batch of a step is read, without waiting."""

    def after_read(self, plan: ReadPlan, step: int, /) -> None:
        """Release what no later batch of the plan needs."""
        first_needed = plan.leave(step)
        if self.buffer is not None:
            self.buffer.release_before(first_needed)

    def start_pass(
        self, schedule: Schedule, fields: Sequence[str], start: int, limit: int | None, /
    ) -> ReadPlan:
        """Return the plan of a pass: that of the pass before if the stream goes on, or a new one.

        `start` counts over all epochs. `limit` is in bytes: see `ReadPlan`.
        """
        before = self._plans.get(schedule.sampler)
        if before is not None and before.continues_at(start):
            return before
        plan = ReadPlan(self.index, fields, schedule, start, limit=limit if fields else 0)
        self._plans[schedule.sampler] = plan
        if self.buffer is not None:
            kept = before is not None and before.start <= start <= before.next
            self.buffer.start_plan(start, before.next if before and kept else None)
        return plan

    def close(self) -> None:
        """Close open files, and forget all plans."""
        self._plans.clear()


class Reading(AbstractContextManager[None]):
    """A block in which the batch of a step is read."""

    def __init__(self, fetcher: Fetcher, plan: ReadPlan, step: int) -> None:
        self._fetcher, self._plan, self._step = fetcher, plan, step

    def __enter__(self) -> None:
        self._fetcher.before_read(self._plan, self._step)

    def __exit__(self, *_: object) -> None:
        self._fetcher.after_read(self._plan, self._step)


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
