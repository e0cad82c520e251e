"""The background thread: in order, nothing lost, nothing hangs."""

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from support.threads import started_threads

from twinfeed.loaders.batches import prefetch
from twinfeed.loaders.batches.prefetch import Prefetcher, _Ready


@pytest.mark.parametrize("depth", [1, 2, 100])
def test_items_come_in_order(depth: int) -> None:
    assert list(Prefetcher(iter(range(50)), depth=depth)) == list(range(50))
    assert started_threads() == []


def test_prefetcher_runs_at_most_depth_plus_one_ahead() -> None:
    drawn: list[int] = []
    full = threading.Event()

    def source() -> Iterator[int]:
        for number in range(100):
            drawn.append(number)
            if number == 3:
                full.set()
            yield number

    with Prefetcher(source(), depth=2) as numbers:
        assert next(numbers) == 0
        assert full.wait(10)
        assert len(drawn) <= 4


@pytest.mark.parametrize("depth", [1, 2])
def test_item_does_not_wait_for_a_slow_next_one(depth: int) -> None:
    received = threading.Event()

    def source() -> Iterator[int]:
        for number in range(20):
            yield number
            assert received.wait(10)
            received.clear()

    numbers = Prefetcher(source(), depth=depth)
    for expected in range(20):
        assert next(numbers) == expected
        received.set()


@pytest.mark.parametrize(("depth", "wakes"), [(1, [True, True]), (2, [False, True])])
def test_two_quick_items_wake_the_consumer_unless_there_is_room_for_one(
    monkeypatch: pytest.MonkeyPatch, depth: int, wakes: list[bool]
) -> None:
    monkeypatch.setattr(prefetch, "_QUICK", 60)
    ready = _Ready(depth)
    for item, wakes_now in enumerate(wakes):
        ready.put(item)
        assert ready.woken.acquire(blocking=False) == wakes_now


def test_an_error_wakes_the_consumer_at_once() -> None:
    ready = _Ready(2)
    ready.put(None, StopIteration())
    assert ready.woken.acquire(blocking=False)


def test_exception_follows_earlier_items_with_its_traceback() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise KeyError("the source broke")

    numbers = Prefetcher(source(), depth=2)
    assert next(numbers) == 1
    with pytest.raises(KeyError, match="the source broke") as caught:
        next(numbers)
    assert caught.traceback[-1].name == "source"
    assert list(numbers) == []


def test_close_stops_the_thread_and_the_source() -> None:
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    numbers = Prefetcher(source(), depth=2)
    next(numbers)
    numbers.close()
    numbers.close()
    assert closed.is_set()
    assert started_threads() == []
    assert list(numbers) == []


def test_garbage_collection_stops_the_thread() -> None:
    numbers = Prefetcher(iter(int, 1), depth=2)
    next(numbers)
    del numbers
    assert started_threads() == []


def test_error_of_while_waiting_ends_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_CLOSE_TIMEOUT", 0.1)
    stuck, calls = threading.Event(), []

    def source() -> Iterator[int]:
        yield 1
        stuck.wait(60)

    def check() -> None:
        calls.append(1)
        if len(calls) > 2:
            raise ConnectionError("the other side is gone")

    numbers = Prefetcher(source(), depth=2, while_waiting=check)
    assert next(numbers) == 1
    with pytest.raises(ConnectionError, match="gone"):
        next(numbers)
    assert list(numbers) == []
    assert numbers.busy
    stuck.set()


def test_interpreter_exits_with_live_prefetcher() -> None:
    code = (
        "from twinfeed.loaders.batches.prefetch import Prefetcher\n"
        "alive = Prefetcher(iter(int, 1), depth=2); next(alive)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
