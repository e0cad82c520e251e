"""A new loader for every epoch gives epoch 0 every time, and says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from twinfeed.loaders import Feed, NumpyLoader
from twinfeed.samplers import BatchSampler, BatchStream, ExactOnceBatchSampler, RandomSampler


def torch_loader(feed: Feed) -> Any:
    from twinfeed.loaders.torch import TorchLoader

    return TorchLoader(feed)


LOADERS = [NumpyLoader, pytest.param(torch_loader, marks=pytest.mark.frameworks)]


def training() -> BatchStream:
    return BatchSampler(RandomSampler(20, seed=0), batch_size=5)


def evaluation() -> BatchStream:
    return ExactOnceBatchSampler(20, batch_size=5)


def new_for_each_epoch(make: Callable[[], Any]) -> None:
    for _ in range(2):
        for _ in make():
            pass


def new_in_a_variable(make: Callable[[], Any]) -> None:
    for _ in range(2):
        loader = make()
        for _ in loader:
            pass


def several_epochs(make: Callable[[], Any]) -> None:
    loader = make()
    for _ in range(2):
        list(loader)


def a_training_after_the_other(make: Callable[[], Any]) -> None:
    several_epochs(make)
    several_epochs(make)


def a_look_before_the_training(make: Callable[[], Any]) -> None:
    next(iter(make()))
    next(iter(make()))
    several_epochs(make)


def epochs_that_are_named(make: Callable[[], Any]) -> None:
    for epoch in (0, 1, 0):
        loader = make()
        loader.set_epoch(epoch)
        list(loader)


def states_that_are_loaded(make: Callable[[], Any]) -> None:
    state = make().state_dict()
    for _ in range(2):
        loader = make()
        loader.load_state_dict(state)
        list(loader)


def loaders_that_are_compared(make: Callable[[], Any]) -> None:
    first, second = make(), make()
    assert len(list(first)) == len(list(second))


def feed_of(sampler: BatchStream) -> Feed:
    return Feed({"x": np.arange(20)}, sampler)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("loop", [new_for_each_epoch, new_in_a_variable])
def test_a_new_loader_after_one_that_received_epoch_0_warns(loader: Any, loop: Any) -> None:
    """At the second, with the cure; an evaluation is meant to come again."""
    feed = feed_of(training())
    with pytest.warns(UserWarning, match=r"new \w+Loader of .* epoch 0 again, .* over one \w+Lo"):
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
        a_training_after_the_other,
        a_look_before_the_training,
        epochs_that_are_named,
        states_that_are_loaded,
        loaders_that_are_compared,
    ],
)
@pytest.mark.filterwarnings("error", "ignore:the state and the source share no digest")
def test_what_says_where_it_begins_or_goes_on_does_not_warn(loader: Any, loop: Any) -> None:
    feed = feed_of(training())
    loop(lambda: loader(feed))
