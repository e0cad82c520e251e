"""What fetches the bytes of rows, from a disk or a network, and ahead of the batches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from twinfeed.loaders.index import Index
from twinfeed.loaders.reading.local import LocalFiles
from twinfeed.loaders.reading.prefetch.ranges import Rows
from twinfeed.loaders.reading.prefetch.read_plan import ReadPlan
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.reading.remote import RemoteFiles
from twinfeed.samplers import BatchStream


class Fetcher:
    """What a reader has in one process: its open files or buffered ranges, and its plans.

    Remote ranges are fetched into a buffer ahead of their batches. For local files the kernel has
    such a buffer, and gets advice.
    """

    def __init__(self, index: Index, checksums: bool, max_open_files: int | None) -> None:
        self.index = index
        self.files: RemoteFiles | LocalFiles
        if index.remote:
            self.files = RemoteFiles(index, checksums)
        else:
            self.files = LocalFiles(index, checksums, max_open_files)
        self.plans: dict[BatchStream, ReadPlan] = {}  # of the last pass of each stream

    def fetch(self, rows: Rows, /, *, neighbours: bool = True) -> list[bytes]:
        """Return the bytes of each row. `neighbours` says that some rows may lie side by side."""
        if isinstance(self.files, RemoteFiles):
            return self.files.fetch(rows)
        return self.files.read(rows, neighbours=neighbours)

    def start_pass(
        self, schedule: Schedule, fields: Sequence[str], start: int, limit: int | None, /
    ) -> ReadPlan:
        """Return the plan of a pass: that of the pass before if the stream goes on, or a new one.

        `start` counts over all epochs. `limit` is in bytes: see `ReadPlan`.
        """
        before = self.plans.get(schedule.sampler)
        if before is not None and before.continues_at(start):
            return before
        plan = ReadPlan(self.index, fields, schedule, start, limit=limit if fields else 0)
        self.plans[schedule.sampler] = plan
        if isinstance(self.files, RemoteFiles):
            kept = before is not None and before.start <= start <= before.next
            self.files.buffer.start_plan(start, before.next if before and kept else None)
        return plan

    def close(self) -> None:
        """Close open files, drop buffered ranges, and forget all plans."""
        self.plans.clear()
        self.files.close()


class Reading(AbstractContextManager[None]):
    """A block in which the batch of a step is read.

    Where the block begins, the ranges of coming batches are requested, without waiting. Where it
    ends, by an error too, the bytes that no later batch needs are released.
    """

    def __init__(self, fetcher: Fetcher, plan: ReadPlan, step: int) -> None:
        self._files, self._plan, self._step = fetcher.files, plan, step

    def __enter__(self) -> None:
        files, plan = self._files, self._plan
        if isinstance(files, RemoteFiles) and files.cache is not None:
            files.cache.advance(plan, self._step)
        plan.enter(self._step)
        if not plan.enabled or not plan.applying.acquire(blocking=False):
            return
        try:
            for event in plan.until(self._step):
                if isinstance(files, RemoteFiles):
                    files.buffer.apply(event)
                else:
                    files.advice.apply(files.opened, plan, event)
        except Exception:  # the error of a coming batch is raised when that batch is read
            plan.enabled = False
        finally:
            plan.applying.release()

    def __exit__(self, *_: object) -> None:
        first_needed = self._plan.leave(self._step)
        if isinstance(self._files, RemoteFiles):
            self._files.buffer.release_before(first_needed)
