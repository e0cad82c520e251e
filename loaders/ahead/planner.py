"""Prefetch the bytes of coming batches. The sampler can say which they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock

import numpy as np

from twinfeed.loaders.ahead.fetcher import Requester
from twinfeed.loaders.ahead.ranges import ALONE, Extents, extents_of, outside
from twinfeed.loaders.ahead.schedule import Schedule
from twinfeed.loaders.ahead.spans import Spans
from twinfeed.loaders.ahead.uses import every
from twinfeed.loaders.index.sizes import large
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.samplers import BatchStream

LIMIT = 1 << 26
"""Bytes that are asked for before their batches need them, unless a feed says how many."""

# Most ids that are drawn in one go.
_IDS = 1 << 13

# Ranges that are probed for whether reading waits: a few may be in memory by chance.
_LOOKED_AT = 16


class Planner:
    """Request early from a fetcher what the batches of a pass will read, in order.

    Each span of the stream (a block, or a single record) is requested when the stream enters it.
    About `limit` bytes are requested ahead of the batches that are read. The last batch may go
    beyond the limit.

    A pass that follows on the pass of the epoch before takes its planner over. From then on the
    next epoch is known, and the planner goes on over the end of the epoch. When the training ends,
    about `limit` bytes were read in vain. An evaluation has no next epoch.

    Without a limit, data that fit in memory are read ahead if the first batch of a pass would wait
    for the disk. With a limit of 0 nothing is requested: the fetcher only learns which batch is
    read.
    """

    def __init__(
        self,
        fetcher: Requester,
        fields: Sequence[str],
        schedule: Schedule,
        epoch: int,
        start: int,
        /,
        *,
        limit: int | None,
    ) -> None:
        self._fetcher, self._fields = fetcher, fields
        sampler = schedule.sampler
        self._schedule, self._sampler, self._steps = schedule, sampler, max(1, len(sampler))
        self._limit = LIMIT if limit is None else limit
        waits = limit is not None or fetcher.index.remote or large(fetcher.index)
        self._always, self._may_look = waits and limit != 0, not waits
        # Steps, counted over all epochs: the next to request, and how many at once.
        self._next, self._chunk = epoch * self._steps + start, 1
        whole = sampler.traits.reads_blocks or sampler.traits.max_cached is not None
        self._spans = Spans(schedule, self._next) if whole else None
        self._waiting: deque[tuple[int, int]] = deque()  # last step and bytes of what is ahead
        self._bytes = 0  # the bytes in `_waiting`
        self._lock = Lock()
        self.begin(epoch, start, on=False)

    def begin(self, epoch: int, start: int, /, *, on: bool) -> None:
        """Begin a pass, with what was requested before; with `on`, go on with the next epoch."""
        self._first = epoch * self._steps
        self.begun = self._first + start
        self._end = self._first + self._steps * (2 if on else 1)
        self._on = self._always
        self._looks = self._may_look
        self._reading: set[int] = set()  # the steps that are read now
        self._reached = self.begun - 1
        self._ended = False  # the last batch of the epoch was requested

    def leads_to(self, epoch: int, start: int, /) -> bool:
        """Whether a pass from here on follows on the pass that has ended."""
        follows = epoch * self._steps + start == self._first + self._steps
        return self._on and self._ended and follows

    @property
    def next(self) -> int:
        """The step, counted over all epochs, up to which everything was requested."""
        return self._next

    def reached(self, step: int, /) -> None:
        """Note that the batch of this step is read now, and request what comes next.

        Several threads may call. One thread plans.
        """
        at = self._first + step
        self._reading.add(at)
        self._reached = max(self._reached, at)
        self._fetcher.follow(self._schedule, self._fields, self._limit != 0, at)
        self._ended |= step == self._steps - 1
        if not (self._on or self._looks) or not self._lock.acquire(blocking=False):
            return
        try:
            self._plan(at)
        except Exception:
            # The error of a coming batch is raised when that batch is read.
            self._on = self._looks = False
        finally:
            self._lock.release()

    def passed(self, step: int, /) -> None:
        """Note that the batch of this step has been read. Batches are read about in order."""
        self._reading.discard(self._first + step)
        self._fetcher.passed(min([*self._reading, self._reached + 1]))

    def _plan(self, at: int) -> None:
        while self._waiting and self._waiting[0][0] <= at:
            self._bytes -= self._waiting.popleft()[1]
        for _ in range(2):  # not all at once: the batch of this step waits
            if self._next < self._end and (self._bytes < self._limit or self._next <= at + 1):
                epoch_ends = (self._next // self._steps + 1) * self._steps
                self._tell(min(self._next + self._chunk, epoch_ends))

    def _tell(self, stop: int) -> None:
        """Request the batches up to step `stop`, all of one epoch."""
        extents = self._extents(stop)
        if self._looks:
            some = extents[:: max(1, len(extents) // _LOOKED_AT)][:_LOOKED_AT]
            self._on, self._looks = self._fetcher.waits(some), False
        if not self._on:
            return
        self._fetcher.ahead(extents)
        if self._spans is not None and self._fetcher.index.remote:
            self._fetcher.left(self._spans.left(stop))
        size = int((extents["stop"] - extents["start"]).sum())
        self._waiting.append((stop - 1, size))
        self._bytes += size
        self._next = stop
        if 4 * size > self._limit:
            self._chunk = max(1, self._chunk // 2)
        elif 8 * size < self._limit:
            self._chunk = max(1, min(2 * self._chunk, _IDS // self._sampler.batch_size))

    def _extents(self, stop: int) -> Extents:
        """Return the ranges that these batches read, and no earlier batch reads."""
        if self._spans is None:
            records, steps = self._schedule.records(self._next, stop)
            return extents_ahead(self._fetcher, self._fields, records, ALONE, steps)
        entered = self._spans.entered(stop)
        first, end, step = np.array(entered, np.int64).reshape(-1, 3).T
        records, sizes = every(first, end - 1), end - first
        # An image is read once, and only remote ranges are kept for the samples that come later.
        held = self._fetcher.index.remote and self._sampler.traits.max_cached is None
        spans = np.repeat(first, sizes) if held else ALONE
        return extents_ahead(self._fetcher, self._fields, records, spans, np.repeat(step, sizes))


def extents_ahead(
    fetcher: Requester,
    fields: Sequence[str],
    records: Int64s,
    spans: Int64s | int,
    steps: Int64s,
    /,
) -> Extents:
    """Return the `EXTENT`s in which records lie.

    Records outside their shards are left out. Reading such a record says what is wrong.
    """
    rows = fetcher.index.rows(fields, records)
    held = rows["length"] > 0
    held[outside(fetcher.index, rows)] = False
    spans = np.broadcast_to(spans, len(records))
    spans, steps = (np.repeat(one, len(fields))[held] for one in (spans, steps))
    return extents_of(rows[held], spans, steps, fetcher.gap)


class Plans:
    """Keep the schedule of each stream of a loader, and the planner of the stream's last pass.

    `readahead` is the most bytes to read ahead; None leaves them to the planner, 0 reads nothing.
    """

    def __init__(self, readahead: int | None = None) -> None:
        self._readahead = readahead
        self._schedules: dict[BatchStream, Schedule] = {}
        self._planners: dict[BatchStream, Planner] = {}

    def schedule(self, sampler: BatchStream, /) -> Schedule:
        """Return the schedule of a stream."""
        return self._schedules.setdefault(sampler, Schedule(sampler))

    def begin(
        self,
        fetcher: Requester | None,
        fields: Sequence[str],
        sampler: BatchStream,
        epoch: int,
        start: int,
        /,
    ) -> Planner | None:
        """Begin a pass, and return its planner; None without a fetcher.

        A pass that follows on the pass before takes over the planner.
        """
        if fetcher is None:
            return None
        before = self._planners.get(sampler)
        if before is not None and before.leads_to(epoch, start):
            before.begin(epoch, start, on=not sampler.evaluation)
            return before
        limit = self._readahead if fields else 0
        planner = Planner(fetcher, fields, self.schedule(sampler), epoch, start, limit=limit)
        self._planners[sampler] = planner
        goes_on = before is not None and before.begun <= planner.begun <= before.next
        fetcher.begin(planner.begun, before.next if before and goes_on else None)
        return planner

    def clear(self) -> None:
        """Drop all plans."""
        self._schedules.clear()
        self._planners.clear()

    def __reduce__(self) -> tuple[type[Plans], tuple[int | None]]:
        """Pickle without what belongs to passes of this process."""
        return Plans, (self._readahead,)
