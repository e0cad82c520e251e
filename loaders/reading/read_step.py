"""Passes over a reader: the plan of a pass, and the blocks in which its steps are read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from twinfeed.loaders.reading.prefetch.read_plan import ReadPlan
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.reading.remote import RemoteFiles
from twinfeed.loaders.reading.source import Reads


def start_pass(
    reader: Reads, schedule: Schedule, fields: Sequence[str], start: int, readahead: int | None, /
) -> ReadPlan | None:
    """Return the plan of a pass: that of the pass before if the stream goes on, or a new one.

    `start` counts over all epochs. `readahead` is in bytes: see `ReadPlan`. A source of one's own
    has no plan.
    """
    if not isinstance(reader, Reader):
        return None
    before = reader._plans.get(schedule.sampler)
    if before is not None and before.continues_at(start):
        return before
    plan = ReadPlan(reader.index, fields, schedule, start, limit=readahead if fields else 0)
    reader._plans[schedule.sampler] = plan
    files = reader._files
    if isinstance(files, RemoteFiles):
        overlaps = before is not None and before.start <= start <= before.next
        files.buffer.start_plan(start, before.next if before and overlaps else None)
    return plan


class ReadStep(AbstractContextManager[None]):
    """A block in which the batch of a step is read, counted over all epochs.

    Where the block begins, the ranges of coming batches are requested, without waiting. Where it
    ends, by an error too, the bytes that no later batch needs are released. Without a plan, nothing
    happens.
    """

    def __init__(self, reader: Reads, step: int, plan: ReadPlan | None) -> None:
        self._reader, self._step, self._plan = reader, step, plan

    def __enter__(self) -> None:
        plan, reader = self._plan, self._reader
        if plan is None:
            return
        assert isinstance(reader, Reader)
        self._files = files = reader._files
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
                    files.apply(plan, event)
        except Exception:  # the error of a coming batch is raised when that batch is read
            plan.enabled = False
        finally:
            plan.applying.release()

    def __exit__(self, *_: object) -> None:
        if self._plan is None:
            return
        first_needed = self._plan.leave(self._step)
        if isinstance(self._files, RemoteFiles):
            self._files.buffer.release_before(first_needed)
