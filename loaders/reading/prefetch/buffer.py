"""A buffer of ranges of remote files: fetched before they are used, released after."""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.reading.prefetch.block_uses import NO_STEP
from twinfeed.loaders.reading.prefetch.read_plan import NO_BLOCK, Fetch, Release, Rows, merge_rows
from twinfeed.loaders.storage import retries
from twinfeed.loaders.storage.request_pool import request_pool

ReadRange = Callable[[int, int, int], memoryview]
"""A function (file, start, stop) that returns the bytes [start, stop) of a file."""

SendRange = Callable[[int, int, int], Callable[[], memoryview | None] | None]
"""The same in two steps: send the request, and return a function that receives the bytes."""

_MAX_CANDIDATES = 8
"""A row is searched in this many buffered ranges: the last ones that begin before the row."""


class BufferedRange:
    """A range of a remote file in the buffer: the requests for its parts, and then its bytes.

    `number` counts the ranges of a buffer in the order in which they were requested. `last_step` is
    the last step that uses the range.
    """

    def __init__(self, number: int, file: int, start: int, stop: int, step: int) -> None:
        self.number = number
        self.file = file
        self.start = start
        self.stop = stop
        self.last_step = step
        self.parts: list[Future[memoryview]] = []
        self.failed = False  # whether a part could not be read

    def request(self, read: ReadRange, send: SendRange | None, *, urgent: bool) -> None:
        """Submit requests for the range, in parts of `part_bytes`, to the request pool.

        Several parts are copied to one buffer. `urgent` requests come before all that prefetch. A
        small range is requested by `send`, if there is one.
        """
        num_bytes, size = self.stop - self.start, retries.NETWORK.part_bytes
        buffer = np.empty(num_bytes, np.uint8) if num_bytes > size else None
        is_small = num_bytes <= retries.NETWORK.small_bytes
        send_it = partial(send, self.file, self.start, self.stop) if send and is_small else None
        self.parts, self.failed = [], False
        for start in range(self.start, self.stop, size):
            stop = min(self.stop, start + size)
            call = partial(self._read_part, read, start, stop, buffer)
            part = request_pool().submit(call, stop - start, urgent=urgent, send=send_it)
            self.parts.append(part)

    def _read_part(
        self, read: ReadRange, start: int, stop: int, buffer: npt.NDArray[np.uint8] | None
    ) -> memoryview:
        """Read the bytes [start, stop) of the file; return them or, if the range has several parts,
        the buffer of the whole range, to which they were copied, up to where the file ends.
        """
        try:
            data = read(self.file, start, stop)
        except BaseException:
            self.failed = True
            raise
        if buffer is None:
            return data
        first, end = start - self.start, start - self.start + len(data)
        # numpy copies without the interpreter lock, unlike joining memoryviews.
        np.copyto(buffer[first:end], np.frombuffer(data, np.uint8))
        return buffer.data if len(data) == stop - start else buffer.data[:end]

    def cancel(self) -> None:
        """Cancel those requests for the range that have not started."""
        for part in self.parts:
            part.cancel()

    @property
    def data(self) -> memoryview:
        """The bytes of the range; blocks until all parts have been read.

        A small range is requested in one part, and the result of the part is the bytes. A large one
        is requested in several parts, which are all copied to one buffer. The result of every part
        is then the whole buffer, or less where the file ends: so the shortest is what was read.
        """
        data = self.parts[0].result() if self.parts else memoryview(b"")  # waits for the part
        for part in self.parts[1:]:
            data = min(data, part.result(), key=len)
        return data


_REQUEST_ORDER = attrgetter("number")
"""A sort key: the range that was requested first is the smallest."""

_EMPTY = BufferedRange(number=0, file=0, start=0, stop=0, step=0)
"""The range that an empty field lies in. It has no bytes, and is never requested."""


