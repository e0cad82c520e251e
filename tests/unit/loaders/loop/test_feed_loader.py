"""A new loader for every epoch gives epoch 0 every time, and says so; what `change` refuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.refusals import Call, Refused, check_refused

from twinfeed.loaders import DatasetSource, Feed, NumpyLoader
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


def loader_at(step: int, *, prefetch: int = 2, threads: int = 0) -> NumpyLoader:
    """A loader whose loop has received so many batches. K changes in step 9."""
    feed = Feed(DatasetSource({"x": np.arange(24)}, digest="0 to 23"), pk({0: 1, 9: 2}))
    loader: NumpyLoader = NumpyLoader(feed, prefetch=prefetch, threads=threads)
    batches = iter(loader)
    for _ in range(step):
        next(batches)
    return loader


def twice(_: Path) -> None:
    loader = loader_at(1)
    loader.change(pk({0: 1, 4: 2}))
    loader.change(pk({0: 1, 4: 3}), at=5)


def in_an_evaluation(_: Path) -> None:
    loader: NumpyLoader = NumpyLoader(Feed({"x": np.arange(20)}, evaluation()))
    next(iter(loader))
    loader.change(evaluation())


CHANGES: Refused = [
    (lambda _: loader_at(1).change(None), TypeError, "sampler must give batches, got a NoneType"),
    (lambda _: loader_at(1).change(RandomSampler(24, seed=0)), TypeError, "BatchSampler.sampler"),
    (lambda _: loader_at(1).change({0: 2}), TypeError, "must give batches, got a dict"),
    (lambda _: loader_at(1).change(pk(), at="9"), TypeError, "at must be"),
    (lambda _: loader_at(1).change(pk(), at=9.0), TypeError, "at must be"),
    (lambda _: loader_at(1).change(pk(), at=3), ValueError, "at must be at least 4, got 3"),
    (lambda _: loader_at(1).change(pk(), at=-1), ValueError, "at must be at least 4, got -1"),
    (lambda _: loader_at(1).change(pk(), at=1 << 70), ValueError, "at must be"),
    (lambda _: loader_at(1).change(pk({0: 1, 3: 2})), StateMismatchError, "k from step 3"),
    (lambda _: loader_at(1).change(pk(p=2)), StateMismatchError, "p: the state has 4"),
    (lambda _: loader_at(1).change(pk(seed=1)), StateMismatchError, "seed: the state has 0"),
    (lambda _: loader_at(1).change(pk(labels=LABELS[::-1])), StateMismatchError, "labels"),
    (lambda _: loader_at(1).change(pk(labels=np.arange(30) // 3)), ValueError, "30 records"),
    (lambda _: loader_at(1).change(training()), ValueError, "20 records"),
    (
        lambda _: loader_at(1).change(pk().shard(0, 2)),
        ValueError,
        "rank 0 of 2: give the .* without",
    ),
    (lambda _: loader_at(1).change(pk(), at=10), StateMismatchError, "k from step 9"),
    (twice, StateMismatchError, "k from step 4: the state has 2, this sampler has 3"),
    (in_an_evaluation, ValueError, "an evaluation has no changes"),
]


@pytest.mark.parametrize(("call", "kind", "word"), CHANGES)
def test_change_refuses_bad_arguments(
    call: Call, kind: type[Exception], word: str, tmp_path: Path
) -> None:
    check_refused(tmp_path, call, kind, word)


def test_refused_change_leaves_loader_unchanged() -> None:
    """And the error says from which step on the sampler may differ."""
    loader = loader_at(2)
    feed, state = loader.feed, loader.state_dict()
    with pytest.raises(StateMismatchError) as caught:
        loader.change(pk({0: 1, 3: 2}))
    assert "batches may differ from step 5 on" in caught.value.__notes__[0]
    assert loader.feed is feed
    assert loader.state_dict() == state
    loader.close()


def test_change_after_seek_or_close_applies_from_there() -> None:
    """What an earlier pass has drawn does not matter any more."""
    loader = loader_at(6)
    loader.load_state_dict(loader.state_at(0, 1))
    assert loader.change(pk({0: 1, 4: 2})) == 4
    loader.close()
    assert loader.change(pk({0: 1, 4: 2, 8: 1}), at=8) == 8
    final = pk({0: 1, 4: 2, 8: 1})
    received = [batch["id"].tolist() for _ in range(2) for batch in loader]
    assert received == [final.batch(*divmod(step, 6)).tolist() for step in range(1, 12)]


def test_lookahead_depends_only_on_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default number of threads is that of the machine: the bound is the same on all."""
    feed = Feed({"x": np.arange(24)}, pk(), decode=lambda sample: sample)
    bounds = set()
    for processors in (1, 3, 64):
        monkeypatch.setattr("twinfeed.loaders.support.system.processors", lambda n=processors: n)
        loader: NumpyLoader = NumpyLoader(feed)
        assert loader.threads == min(8, processors)
        bounds.add(loader.lookahead)
    assert bounds == {2 + 1 + 8}
    assert loader_at(0, prefetch=5, threads=9).lookahead == 5 + 1 + 9


def test_no_batch_beyond_lookahead_is_drawn() -> None:
    for prefetch, threads in ((0, 0), (0, 4), (1, 0), (3, 1), (2, 5)):
        loader = loader_at(0, prefetch=prefetch, threads=threads)
        for _ in range(3):
            for _ in loader:
                (schedule,) = loader.schedules.values()
                assert schedule.committed <= loader.global_step + loader.lookahead
