"""Plan the reading of a stream: which ranges to fetch, and when to release them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.index import Index
from twinfeed.loaders.index.sizes import exceeds_memory
from twinfeed.loaders.reading.prefetch.block_uses import BlockUses, prefetches_whole_blocks
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.samplers.stream import steps_per_draw

Rows = npt.NDArray[Any]
"""Rows of an index: the offset, length, file and checksum of each."""

FileRanges = npt.NDArray[Any]
"""An array of file ranges, whose type is `FILE_RANGE`."""

FILE_RANGE = np.dtype(
    [("file", "i4"), ("start", "i8"), ("stop", "i8"), ("block", "i8"), ("step", "i8")]
)
"""The bytes [start, stop) of a file, which the batch of the global step `step` reads.

`block` is the first record of the block of records that the bytes belong to: later batches may read
them too, until the last use of the block. With `NO_BLOCK`, no later batch reads them.
"""

NO_BLOCK = -1

MAX_RANGE_BYTES = 1 << 23
"""The largest range that is read by one call."""

LOCAL_GAP = 1 << 16
"""Two rows of a local file are read as one range if at most this many bytes lie between them."""

_MIN_GAP, _MAX_GAP = 1 << 12, 1 << 20
"""The same for shards at a URL, where the gap is the mean size of a record within these limits."""

LIMIT = 1 << 26
"""The default of `limit`: bytes that are fetched before their batches need them."""

_MIN_REQUEST_COST = 1 << 16
"""By default, a request counts as at least so many bytes: at most 1,024 ranges are fetched ahead.