class RangeBuffer:
    """The prefetched ranges of a `ReadPlan`, each kept until the last step that uses it is over.

    Where a stream reads blocks of records, a range belongs to a block. The last step that uses the
    block is not known at first: it is `NO_STEP` until the event `Release` names it. Thread-safe.

    Args:
        read: reads a range of a file.
        gap: the longest gap, in bytes, between two rows that are fetched by one request.
        send: as `read`, in two steps, for small ranges.
    """

    def __init__(self, read: ReadRange, gap: int, send: SendRange | None = None) -> None:
        self._read, self._gap, self._send = read, gap, send
        self._lock = threading.RLock()  # methods that have it call others
        self._num_requested = 0  # ranges that were ever prefetched
        self._ranges: dict[tuple[int, int, int], BufferedRange] = {}  # by file, start and stop
        self.clear()

    def clear(self) -> None:
        """Cancel all requests, and drop all ranges."""
        with self._lock:
            for buffered in self._ranges.values():
                buffered.cancel()
            self._ranges = {}
            self._sorted_keys: list[tuple[int, int, int]] = []  # of `_ranges`
            self._bytes = 0  # of all ranges
            # The same ranges again, to find those that can be dropped after a step. A range is in
            # `_by_last_step` if the last step that uses it is known. Otherwise it is in
            # `_by_block`, by the first record of the block that its bytes belong to. (A block is a
            # range of records that are read around the same time.) When the plan names the block's
            # last step, by a `Release`, the range moves from `_by_block` to `_by_last_step`.
            self._by_block: defaultdict[int, list[BufferedRange]] = defaultdict(list)
            self._by_last_step: defaultdict[int, list[BufferedRange]] = defaultdict(list)

    def start_plan(self, previous_end: int | None, /) -> None:
        """Prepare the buffer for a new `ReadPlan`.

        The previous plan has prefetched ranges up to step `previous_end`. The new plan may need
        them too, so they are kept until that step. They are dropped if `previous_end` is None, or
        if they take more memory than `buffer_bytes`.
        """
        with self._lock:
            if previous_end is None or self._bytes > retries.NETWORK.buffer_bytes:
                self.clear()
            else:
                # The last step is not known for the ranges in `_by_block`: the previous plan would
                # have named it in a later `Release`. Now it is `previous_end` for all of them.
                self._set_last_steps([(block, previous_end) for block in self._by_block])

    def apply(self, event: Fetch | Release, /) -> None:
        """Apply an event of the plan: prefetch ranges, or note when to drop them.

        - A `Fetch` has ranges of files: request them now, for the batches of later steps.
        - A `Release` has for blocks of records the last step that uses each block. Note the step
          for the buffered ranges of the block: `release_before` drops them after it.
        """
        with self._lock:
            if isinstance(event, Release):
                self._set_last_steps(event.last_steps)
            else:
                for file, start, stop, block, step in event.ranges.tolist():
                    self._prefetch(file, start, stop, block, step)

    def _prefetch(self, file: int, start: int, stop: int, block: int, step: int) -> None:
        """Request the bytes [start, stop) of a file for `step`, unless they are in the buffer.

        With `NO_BLOCK` they are kept for this step; else until a `Release` names the block's last
        step.
        """
        buffered = self._ranges.get((file, start, stop))
        if buffered is None:
            self._num_requested += 1
            buffered = BufferedRange(self._num_requested, file, start, stop, step)
            self._ranges[file, start, stop] = buffered
            self._bytes += stop - start
            insort(self._sorted_keys, (file, start, stop))
            buffered.request(self._read, self._send, urgent=False)
        if block == NO_BLOCK:
            buffered.last_step = max(buffered.last_step, step)
            self._by_last_step[step].append(buffered)
        else:
            buffered.last_step = NO_STEP  # not known yet: larger than every step
            self._by_block[block].append(buffered)

    def _set_last_steps(self, last_steps: Sequence[tuple[int, int]]) -> None:
        """Note after which step the ranges of blocks can be dropped: they move from `_by_block` to
        `_by_last_step`. A pair is (first record of a block, last step that uses it).
        """
        for block, last_step in last_steps:
            for buffered in self._by_block.pop(block, ()):
                buffered.last_step = last_step
                self._by_last_step[last_step].append(buffered)

    def release_before(self, step: int, /) -> None:
        """Drop the ranges whose last use is before this step."""
        with self._lock:
            for last_step in [last_step for last_step in self._by_last_step if last_step < step]:
                for buffered in self._by_last_step.pop(last_step):
                    if buffered.last_step < step:  # else a later step has requested it since
                        self._drop(buffered)

    def request_rows(self, rows: Rows, /) -> list[BufferedRange]:
        """Return for each row of the index the range that its bytes lie in.

        A range that is not in the buffer, or whose prefetch has failed, is requested now. Requests
        that have not started are moved to the front of the queue. This does not wait for the bytes.
        """
        with self._lock:
            found = [
                self._find(file, offset, offset + length) if length else _EMPTY
                for offset, length, file, _ in rows.tolist()
            ]
            distinct = [buffered for buffered in dict.fromkeys(found) if buffered is not None]
            for buffered in distinct:
                if buffered.failed:
                    buffered.request(self._read, self._send, urgent=True)
            parts = [part for buffered in distinct for part in buffered.parts if not part.done()]
        if parts:
            request_pool().promote(parts)
        unbuffered = rows[[buffered is None for buffered in found]]
        requested = iter(self._request_now(unbuffered))  # their ranges, in order
        return [next(requested) if buffered is None else buffered for buffered in found]

    def _request_now(self, rows: Rows) -> list[BufferedRange]:
        """Request rows that were not prefetched, near ones as one range, and return the range that
        each row lies in. The buffer does not keep them, since only this batch needs them.
        """
        if not len(rows):
            return []
        # No block of records will use the bytes again (`NO_BLOCK`).
        merged = merge_rows(rows, NO_BLOCK, 0, self._gap)
        ranges = [  # the number and the step are only used for ranges in the buffer
            BufferedRange(number=0, file=file, start=start, stop=stop, step=0)
            for file, start, stop, *_ in merged.tolist()
        ]
        # The ranges are sorted: a row lies in the last range that starts at or before its offset.
        starts = [(new_range.file, new_range.start) for new_range in ranges]
        range_of_rows = [
            ranges[bisect_right(starts, (file, offset)) - 1] for offset, _, file, _ in rows.tolist()
        ]
        for new_range in dict.fromkeys(range_of_rows):
            new_range.request(self._read, self._send, urgent=True)
        return range_of_rows

    def _find(self, file: int, start: int, stop: int) -> BufferedRange | None:
        """Return the range, requested first, that contains the bytes [start, stop) of a file, or
        None.
        """
        # The sorted keys are (file, start of range, stop of range). Those up to `end` start at or
        # before `start`: the largest integer comes after every stop. Few ranges overlap, so it is
        # enough to look at the last ones; a row that is not found is requested once more.
        end = bisect_right(self._sorted_keys, (file, start, sys.maxsize))
        candidates = self._sorted_keys[max(0, end - _MAX_CANDIDATES) : end]
        found = [self._ranges[key] for key in candidates if key[0] == file and key[2] >= stop]
        return min(found, key=_REQUEST_ORDER, default=None)

    def drop(self, ranges: Iterable[BufferedRange], /) -> None:
        """Drop ranges that could not be read, so that they are requested again."""
        with self._lock:
            for buffered in ranges:
                self._drop(buffered)

    def drop_containing(self, file: int, start: int, stop: int, /) -> None:
        """Drop the ranges that contain the bytes [start, stop) of a file, which are wrong."""
        with self._lock:
            while (buffered := self._find(file, start, stop)) is not None:
                self._drop(buffered)

    def _drop(self, buffered: BufferedRange) -> None:
        """Remove a range from the buffer, if it is still there, and cancel its requests."""
        key = buffered.file, buffered.start, buffered.stop
        if self._ranges.get(key) is buffered:
            del self._ranges[key], self._sorted_keys[bisect_left(self._sorted_keys, key)]
            self._bytes -= buffered.stop - buffered.start
            buffered.cancel()
