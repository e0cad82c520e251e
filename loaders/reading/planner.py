"""The planner asks for the bytes of coming batches early, which works since a stream is known."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock

import numpy as np

from twinfeed.loaders.index.sizes import large
from twinfeed.loaders.reading.fetcher import Followed
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.reading.schedule import Schedule
from twinfeed.loaders.reading.source import Reads
from twinfeed.loaders.support import system
from twinfeed.loaders.support.checks import Int64s
from twinfeed.samplers import BatchStream

LIMIT = 1 << 26
"""Bytes that are asked for before their batches need them, unless a feed says how many."""

# Most ids that are drawn in one go.
_IDS = 1 << 13

# Steps of a planner's first sleep, and of its longest. Each sleep is twice as long as the last.
_NAP, _LONGEST = 32, 256

# A planner sleeps after so many looks in a row that find all pages in memory.
_WARM = 4


# Fewest samples between two checks of which spans are still in use.
_GENERATION = 1 << 12


class Planner:
    """Tell a reader early what the batches of a pass will read, in order.

    Each span of the stream (a block, or a single record) is told when its first record comes. A
    span is told again only after a long pause, when its pages may be gone. About `limit` bytes are
    told of batches that nobody has asked for yet. The last batch told may go beyond the limit.

    A pass that follows on the pass of the epoch before takes its planner over. From then on the
    next epoch is known, and the planner goes on over the end of the epoch. When the training ends,
    about `limit` bytes were read in vain. An evaluation has no next epoch.

    Without a limit the planner sleeps while reading does not wait. Now and then the planner looks
    whether a few pages of a coming batch are in memory.
    """

    def __init__(
        self,
        reader: Reader,
        fields: Sequence[str],
        schedule: Schedule,
        epoch: int,
        start: int,
        /,
        *,
        limit: int | None,
    ) -> None:
        self._reader, self._fields = reader, fields
        sampler = schedule.sampler
        self._schedule, self._sampler, self._steps = schedule, sampler, max(1, len(sampler))
        self._limit = limit or LIMIT
        self._asks = limit is None  # look whether pages are cold
        self._asleep = self._asks and not large(reader.index)
        self._nap = _NAP
        self._warm = 0  # looks in a row that found every page in memory
        self._once = sampler.in_blocks or sampler.live is not None
        self._recent: set[int] = set()  # the spans in use, by their first record
        self._older: set[int] = set()
        self._samples = self._fresh = 0  # samples and bytes since the last generation began
        # So many bytes told last are still in the page cache. Remote ranges are dropped when used.
        self._kept = 0 if reader.index.remote else system.memory() // 4
        # Steps, counted over all epochs: the next to tell, and how many at once.
        self._next, self._chunk = epoch * self._steps + start, 1
        self._told_epoch = epoch
        self._waiting: deque[tuple[int, int]] = deque()  # last step and bytes of what was told
        self._bytes = 0  # the bytes in `_waiting`
        self._fresh_plan = True  # nothing was told yet
        self._lock = Lock()
        self.begin(epoch, start, on=False)

    def begin(self, epoch: int, start: int, /, *, on: bool) -> None:
        """Begin a pass, with what was told before; with `on`, tell the next epoch too."""
        self._first = epoch * self._steps
        self._end = self._first + self._steps * (2 if on else 1)
        self._wake = self._first + start  # there is nothing to do before this step
        self._nap = _NAP
        self._ended = False  # the last batch of the epoch was asked for

    def leads_to(self, epoch: int, start: int, /) -> bool:
        """Whether a pass from here on follows on the pass that has ended."""
        return self._ended and epoch * self._steps + start == self._first + self._steps

    @property
    def told(self) -> int:
        """The step of this epoch up to which everything was told."""
        return min(self._next - self._first, self._steps)

    def reached(self, step: int, /) -> None:
        """Note that the batch of this step is asked for, and tell what comes next.

        Several threads may call. One of them plans.
        """
        at = self._first + step
        if step == self._steps - 1:
            self._ended = True
        if at < self._wake or not self._lock.acquire(blocking=False):
            return
        try:
            self._plan(at)
        except Exception:
            # The error of a coming batch is raised when that batch is asked for.
            self._wake = sys.maxsize
        finally:
            self._lock.release()

    def _plan(self, at: int) -> None:
        while self._waiting and self._waiting[0][0] <= at:
            self._bytes -= self._waiting.popleft()[1]
        if self._asleep:
            self._wake, self._nap = at + self._nap, min(2 * self._nap, _LONGEST)
            self._next = max(self._next, at)
            records = np.unique(self._records(self._next, self._next + 1))
            self._asleep = not self._reader._waits(self._reader._extents(records, self._fields))
            if self._asleep:
                return
            self._nap = _NAP
        self._wake = at + 1
        for _ in range(2):  # not all at once: the batch of this step waits
            if self._next >= self._end:
                self._wake = sys.maxsize
                return
            if self._bytes < self._limit or self._next <= at + 1:
                epoch_ends = (self._next // self._steps + 1) * self._steps
                self._tell(min(self._next + self._chunk, epoch_ends))
            else:
                self._wake = self._waiting[0][0]

    def _tell(self, stop: int) -> None:
        """Tell the batches up to step `stop`, all of one epoch."""
        extents = self._extents(self._next, stop)
        if self._asks and len(extents):
            self._warm = 0 if self._reader._waits(extents) else self._warm + 1
            self._asleep = self._warm >= _WARM
        extents["step"] = stop - 1
        self._reader._ahead(extents, fresh=self._fresh_plan)
        self._fresh_plan = False
        size = int((extents["stop"] - extents["start"]).sum())
        self._waiting.append((stop - 1, size))
        self._bytes += size
        self._fresh += size
        self._next = stop
        if 4 * size > self._limit:
            self._chunk = max(1, self._chunk // 2)
        elif 8 * size < self._limit:
            self._chunk = max(1, min(2 * self._chunk, _IDS // self._sampler.batch_size))

    def _extents(self, start: int, stop: int) -> np.ndarray:
        """Return the ranges of files that these batches read, and earlier batches do not."""
        records = self._records(start, stop)
        if self._once:
            records, counts = self._entered(records, start // self._steps), None
        else:
            records, counts = np.unique(records, return_counts=True)
        return self._reader._extents(records, self._fields, uses=counts)

    def _records(self, start: int, stop: int) -> Int64s:
        """Return the records of these batches, end to end."""
        epoch, first = divmod(start, self._steps)
        ids = np.concatenate(self._schedule.batches(epoch, first, first + stop - start))
        return self._sampler.records(ids[ids >= 0])

    def _entered(self, records: Int64s, epoch: int) -> Int64s:
        """Return the records of all spans of an epoch that begin with these records."""
        if epoch != self._told_epoch:  # a span is read again in each epoch
            self._told_epoch, self._recent, self._older = epoch, set(), set()
        firsts, stops = self._sampler.spans(records, epoch)
        firsts, where = np.unique(firsts, return_index=True)
        spans = dict(zip(firsts.tolist(), stops[where].tolist(), strict=True))
        # No union of the two: of 10^5 shards, one for each span takes minutes.
        new = [each for each in spans if each not in self._recent and each not in self._older]
        self._recent.update(spans)
        self._samples += len(records)
        lately = max(_GENERATION, 4 * len(self._recent))
        if self._samples >= lately and self._fresh >= self._kept:
            self._recent, self._older, self._samples, self._fresh = set(), self._recent, 0, 0
        parts = [np.arange(first, spans[first]) for first in new]
        return np.concatenate([np.zeros(0, np.int64), *parts])


class Reached:
    """Tell a reader which batch of a stream is made now, and what the next batches will read."""

    def __init__(self, reader: Reader, stream: Followed, planner: Planner | None) -> None:
        self._reader, self._stream, self._planner = reader, stream, planner

    def __call__(self, epoch: int, step: int, /) -> None:
        self._reader._follow(self._stream, epoch, step)
        if self._planner is not None:
            self._planner.reached(step)


def _nothing(epoch: int, step: int) -> None:
    """Tell nobody which batch is made now."""


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
        reader: Reads,
        fields: Sequence[str],
        sampler: BatchStream,
        epoch: int,
        start: int,
        /,
    ) -> Callable[[int, int], None]:
        """Begin a pass, and return what is to be called before each of its batches is made.

        A pass that follows on the pass before takes over the planner. Only a `Reader` knows which
        bytes a batch needs.
        """
        if not isinstance(reader, Reader):
            return _nothing
        schedule, planner = self.schedule(sampler), None
        if self._readahead != 0 and fields:
            planner = self._planners.get(sampler)
            if planner is not None and planner.leads_to(epoch, start):
                planner.begin(epoch, start, on=True)
            else:
                planner = Planner(reader, fields, schedule, epoch, start, limit=self._readahead)
                self._planners[sampler] = planner
        planned = planner is not None
        return Reached(reader, Followed(schedule, tuple(fields), planned), planner)

    def clear(self) -> None:
        """Forget all."""
        self._schedules.clear()
        self._planners.clear()

    def __reduce__(self) -> tuple[type[Plans], tuple[int | None]]:
        """Pickle without what belongs to passes of this process."""
        return Plans, (self._readahead,)
