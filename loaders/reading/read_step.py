"""Prefetching for a reader: the plan of a pass, and the context in which a step is read."""

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
    """Return the plan of what to prefetch, from step `start` to the end of its epoch.

    If the previous plan ends where this pass starts, it is continued.

    Args:
        reader: of the records. For a source that is no index, there is no plan: return None.
        schedule: the batches of ids.
        fields: the names of the fields to read.
        start: the first step, counted over all epochs.
        readahead: the bytes to prefetch, or None for the default.
    """
    if not isinstance(reader, Reader):
        return None
    previous = reader._plans.get(schedule)
    if previous is not None and previous.continues_at(start):
        return previous
    plan = ReadPlan(reader.index, fields, schedule, start, limit=readahead if fields else 0)
    reader._plans[schedule] = plan
    files = reader._files
    if isinstance(files, RemoteFiles):
        overlaps = previous is not None and previous.start <= start <= previous.next
        files.buffer.start_plan(start, previous.next if previous and overlaps else None)
    return plan


class ReadStep(AbstractContextManager[None]):
    """Context manager for reading the batch of a step, which prefetches for coming batches.

    On entering, the ranges of coming batches are requested, without waiting. On leaving, also by an
    exception, the bytes that no later batch needs are released. Without a plan, nothing happens.
    The step is counted over all epochs.
    """

    def __init__(self, reader: Reads, step: int, plan: ReadPlan | None) -> None:
        self._reader, self._step, self._plan = reader, step, plan

    def __enter__(self) -> None:
        """Request the ranges that the plan has next, unless another thread is doing so."""
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
        """Release the bytes that only this step and earlier ones have used."""
        if self._plan is None:
            return
        first_needed = self._plan.leave(self._step)
        if isinstance(self._files, RemoteFiles):
            self._files.buffer.release_before(first_needed)
