"""What is held of remote files: as long as it is needed, and what was used last for longest."""

from __future__ import annotations

from concurrent.futures import wait
from dataclasses import replace

import numpy as np
import pytest

from twinfeed.loaders.reading.held import Ahead, HeldRange
from twinfeed.loaders.reading.ranges import EXTENT
from twinfeed.loaders.remote import network

SIZE = 10  # bytes of a range


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Ahead:
    """Two ranges fit."""
    monkeypatch.setattr(network, "NETWORK", replace(network.NETWORK, held=2 * SIZE))
    return Ahead(lambda _file, start, stop, _step: memoryview(bytes(range(start, stop))))


def tell(ahead: Ahead, *numbers: int, uses: int = 2, fresh: bool = False) -> None:
    """Announce ranges by their number in the file."""
    extents = [(0, number * SIZE, (number + 1) * SIZE, uses, 0) for number in numbers]
    ahead.tell(np.array(extents, EXTENT), fresh=fresh)


def found(ahead: Ahead, number: int) -> HeldRange | None:
    return ahead.find(0, number * SIZE, (number + 1) * SIZE)


def needed(ahead: Ahead, number: int) -> HeldRange:
    """Return a range that a batch needs now."""
    one = found(ahead, number)
    assert one is not None
    ahead.need([one])
    assert one.data().tolist() == list(range(number * SIZE, (number + 1) * SIZE))
    return one


def test_a_range_is_held_until_its_last_row_is_taken(ahead: Ahead) -> None:
    tell(ahead, 0, uses=3)
    for rows in (2, 1):
        assert found(ahead, 0) is not None
        ahead.taken(needed(ahead, 0), rows)
    assert found(ahead, 0) is None


def test_a_range_is_held_while_another_thread_reads_it(ahead: Ahead) -> None:
    """Whether its rows were taken, or its plan was given up and the room is short."""
    tell(ahead, 0)
    one, same = needed(ahead, 0), needed(ahead, 0)
    ahead.taken(one, 2)
    assert found(ahead, 0) is same
    tell(ahead, 1, 2, 3, uses=1, fresh=True)
    for number in (1, 2, 3):
        needed(ahead, number)
    assert found(ahead, 0) is same
    ahead.taken(same, 0)
    assert found(ahead, 0) is None


def test_the_range_used_longest_ago_makes_room(ahead: Ahead) -> None:
    """Not the one that was fetched first."""
    tell(ahead, 0, 1, 2, uses=10**6)
    for number in (0, 1, 0):
        ahead.taken(needed(ahead, number), 1)
    ahead.taken(needed(ahead, 2), 10**5)
    assert [found(ahead, number) is not None for number in range(3)] == [True, False, True]


def test_a_range_of_several_pieces_is_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 4, 4 and 2 bytes, of which one fails before anybody needs it."""
    monkeypatch.setattr(network, "NETWORK", replace(network.NETWORK, piece=4))
    failures = [OSError("once")]

    def read(_file: int, start: int, stop: int, _step: int) -> memoryview:
        if start == SIZE + 4 and failures:
            raise failures.pop()
        return memoryview(bytes(range(start, stop)))

    ahead = Ahead(read)
    tell(ahead, 1)
    one = found(ahead, 1)
    assert one is not None
    assert len(wait(one.pieces).done) == 3
    assert one.failed
    first = needed(ahead, 1).data()
    assert first.obj is one.data().obj