Threads that answer thousands of small requests take the processor from the loop that waits for the
next batch: with 6,400 ranges of 10 KB ahead, a batch took 1.3 s where it now takes 0.08 s.
"""


class Fetch(NamedTuple):
    """The event: fetch these `FILE_RANGE`s, which no earlier step needs."""

    ranges: FileRanges


class Release(NamedTuple):
    """The event: release the ranges of these blocks of records, each after its last use.

    `last_steps` has a pair for each block: (its first record, the last step that uses it).
    """

    last_steps: Sequence[tuple[int, int]]


class PlannedFiles(Protocol):
    """The files of a reader, which fetch and release the ranges of a plan.

    Files that keep no ranges inherit `start_plan` and `release_before`, which do nothing.
    """

    def start_plan(self, previous_end: int | None, /) -> None:
        """Begin a new plan; keep ranges of the plan before until step `previous_end`."""
        return

    def release_before(self, step: int, /) -> None:
        """Release the ranges that only steps before `step` use."""
        return

    def are_cached(self, ranges: FileRanges, /) -> bool:
        """Return whether the ranges are in the page cache already, as far as a few of them say."""

    def apply(self, event: Fetch | Release, /) -> None:
        """Fetch the ranges of a `Fetch`, without waiting, or note those of a `Release`."""


class ReadPlan:
    """Plan which ranges a stream reads: events to fetch and release ranges, ahead of each batch.

    The plan itself reads nothing. Its `files` fetch the ranges of the `next_events` where a `step`
    begins. A block of records that are read around the same time is fetched as a whole before
    its first use; other records are fetched one by one. About `limit` bytes are fetched ahead of
    the batches that are read; the last batch may exceed the limit. `limit=0` disables the plan. If
    no limit is given and the data fit in memory, the plan starts with `check_page_cache`: it is
    disabled if the ranges of its first event are in the page cache already.

    Consecutive epochs share a plan (`continue_at`), so that prefetching continues over the end of
    an epoch. After the last epoch, about `limit` bytes have been read that nobody uses. An
    evaluation has no next epoch. Steps are global steps.

    Several threads may read batches of the plan, each in a `step`. One thread at a time takes
    events: it has the lock `events_lock`.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> from twinfeed.samplers import BatchSampler, SequentialSampler
    >>> index = pack([{"x": bytes(1000)} for _ in range(4)], mkdtemp())["data"]
    >>> stream = BatchSampler(SequentialSampler(4), batch_size=2)
    >>> plan = ReadPlan(index, ["x"], Schedule(stream), 0, limit=1)
    >>> [len(event.ranges) for event in plan.next_events(0)], plan.next_step
    ([1, 1], 2)
    """

    def __init__(
        self,
        index: Index,
        fields: Sequence[str],
        schedule: Schedule,
        start: int,
        limit: int | None,
        files: PlannedFiles | None = None,
    ) -> None:
        self.schedule, self.fields, self.limit = schedule, fields, LIMIT if limit is None else limit
        self._index, self._gap, self._files = index, gap_of(index), files
        self._sampler, self._epoch_steps = schedule.sampler, max(1, len(schedule.sampler))
        self._may_be_cached = limit is None and not index.remote and not exceeds_memory(index)
        self._min_request_cost = _MIN_REQUEST_COST if limit is None and index.remote else 0
        self._block_uses = (
            BlockUses(schedule, start) if prefetches_whole_blocks(self._sampler) else None
        )
        self._is_remote = index.remote
        # Only ranges of remote data are buffered, so only they are released. A sampler that reuses
        # decoded images (`max_cached`) reads the bytes of an image once: no block stays open.
        self._releases_blocks = self._is_remote and self._sampler.traits.max_cached is None
        self.next_step, self._steps_per_fetch = start, 1  # the next step to fetch
        # Of each fetch whose batches were not all read: its last step, and its bytes (or cost).
        self._fetched: deque[tuple[int, int]] = deque()
        self._unread_bytes = 0  # of all fetches in `_fetched`
        self._lock, self.events_lock = Lock(), Lock()
        self._steps_in_progress: set[int] = set()  # the steps that threads are reading now
        self._last_started = start - 1  # no step has started
        self._start_pass(start, epochs=1)

    def _start_pass(self, start: int, *, epochs: int) -> None:
        """Set the plan to a pass from step `start` to the end of that epoch.

        With `epochs=2`, near its end the first batches of the next epoch are fetched.
        """
        self.start = start
        self._epoch_end = (start // self._epoch_steps + 1) * self._epoch_steps
        # The plan fetches the steps before `_end`.
        self._end = self._epoch_end + (epochs - 1) * self._epoch_steps
        self.enabled = self.limit > 0  # the bytes to fetch ahead; a limit of 0 disables the plan
        # Local data that fit in memory may be in the page cache already, and prefetching would only
        # cost time. If True, the first `Fetch` is looked up in the page cache: if its ranges are
        # there, the plan is disabled.
        self.check_page_cache = self._may_be_cached

    def continue_at(self, start: int, /, *, running: bool = False) -> bool:
        """Continue the plan with the pass over the next epoch, if that begins at step `start`.

        Ranges that were prefetched beyond the end of the epoch are then used. This needs a plan in
        use, and a previous pass that has read its epoch to the end, or is `running` on. A plan is
        not in use if it was disabled, or if `check_page_cache` is still set, so that it has had no
        event yet.

        Returns:
            Whether the plan continues. If not, the pass that starts here needs a new plan.
        """
        has_ended = running or self._last_started == self._epoch_end - 1
        ended_here = has_ended and start == self._epoch_end
        if not self.enabled or self.check_page_cache or not ended_here:
            return False
        # Epochs follow one another, so fetch batches of the epoch after this one too.
        self._start_pass(start, epochs=1 if self._sampler.evaluation else 2)
        return True

    @property
    def active(self) -> bool:
        """Whether a batch must be read in a `step`: something is prefetched, or kept."""
        return self.enabled or self._is_remote

    def step(self, step: int, /) -> AbstractContextManager[None]:
        """Request the ranges of coming batches; return the context in which a step's are read.

        Nothing waits, and nothing is requested while another thread does so. Where the context
        ends, also by an exception, the bytes are released that only this step and earlier ones have
        used. Steps are global steps.
        """
        assert self._files is not None
        with self._lock:
            self._steps_in_progress.add(step)
            self._last_started = max(self._last_started, step)
        if self.enabled and self.events_lock.acquire(blocking=False):
            try:
                for event in self.next_events(step):
                    if self.check_page_cache and isinstance(event, Fetch):
                        self.check_page_cache = False
                        self.enabled = not self._files.are_cached(event.ranges)
                    if self.enabled:
                        self._files.apply(event)
            except Exception:  # the error of a coming batch is raised when that batch is read
                self.enabled = False
            finally:
                self.events_lock.release()
        return self._release_after(step)

    @contextmanager
    def _release_after(self, step: int) -> Iterator[None]:
        """Release, after the `with` block, the ranges whose last use is before the next step."""
        assert self._files is not None
        try:
            yield
        finally:
            with self._lock:
                self._steps_in_progress.discard(step)
                # Another thread may still read an earlier step.
                first_unread = min([*self._steps_in_progress, self._last_started + 1])
            if self._is_remote:  # only ranges of remote data are buffered
                self._files.release_before(first_unread)

    def next_events(self, step: int, /) -> Iterator[Fetch | Release]:
        """Yield the events that the caller applies before it reads the batch of `step`.

        A `Fetch` event has file ranges to prefetch for coming steps; a `Release` event says after
        which step they can be dropped. Steps are fetched ahead until `limit` bytes wait to be read,
        and at least the next step is. For example, with a limit of 100 bytes and steps of 40 bytes,
        three steps are fetched ahead (120 bytes). When one of them is read, 80 bytes wait, and
        another step is fetched.
        """
        # `_fetched` has (last step, bytes) of each fetch. Drop the fetches whose steps were read.
        while self._fetched and self._fetched[0][0] <= step:
            _, fetched_bytes = self._fetched.popleft()
            self._unread_bytes -= fetched_bytes
        for _ in range(2):  # at most two fetches, so that the caller soon reads its batch
            is_below_limit = self._unread_bytes < self.limit
            is_read_next = self.next_step <= step + 1
            is_planned = self.enabled and self.next_step < self._end
            if is_planned and (is_below_limit or is_read_next):
                epoch_end = (self.next_step // self._epoch_steps + 1) * self._epoch_steps
                stop = min(self.next_step + self._steps_per_fetch, epoch_end)
                yield from self._fetch_until(stop)  # it sets `next_step` to `stop`

    def _fetch_until(self, stop: int) -> Iterator[Fetch | Release]:
        """Yield a `Fetch` of what the steps [self.next_step, stop) of an epoch read; with blocks
        also a `Release`, with the last steps that are known by now. Advances `next_step`.
        """
        ranges = self._ranges_to_fetch(stop)
        yield Fetch(ranges)
        if self._block_uses is not None and self._releases_blocks:
            yield Release(self._block_uses.last_steps_before(stop))
        sizes = ranges["stop"] - ranges["start"]
        fetched_bytes = int(np.maximum(sizes, self._min_request_cost).sum())
        self._fetched.append((stop - 1, fetched_bytes))
        self._unread_bytes += fetched_bytes
        self.next_step = stop
        # Fetch more steps or fewer next time: a fetch should have an eighth to a quarter of the
        # bytes that may be fetched ahead (`limit`).
        if 4 * fetched_bytes > self.limit:
            self._steps_per_fetch = max(1, self._steps_per_fetch // 2)
        elif 8 * fetched_bytes < self.limit:
            max_steps = steps_per_draw(self._sampler.batch_size)
            self._steps_per_fetch = min(2 * self._steps_per_fetch, max_steps)

    def _ranges_to_fetch(self, stop: int) -> FileRanges:
        """Return the ranges to fetch for the steps [self.next_step, stop).

        A block is fetched as a whole for its first step: if step 7 is the first in the block [100,
        110), all its ten records.
        """
        blocks: Int64s | int = NO_BLOCK  # each range is only kept until its step is over
        if self._block_uses is None:
            records, steps = self.schedule.records(self.next_step, stop)
        else:
            records, steps, first_records = self._block_uses.new_records_before(stop)
            # To keep each range until the last use of its block, name the block by its first
            # record. Local files are not buffered, so there no range is kept.
            blocks = first_records if self._releases_blocks else NO_BLOCK
        return ranges_of_records(self._index, self.fields, records, steps, blocks, self._gap)


def ranges_of_records(
    index: Index,
    fields: Sequence[str],
    records: Int64s,
    steps: Int64s,
    blocks: Int64s | int,
    gap: int,
    /,
) -> FileRanges:
    """Return the `FILE_RANGE`s that contain fields of records, each with the step that reads it and
    its block, or `NO_BLOCK`. Damaged rows are skipped: reading them raises the error. Rows at most
    `gap` bytes apart are one range.
    """
    # There is a row for each field of each record: all fields of the first record, then the next.
    # For example, two fields of the records [7, 4] have the rows 7a, 7b, 4a, 4b. So the block and
    # the step of each record are repeated for both of its fields.
    rows = index.rows(fields, records)
    nonempty = rows["length"] > 0
    nonempty[rows_outside_shards(index, rows)] = False
    block_of_rows = np.repeat(np.broadcast_to(blocks, len(records)), len(fields))
    step_of_rows = np.repeat(steps, len(fields))
    return merge_rows(rows[nonempty], block_of_rows[nonempty], step_of_rows[nonempty], gap)


def merge_rows(rows: Rows, blocks: Int64s | int, steps: Int64s | int, gap: int, /) -> FileRanges:
    """Merge the byte ranges of rows of an index into `FILE_RANGE`s, sorted by file and offset.

    Rows of one file and block share a range if at most `gap` bytes lie between them, unless it
    would be longer than about `MAX_RANGE_BYTES`. The step of a range is the latest step of its
    rows. For example, rows at offsets 5000, 0 and 10 of 10 bytes each, with a gap of 100, give the
    ranges [0, 20) and [5000, 5010).

    Args:
        rows: the offset, length and file of each.
        blocks: for each row the first record of its block (of records that are read around the same
            time), or `NO_BLOCK` for all.
        steps: the step that reads each row, or one step for all.
        gap: in bytes.
    """
    # Sort the rows by file and offset. The comments follow the example.
    order = np.lexsort((rows["offset"], rows["file"]))  # [1, 2, 0]
    file, start = rows["file"][order], rows["offset"][order].astype(np.int64)
    stop = start + rows["length"][order]  # start is [0, 10, 5000], and stop is [10, 20, 5010]
    blocks = np.broadcast_to(blocks, len(rows))[order]
    steps = np.broadcast_to(steps, len(rows))[order]
    is_other_file, is_other_block = file[1:] != file[:-1], blocks[1:] != blocks[:-1]
    is_after_gap = start[1:] - stop[:-1] > gap  # [False, True]
    is_first = np.ones(len(order), bool)  # whether a range begins with this row
    is_first[1:] = is_other_file | is_other_block | is_after_gap  # [True, False, True]
    # Divide long ranges: part 0 has the rows that begin in the first MAX_RANGE_BYTES of the range,
    # part 1 those that begin in the next, and so on. For example, if a range of 20 MiB has rows at
    # 0, 6, 12 and 18 MiB, and MAX_RANGE_BYTES are 8 MiB, their parts are 0, 0, 1 and 2.
    first_row = np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))  # [0, 0, 2]
    range_start = start[first_row]  # of the range that each row is in: [0, 0, 5000]
    part = (start - range_start) // MAX_RANGE_BYTES  # [0, 0, 0]: no range is long
    is_first[1:] |= part[1:] != part[:-1]
    first = np.flatnonzero(is_first)  # the first row of each range: [0, 2]
    ranges = np.zeros(len(first), FILE_RANGE)
    if len(first):
        ranges["file"], ranges["start"], ranges["block"] = file[first], start[first], blocks[first]
        ranges["stop"] = np.maximum.reduceat(stop, first)
        ranges["step"] = np.maximum.reduceat(steps, first)
    return ranges


def rows_outside_shards(index: Index, rows: Rows, /) -> Int64s:
    """Return the positions of rows whose byte range is not within their shard, as int64[n]."""
    if index.container == "files":
        return np.zeros(0, np.int64)  # a row is a whole file, whose size is checked when it is read
    # A damaged row may name a file that does not exist: reading the row raises the error.
    last_shard = len(index.shards) - 1
    sizes = index.shards["bytes"][np.minimum(rows["file"], last_shard)]
    inside = (rows["offset"] >= 0) & (rows["length"] >= 0)
    return np.flatnonzero(~inside | (rows["offset"] > sizes - rows["length"]))


def gap_of(index: Index, /) -> int:
    """Return the longest gap, in bytes, between two rows that are read as one range.

    For shards at a URL it is the mean size of a record, within limits. A range may then include an
    unneeded record between two needed ones, which costs less than another request.
    """
    if not index.remote:
        return LOCAL_GAP
    mean_record_bytes = int(index.shards["bytes"].sum()) // max(1, len(index))
    return min(max(mean_record_bytes, _MIN_GAP), _MAX_GAP)
