"""Prefetching for a reader: the plan of a pass, and the context in which a step is read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from twinfeed.loaders.reading.prefetch.read_plan import ReadPlan
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.reading.remote import RemoteFiles
from twinfeed.loaders.reading.source import Reads


def plan_pass(
    reader: Reads, schedule: Schedule, fields: Sequence[str], start: int, readahead: int | None, /
) -> ReadPlan | None:
    """Return the plan of what a pass prefetches: from a global step to the end of its epoch.

    What the plan of the previous pass over the same batches has prefetched is used, if this pass
    can need it. For example, the previous pass had 100 steps, from 0 to 99:

    - It came to its end, and this pass starts at step 100: the plan itself is continued.
    - It was broken off when the steps before 40 were prefetched, and this pass starts at step 30:
      a new plan is made, and what was prefetched is kept until step 40.
    - It was broken off so, and this pass starts at step 70: what was prefetched is dropped.

    Args:
        reader: reads the records. Only the byte ranges of an index are known, so for the reader of
            any other source there is no plan: return None.
        schedule: the batches of ids.
        fields: the names of the fields to read.
        start: the first global step.
        readahead: the bytes to prefetch, or None for the default.
    """
    if not isinstance(reader, Reader):
        return None
    previous = reader._plans.get(schedule)  # the plan of the previous pass over these batches
    if previous is not None and previous.continue_at(start):
        return previous
    # Without fields to read, the limit of what is prefetched is 0.
    plan = ReadPlan(reader.index, fields, schedule, start, limit=readahead if fields else 0)
    reader._plans[schedule] = plan
    files = reader._files
    if isinstance(files, RemoteFiles):
        previous_end = None  # for `start_plan`: drop what was prefetched
        if previous is not None and previous.start <= start <= previous.next_step:
            previous_end = previous.next_step  # 40 in the example: keep it until this step
        files.buffer.start_plan(previous_end)
    return plan


class ReadStep(AbstractContextManager[None]):
    """Context manager in which the batch of a step is read, and which prefetches coming batches.

    On entering, the ranges of coming batches are requested, without waiting. On leaving, also by an
    exception, the bytes that no later batch needs are released. Without a plan (None), nothing
    happens.
    """

    def __init__(self, reader: Reads, global_step: int, plan: ReadPlan | None) -> None:
        self._reader, self._global_step, self._plan = reader, global_step, plan

    def __enter__(self) -> None:
        """Request the ranges that the plan has next, unless another thread is doing so."""
        plan, reader = self._plan, self._reader
        if plan is None:
            return
        assert isinstance(reader, Reader)
        self._files = files = reader._files
        plan.step_started(self._global_step)
        if not plan.enabled or not plan.events_lock.acquire(blocking=False):
            return
        try:
            for event in plan.next_events(self._global_step):
                if isinstance(files, RemoteFiles):
                    files.buffer.apply(event)
                else:
                    files.apply(plan, event)
        except Exception:  # the error of a coming batch is raised when that batch is read
            plan.enabled = False
        finally:
            plan.events_lock.release()

    def __exit__(self, *_: object) -> None:
        """Release the bytes that only this step and earlier ones have used."""
        if self._plan is None:
            return
        first_needed = self._plan.step_finished(self._global_step)
        if isinstance(self._files, RemoteFiles):
            self._files.buffer.release_before(first_needed)
