"""The planner asks for the bytes of coming batches early, which works since a stream is known."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from threading import Lock

import numpy as np

from twinfeed.loaders import _system
from twinfeed.loaders._checks import Int64s
from twinfeed.loaders.index._paths import is_url
from twinfeed.loaders.index.opened import Index
from twinfeed.loaders.reading.reader import Reader
from twinfeed.samplers import BatchStream

LIMIT = 1 << 26
"""Bytes that are asked for before their batches need them, unless a feed says how many."""

# Most ids that are drawn in one go.
_IDS = 1 << 13

# Steps of a planner's first sleep, and of its longest. Each sleep is twice as long as the last.
_NAP, _LONGEST = 32, 256

# A planner sleeps after so many looks in a row that find all pages in memory.
_WARM = 4

# Records that are looked at for the mean length of a record.
_SAMPLE = 1 << 10

# Fewest samples between two checks of which spans are still in use.
_GENERATION = 1 << 12


class Planner:
    """Tell a reader early what the batches of one pass will read, in order.

    Each span of the stream (a block, or a single record) is told when its first record comes. A
    span is told again only after a long pause, when its pages may be gone. About `limit` bytes are
    told of batches that nobody has asked for yet. The last batch told may go beyond the limit.

    Without a limit the planner sleeps while reading does not wait. Now and then the planner looks
    whether a few pages of a coming batch are in memory.
    """

    def __init__(
        self,
        reader: Reader,
        fields: Sequence[str],
        sampler: BatchStream,
        epoch: int,
        start: int,
        /,
        *,
        limit: int | None,
    ) -> None:
        self._reader, self._fields = reader, fields
        self._sampler, self._epoch = sampler, epoch
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
        self._kept = 0 if is_url(reader.index.root) else _system.memory() // 4
        self._next, self._chunk = start, 1  # steps: the next to tell, and how many at once
        self._waiting: deque[tuple[int, int]] = deque()  # last step and bytes of what was told
        self._bytes = 0  # the bytes in `_waiting`
        self._wake = start  # there is nothing to do before this step
        self._fresh_plan = True  # nothing was told yet
        self._lock = Lock()

    @property
    def told(self) -> int:
        """The step up to which everything was told."""
        return self._next

    def reached(self, step: int, /) -> None:
        """Note that the batch of this step is asked for, and tell what comes next.

        Several threads may call. One of them plans.
        """
        if step < self._wake or not self._lock.acquire(blocking=False):
            return
        try:
            self._plan(step)
        except Exception:
            # The error of a coming batch is raised when that batch is asked for.
            self._wake = sys.maxsize
        finally:
            self._lock.release()

    def _plan(self, step: int) -> None:
        while self._waiting and self._waiting[0][0] <= step:
            self._bytes -= self._waiting.popleft()[1]
        if self._asleep:
            self._wake, self._nap = step + self._nap, min(2 * self._nap, _LONGEST)
            self._next = max(self._next, step)
            records = np.unique(self._records(self._next, self._next + 1))
            self._asleep = not self._reader.waits(self._reader.extents(records, self._fields))
            if self._asleep:
                return
            self._nap = _NAP
        self._wake = step + 1
        for _ in range(2):  # not all at once: the batch of this step waits
            if self._next >= len(self._sampler):
                self._wake = sys.maxsize
                return
            if self._bytes < self._limit or self._next <= step + 1:
                self._tell(min(self._next + self._chunk, len(self._sampler)))
            else:
                self._wake = self._waiting[0][0]

    def _tell(self, stop: int) -> None:
        """Tell the batches up to step `stop`."""
        extents = self._extents(self._next, stop)
        if self._asks and len(extents):
            self._warm = 0 if self._reader.waits(extents) else self._warm + 1
            self._asleep = self._warm >= _WARM
        extents["step"] = self._epoch * len(self._sampler) + stop - 1
        self._reader.ahead(extents, fresh=self._fresh_plan)
        self._fresh_plan = False
        told = int((extents["stop"] - extents["start"]).sum())
        self._waiting.append((stop - 1, told))
        self._bytes += told
        self._fresh += told
        self._next = stop
        if 4 * told > self._limit:
            self._chunk = max(1, self._chunk // 2)
        elif 8 * told < self._limit:
            self._chunk = max(1, min(2 * self._chunk, _IDS // self._sampler.batch_size))

    def _extents(self, start: int, stop: int) -> np.ndarray:
        """Return the ranges of files that these batches read, and earlier batches do not."""
        records = self._records(start, stop)
        if self._once:
            records, counts = self._entered(records), None
        else:
            records, counts = np.unique(records, return_counts=True)
        return self._reader.extents(records, self._fields, uses=counts)

    def _records(self, start: int, stop: int) -> Int64s:
        """Return the records of these batches, end to end."""
        ids = np.concatenate(self._sampler.batches(self._epoch, start, stop))
        return self._sampler.records(ids[ids >= 0])

    def _entered(self, records: Int64s) -> Int64s:
        """Return the records of all spans that begin with these records."""
        firsts, stops = self._sampler.spans(records)
        firsts, where = np.unique(firsts, return_index=True)
        spans = dict(zip(firsts.tolist(), stops[where].tolist(), strict=True))
        new = [first for first in spans if first not in self._recent | self._older]
        self._recent.update(spans)
        self._samples += len(records)
        lately = max(_GENERATION, 4 * len(self._recent))
        if self._samples >= lately and self._fresh >= self._kept:
            self._recent, self._older, self._samples, self._fresh = set(), self._recent, 0, 0
        parts = [np.arange(first, spans[first]) for first in new]
        return np.concatenate([np.zeros(0, np.int64), *parts])


def large(index: Index, /) -> bool:
    """Whether the shards take more than half of the memory that this process may use."""
    stored = int(index.shards["bytes"].sum())
    if index.container == "files":
        stored = int(len(index) * record_bytes(index))
    return 2 * stored > _system.memory()


def record_bytes(index: Index, fields: Sequence[str] | None = None, /) -> float:
    """Return the mean bytes of a record's fields (default: all), over evenly spread records."""
    ids = np.unique(np.linspace(0, len(index) - 1, min(len(index), _SAMPLE)).astype(np.int64))
    lengths = index.rows(list(index.fields if fields is None else fields), ids)["length"]
    return float(lengths.clip(0).sum() / max(1, len(ids)))
