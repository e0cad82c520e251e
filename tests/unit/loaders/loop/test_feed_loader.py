"""A new loader for every epoch says that it gives epoch 0; states, and threads of batches."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.refusals import Call, Refused, check_refused
from support.threads import started_threads

from twinfeed.loaders import DatasetSource, Feed, NumpyLoader
from twinfeed.loaders.loop.feed_loader import in_order
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    StateMismatchError,
)


def torch_loader(feed: Feed) -> Any:
    from twinfeed.loaders.torch import TorchLoader

    return TorchLoader(feed)


LOADERS = [NumpyLoader, pytest.param(torch_loader, marks=pytest.mark.frameworks)]


def training() -> BatchStream:
    return BatchSampler(RandomSampler(20, seed=0), batch_size=5)


def evaluation() -> BatchStream:
    return ExactOnceBatchSampler(20, batch_size=5)


def new_loader_each_epoch(make: Callable[[], Any]) -> None:
    for _ in range(2):
        for _ in make():
            pass


def new_loader_in_a_variable(make: Callable[[], Any]) -> None:
    for _ in range(2):
        loader = make()
        for _ in loader:
            pass


def several_epochs(make: Callable[[], Any]) -> None:
    loader = make()
    for _ in range(2):
        list(loader)


def second_training(make: Callable[[], Any]) -> None:
    several_epochs(make)
    several_epochs(make)


def peek_before_training(make: Callable[[], Any]) -> None:
    next(iter(make()))
    next(iter(make()))
    several_epochs(make)


def set_epoch_each_time(make: Callable[[], Any]) -> None:
    for epoch in (0, 1, 0):
        loader = make()
        loader.set_epoch(epoch)
        list(loader)


def load_a_state(make: Callable[[], Any]) -> None:
    state = make().state_dict()
    for _ in range(2):
        loader = make()
        loader.load_state_dict(state)
        list(loader)


def compare_two_loaders(make: Callable[[], Any]) -> None:
    first, second = make(), make()
    assert len(list(first)) == len(list(second))


def feed_of(sampler: BatchStream) -> Feed:
    return Feed({"x": np.arange(20)}, sampler)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("loop", [new_loader_each_epoch, new_loader_in_a_variable])
def test_new_loader_that_repeats_epoch_0_warns(loader: Any, loop: Any) -> None:
    """At the second, with the cure; an evaluation is meant to come again."""
    feed = feed_of(training())
    with pytest.warns(UserWarning, match=r"new \w+Loader of .* epoch 0 again, .* use one \w+Lo"):
        loop(lambda: loader(feed))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed = feed_of(evaluation())
        loop(lambda: loader(feed))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    "loop",
    [
        several_epochs,
        second_training,
        peek_before_training,
        set_epoch_each_time,
        load_a_state,
        compare_two_loaders,
    ],
)
@pytest.mark.filterwarnings("error", "ignore:the state and the source share no digest")
def test_loader_with_explicit_position_does_not_warn(loader: Any, loop: Any) -> None:
    feed = feed_of(training())
    loop(lambda: loader(feed))


LABELS = np.arange(24) // 3


def pk(k: Any = 1, *, p: int = 4, seed: int = 0, labels: Any = LABELS) -> BatchStream:
    return PKBatchSampler(labels, p=p, k=k, seed=seed, batches_per_epoch=6)


def resume(sampler: Any, step: int = 1) -> Call:
    """Load the state after some steps, of K that changes in step 9, with another sampler."""
    feed = Feed(DatasetSource({"x": np.arange(24)}, digest="0 to 23"), pk({0: 1, 9: 2}))

    def call(_: Path) -> None:
        state = NumpyLoader(feed).state_at(*divmod(step, 6))
        NumpyLoader(feed.with_sampler(sampler)).load_state_dict(state)

    return call


NO_LONGER_SCHEDULES: Refused = [
    (resume(None), TypeError, "sampler must give batches, got a NoneType"),
    (resume(RandomSampler(24, seed=0)), TypeError, "BatchSampler.sampler"),
    (resume({0: 2}), TypeError, "must give batches, got a dict"),
    (resume(pk({0: 1, 3: 2}), 4), StateMismatchError, "k from step 3"),
    (resume(pk(), 10), StateMismatchError, "k from step 9"),
    (resume(pk(p=2)), StateMismatchError, "p: the state has 4"),
    (resume(pk(seed=1)), StateMismatchError, "seed: the state has 0"),
    (resume(pk(labels=LABELS[::-1])), StateMismatchError, "labels"),
    (resume(pk(labels=np.arange(30) // 3)), ValueError, "30 records"),
    (resume(training()), ValueError, "20 records"),
]


@pytest.mark.parametrize(("call", "kind", "word"), NO_LONGER_SCHEDULES)
def test_state_is_refused_by_other_than_longer_schedule(
    call: Call, kind: type[Exception], word: str, tmp_path: Path
) -> None:
    check_refused(tmp_path, call, kind, word)


def test_default_threads_are_processors_up_to_8(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed({"x": np.arange(24)}, pk(), decode=lambda sample: sample)
    for processors in (1, 3, 64):
        monkeypatch.setattr("twinfeed.loaders.support.system.processors", lambda n=processors: n)
        assert NumpyLoader(feed).threads == min(8, processors)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_results_of_threads_keep_their_order(count: int) -> None:
    def slowest_first(number: int) -> int:
        time.sleep((20 - number) / 2000)
        return number

    assert list(in_order(slowest_first, range(20), threads=count)) == list(range(20))
    assert started_threads() == []


def test_concurrent_items_are_as_many_as_threads() -> None:
    together = threading.Barrier(3, timeout=300)
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for number in range(9):
            drawn.append(number)
            yield number

    results = in_order(lambda number: together.wait(), items(), threads=3)
    next(results)
    assert len(drawn) <= 5
    assert len(list(results)) == 8


def test_exception_on_one_thread_ends_all() -> None:
    def fail(number: int) -> int:
        return number // (number - 2)

    results = in_order(fail, iter(range(1000)), threads=2)
    assert [next(results), next(results)] == [0, -1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert started_threads() == []


def test_close_leaves_no_thread() -> None:
    results = in_order(str, iter(int, 1), threads=2)
    assert next(results) == "0"
    results.close()
    assert started_threads() == []


# Over the end of an epoch


def workers_that_stay(feed: Feed) -> Any:
    from twinfeed.loaders.torch import TorchLoader

    return TorchLoader(feed, num_workers=1, persistent_workers=True)


def jax_loader(feed: Feed) -> Any:
    from twinfeed.loaders.jax import JaxLoader

    return JaxLoader(feed)


def tensorflow_loader(feed: Feed) -> Any:
    from twinfeed.loaders.tensorflow import TensorFlowLoader

    return TensorFlowLoader(feed)


GOING_ON = [
    *LOADERS,
    pytest.param(lambda feed: NumpyLoader(feed, threads=3), id="threads"),
    pytest.param(lambda feed: NumpyLoader(feed, prefetch=0), id="nothing ahead"),
    pytest.param(workers_that_stay, marks=pytest.mark.frameworks),
    pytest.param(jax_loader, marks=pytest.mark.frameworks),
    pytest.param(tensorflow_loader, marks=pytest.mark.frameworks),
]


class Numbers:
    """Records that are their ids, which notes what was read."""

    def __init__(self, count: int) -> None:
        self.read: list[int] = []
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.read.append(int(number))
        return {"x": np.int32(number)}


def numbers_feed(sampler: BatchStream | None = None) -> tuple[Numbers, Feed]:
    source = Numbers(20)
    feed = Feed(DatasetSource(source), training() if sampler is None else sampler, decode=dict)
    assert feed.spec
    source.read.clear()
    return source, feed


def drawn(epoch: int, start: int = 0) -> list[list[int]]:
    return [ids.tolist() for ids in training().batches(epoch, start, 4)]


def received(loader: Any) -> list[list[int]]:
    return [np.asarray(batch["id"]).tolist() for batch in loader]


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.filterwarnings("ignore:the state and the source share no digest")
@pytest.mark.parametrize("make", GOING_ON)
def test_epochs_follow_and_another_epoch_drops_what_was_made(make: Callable[[Feed], Any]) -> None:
    _, feed = numbers_feed()
    loader, states = make(feed), []
    for epoch in (0, 1, 5, 6):
        loader.set_epoch(epoch)
        assert received(loader) == drawn(epoch)
        states.append((loader.state_dict()["epoch"], loader.state_dict()["step"]))
    assert states == [(1, 0), (2, 0), (6, 0), (7, 0)]
    loader.load_state_dict(loader.state_at(7, 0))
    assert received(loader) == drawn(7)
    loader.load_state_dict(loader.state_at(2, 3))
    assert received(loader) == drawn(2, 3)
    for _ in loader:  # is broken off
        break
    assert received(loader) == drawn(3, 1)
    loader.close()
    assert started_threads() == []
    assert received(loader) == drawn(4)
    loader.close()


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("exhausted", [True, False])
def test_next_epoch_is_read_before_its_loop_and_once(threads: int, exhausted: bool) -> None:
    """Also if the loop takes the last batch, and does not ask whether there is another."""
    source, feed = numbers_feed()
    with NumpyLoader(feed, threads=threads) as loader:
        for epoch in range(3):
            batches = iter(loader)
            for _ in range(4):
                next(batches)
            if exhausted:
                assert next(batches, None) is None
            ahead = 20 * (epoch + 1) + 5 * loader.prefetch
            wait_until(lambda least=ahead: len(source.read) >= least)  # type: ignore[misc]
    assert all(source.read.count(number) >= 3 for number in range(20))
    assert len(source.read) <= 60 + 5 * (loader.prefetch + 1 + 2 * (threads + 1))


@pytest.mark.parametrize("make", LOADERS)
def test_loop_that_is_left_at_its_last_batch_does_not_end_the_next(
    make: Callable[[Feed], Any],
) -> None:
    _, feed = numbers_feed()
    with make(feed) as loader:
        first = iter(loader)
        assert [next(first)["id"].tolist() for _ in range(4)] == drawn(0)
        second = iter(loader)
        assert next(second)["id"].tolist() == drawn(1)[0]
        del first
        assert [batch["id"].tolist() for batch in second] == drawn(1, 1)


@pytest.mark.parametrize("make", GOING_ON)
def test_deleted_loader_leaves_no_thread(make: Callable[[Feed], Any]) -> None:
    _, feed = numbers_feed()
    loader = make(feed)
    assert received(loader) == drawn(0)
    del loader
    assert started_threads() == []


@pytest.mark.parametrize("make", LOADERS)
def test_evaluation_makes_nothing_ahead_of_the_next_pass(make: Callable[[Feed], Any]) -> None:
    source, feed = numbers_feed(evaluation())
    loader = make(feed)
    assert len(received(loader)) == 4
    assert started_threads() == []
    assert len(source.read) == 20


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_error_of_the_next_epoch_is_raised_by_its_loop(threads: int) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if len(noted) >= 20:
            raise RuntimeError("too many")
        noted.append(1)
        return sample

    noted: list[int] = []
    _, feed = numbers_feed()
    feed = Feed(feed.index, training(), decode=fail)
    assert feed.spec
    noted.clear()
    loader = NumpyLoader(feed, threads=threads, prefetch=3)
    assert received(loader) == drawn(0)
    assert (loader.epoch, loader.step) == (1, 0)
    with pytest.raises(Exception, match="too many"):
        list(loader)
    assert (loader.epoch, loader.step) == (1, 0)
    assert started_threads() == []
    noted.clear()
    assert received(loader) == drawn(1)
    loader.close()


def test_error_of_the_requests_comes_after_the_results_before_it() -> None:
    def items() -> Iterator[int]:
        yield from range(4)
        raise IndexError("no fifth")

    results = in_order(str, items(), threads=3)
    assert [next(results) for _ in range(4)] == ["0", "1", "2", "3"]
    with pytest.raises(IndexError, match="no fifth"):
        next(results)
