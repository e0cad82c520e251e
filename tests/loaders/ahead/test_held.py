"""Ranges of remote files are kept until the stream has passed the last step that needs them."""

from __future__ import annotations

from concurrent.futures import wait
from dataclasses import replace

import numpy as np
import pytest

from twinfeed.loaders.ahead.held import Held, HeldRange, data_of
from twinfeed.loaders.ahead.ranges import ALONE, EXTENT
from twinfeed.loaders.remote import network

SIZE = 10  # bytes of a range


@pytest.fixture
def held() -> Held:
    return Held(lambda _file, start, stop, _step: memoryview(bytes(range(start, stop))))


def tell(held: Held, *numbers: int, step: int = 0, span: int = ALONE) -> None:
    """Announce ranges by their number in the file."""
    extents = [(0, number * SIZE, (number + 1) * SIZE, span, step) for number in numbers]
    held.tell(np.array(extents, EXTENT))


def found(held: Held, number: int) -> HeldRange | None:
    return held.find(0, number * SIZE, (number + 1) * SIZE)


def needed(held: Held, number: int) -> HeldRange:
    """Return a range that a batch needs now."""
    one = found(held, number)
    assert one is not None
    held.need([one])
    assert data_of([one])[one].tolist() == list(range(number * SIZE, (number + 1) * SIZE))
    return one


def test_a_range_is_held_until_its_last_step_is_passed(held: Held) -> None:
    tell(held, 0, 1, step=3)
    tell(held, 0, step=5)  # needed again
    held.passed(4)
    assert [found(held, number) is not None for number in (0, 1)] == [True, False]
    held.passed(5)
    needed(held, 0)
    held.passed(6)
    assert found(held, 0) is None
    assert not held._held
    assert not held._bytes


def test_the_ranges_of_a_span_are_held_until_the_span_is_left(held: Held) -> None:
    tell(held, 0, 1, step=3, span=7)
    held.passed(100)
    held.left([(7, 110), (8, 9)])
    held.passed(110)
    needed(held, 0)
    held.passed(111)
    assert found(held, 0) is found(held, 1) is None


def test_a_range_is_read_by_who_has_it_after_it_was_passed(held: Held) -> None:
    tell(held, 0)
    one = needed(held, 0)
    held.passed(1)
    assert data_of([one])[one].tolist() == list(range(SIZE))


def test_a_new_plan_keeps_what_it_goes_on_with(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the new plan does not ask for again goes where the plan before ended."""
    tell(held, 0, 1, step=3, span=7)
    held.begin(2, 5)
    tell(held, 0, step=3, span=7)
    held.passed(6)
    assert [found(held, number) is not None for number in (0, 1)] == [True, False]
    held.begin(90, None)
    assert not held._held
    monkeypatch.setattr(network, "NETWORK", replace(network.NETWORK, held=SIZE))
    tell(held, 0, 1)
    held.begin(90, 95)
    assert not held._held, "nor if it is much"


def test_a_range_of_several_pieces_is_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 4, 4 and 2 bytes. A piece fails before it is needed."""
    monkeypatch.setattr(network, "NETWORK", replace(network.NETWORK, piece=4))
    failures = [OSError("once")]

    def read(_file: int, start: int, stop: int, _step: int) -> memoryview:
        if start == SIZE + 4 and failures:
            raise failures.pop()
        return memoryview(bytes(range(start, stop)))

    held = Held(read)
    tell(held, 1)
    one = found(held, 1)
    assert one is not None
    assert len(wait(one.pieces).done) == 3
    assert one.failed
    first = data_of([needed(held, 1)]).popitem()[1]
    assert first.obj is data_of([one])[one].obj
