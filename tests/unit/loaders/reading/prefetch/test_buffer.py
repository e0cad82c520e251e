"""Ranges of remote files are buffered until the last step that needs them is over."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait

import numpy as np
import pytest

from twinfeed.loaders.reading.prefetch.buffer import BufferedRange, RangeBuffer
from twinfeed.loaders.reading.prefetch.read_plan import FILE_RANGE, NO_BLOCK, Fetch, Release

SIZE = 10  # bytes of a range


@pytest.fixture
def buffer() -> RangeBuffer:
    return RangeBuffer(lambda _file, start, stop: memoryview(bytes(range(start, stop))), 0)


def fetch(buffer: RangeBuffer, *numbers: int, step: int = 0, block: int = NO_BLOCK) -> None:
    """Announce ranges by their number in the file."""
    ranges = [(0, number * SIZE, (number + 1) * SIZE, block, step) for number in numbers]
    buffer.apply(Fetch(np.array(ranges, FILE_RANGE)))


def found(buffer: RangeBuffer, number: int) -> bool:
    return (0, number * SIZE, (number + 1) * SIZE) in buffer._ranges


def needed(buffer: RangeBuffer, number: int) -> BufferedRange:
    """Return a range that a batch needs now."""
    row = np.zeros(1, [("offset", "<i8"), ("length", "<i8"), ("file", "<i4"), ("crc", "<u4")])
    row["offset"], row["length"] = number * SIZE, SIZE
    (one,) = buffer.request_rows(row)
    assert one.data.tolist() == list(range(number * SIZE, (number + 1) * SIZE))
    return one


def test_range_is_buffered_until_its_last_step_is_released(buffer: RangeBuffer) -> None:
    fetch(buffer, 0, 1, step=3)
    fetch(buffer, 0, step=5)  # needed again
    buffer.release_before(4)
    assert [found(buffer, number) for number in (0, 1)] == [True, False]
    buffer.release_before(5)
    needed(buffer, 0)
    buffer.release_before(6)
    assert not found(buffer, 0)
    assert not buffer._ranges
    assert not buffer._bytes


def test_block_ranges_are_buffered_until_the_block_is_closed(buffer: RangeBuffer) -> None:
    fetch(buffer, 0, 1, step=3, block=7)
    buffer.release_before(100)
    buffer.apply(Release([(7, 110), (8, 9)]))
    buffer.release_before(110)
    needed(buffer, 0)
    buffer.release_before(111)
    assert not found(buffer, 0)
    assert not found(buffer, 1)


def test_released_range_stays_readable_for_its_holder(buffer: RangeBuffer) -> None:
    fetch(buffer, 0)
    one = needed(buffer, 0)
    buffer.release_before(1)
    assert one.data.tolist() == list(range(SIZE))


def test_new_plan_keeps_only_the_ranges_it_requests_again(
    buffer: RangeBuffer, network: Callable[..., None]
) -> None:
    """What the new plan does not ask for again goes where the plan before ended."""
    fetch(buffer, 0, 1, step=3, block=7)
    buffer.start_plan(5)
    fetch(buffer, 0, step=3, block=7)
    buffer.release_before(6)
    assert [found(buffer, number) for number in (0, 1)] == [True, False]
    buffer.start_plan(None)
    assert not buffer._ranges
    network(buffer_bytes=SIZE)
    fetch(buffer, 0, 1)
    buffer.start_plan(95)
    assert not buffer._ranges, "nor if it is much"


def test_range_of_several_parts_is_one_buffer(network: Callable[..., None]) -> None:
    """Pieces of 4, 4 and 2 bytes. A piece fails before it is needed."""
    network(part_bytes=4)
    failures = [OSError("once")]

    def read(_file: int, start: int, stop: int) -> memoryview:
        if start == SIZE + 4 and failures:
            raise failures.pop()
        return memoryview(bytes(range(start, stop)))

    buffer = RangeBuffer(read, 0)
    fetch(buffer, 1)
    one = buffer._ranges[0, SIZE, 2 * SIZE]
    assert len(wait(one.parts).done) == 3
    assert one.failed
    first = needed(buffer, 1).data
    assert first.obj is one.data.obj


@pytest.mark.parametrize("end", [0, 3, 4, 6, 8])
def test_range_beyond_the_end_of_the_file_is_shorter(
    network: Callable[..., None], end: int
) -> None:
    """As in a forged index. Once it was numpy's error about shapes."""
    network(part_bytes=4)
    stored = bytes(range(SIZE + end))
    buffer = RangeBuffer(lambda _file, start, stop: memoryview(stored)[start:stop], 0)
    fetch(buffer, 1)
    assert bytes(buffer._ranges[0, SIZE, 2 * SIZE].data) == stored[SIZE:]


def test_range_of_cleared_buffer_drops_no_other_range(buffer: RangeBuffer) -> None:
    """As where a batch of an abandoned pass fails after the next pass has started."""
    fetch(buffer, 0)
    old = buffer._ranges[0, 0, SIZE]
    buffer.start_plan(None)
    fetch(buffer, 3)
    buffer.drop([old])
    assert found(buffer, 3)
