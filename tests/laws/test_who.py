"""`who`, `when` and `diff` say what a real loop receives, with the step that is in its log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from tempfile import mkdtemp
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import webdataset as wds
from support.cases import mark_long
from support.sampler_cases import CASES

from twinfeed import (
    BatchSampler,
    ExactOnceBatchSampler,
    Feed,
    JaxLoader,
    NumpyLoader,
    RandomSampler,
    ResumeCallback,
    TensorFlowLoader,
    TorchLoader,
    diff,
    pack,
    samples,
    when,
    who,
)

pytestmark = [
    pytest.mark.usefixtures("graphs_as_written"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

RECORDS, EPOCHS = 22, 2
INDEX = pack([{"x": np.float32(n), "y": np.float32(n)} for n in range(RECORDS)], mkdtemp())["data"]
FEED = Feed(INDEX, BatchSampler(RandomSampler(RECORDS, seed=0), batch_size=4))
EVALUATION = Feed(INDEX, ExactOnceBatchSampler(RECORDS, batch_size=4))
Log = list[tuple[int, list[int]]]
"""What a loop writes: `loader.global_step` and the ids of the batch that it has."""


def logged(loader: Any, batches: Iterator[Any]) -> Iterator[tuple[int, list[int]]]:
    for batch in batches:
        ids = batch["id"] if isinstance(batch, dict) else batch
        yield loader.global_step, np.asarray(ids).tolist()


def loop(loader: Any) -> Log:
    """Two epochs, with a stop, and a state that is loaded, in the second."""
    with loader:
        log = [*logged(loader, iter(loader))]
        for step, ids in logged(loader, iter(loader)):
            log.append((step, ids))
            if loader.step == 3:
                break
        loader.load_state_dict(loader.state_at(1, 1))
        return [*log, *logged(loader, iter(loader))]


def tracked(feed: Feed) -> Log:
    with TensorFlowLoader(feed) as loader:
        dataset = loader.dataset.map(lambda batch: batch["id"]).prefetch(3)
        return [entry for _ in range(EPOCHS) for entry in logged(loader, loader.track(dataset))]


def pipeline(feed: Feed) -> Log:
    source = samples(feed)
    ids = wds.map(lambda sample: int(sample["__key__"].rpartition("#")[2]))
    stages = wds.DataPipeline(source, ids, wds.batched(4, collation_fn=list))
    with source:
        return [entry for _ in range(EPOCHS) for entry in logged(source, source.track(stages))]


def fitted(feed: Feed) -> Log:
    """A callback of the user is called before the batch is counted."""
    log: Log = []
    trained: list[list[int]] = []

    class Model(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            trained.append(data[0].numpy()[:, 0].astype(int).tolist())
            return {"loss": tf.constant(0.0)}

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            log.append((resume.loader.global_step + 1, trained[-1]))

        def get_state(self) -> dict[str, Any]:
            return {}

        def set_state(self, state: dict[str, Any]) -> None:
            pass

    inputs = keras.Input([1])
    model = Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", run_eagerly=True)
    resume = ResumeCallback(TensorFlowLoader(feed), mkdtemp())
    with resume.loader:
        resume.fit(
            model,
            lambda batch: (tf.expand_dims(batch["x"], 1), batch["y"]),
            epochs=EPOCHS,
            callbacks=Note(),
            verbose=0,
        )
    return log


ROUTES: dict[str, Callable[[Feed], Log]] = {
    "numpy": lambda feed: loop(NumpyLoader(feed)),
    "numpy, ahead": lambda feed: loop(NumpyLoader(feed, prefetch=3, threads=2)),
    "torch": lambda feed: loop(TorchLoader(feed, device="cpu")),
    "torch, workers": lambda feed: loop(TorchLoader(feed, device="cpu", num_workers=2)),
    "tensorflow": lambda feed: loop(TensorFlowLoader(feed)),
    "tensorflow, track": tracked,
    "keras": fitted,
    "webdataset": pipeline,
    "jax": lambda feed: loop(JaxLoader(feed)),
}


@pytest.mark.parametrize("route", ROUTES)
def test_who_and_when_agree_with_log_of_loop(route: str) -> None:
    log = ROUTES[route](FEED)
    assert {step for step, _ in log} == {*range(1, EPOCHS * len(FEED) + 1)}
    for step, ids in log:
        assert who(FEED, step).request.ids.tolist() == ids, step
    for record in (0, RECORDS - 1):
        steps = {step for step, ids in log if record in ids}
        assert when(FEED, record, until=EPOCHS * len(FEED)).steps == sorted(steps)


@pytest.mark.parametrize("route", ["numpy", "torch", "tensorflow"])
def test_who_and_when_agree_with_log_of_evaluation(route: str) -> None:
    """Its loader is at step 0 again in the last batch, and each pass is whole."""
    loaders = {"numpy": NumpyLoader, "torch": TorchLoader, "tensorflow": TensorFlowLoader}
    loader = loaders[route](EVALUATION)
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        log = [*logged(loader, iter(loader))]
        assert log[-1][0] == epoch * len(EVALUATION)
        for step, ids in log:
            request = who(EVALUATION, step).request
            assert (request.epoch, request.ids.tolist()) == (epoch, ids)
        for record in (0, 5, RECORDS - 1):
            steps = [step % len(EVALUATION) for step, ids in log if record in ids]
            assert when(EVALUATION, record, until=100).steps == steps


@pytest.mark.parametrize(("name", "make"), mark_long(CASES, but_every=4))
def test_who_says_what_each_rank_receives_of_every_sampler(name: str, make: Any) -> None:
    sampler = make()
    feed = Feed({"x": np.arange(sampler.num_records)}, sampler)
    for world in (1, 2):
        try:
            ranks = [feed.shard(rank, world) for rank in range(world)]
        except ValueError:  # P x K, whose classes the ranks cannot share
            continue
        for rank, of_rank in enumerate(ranks):
            for number, request in enumerate(of_rank.requests(1), 1):
                # The loader of an evaluation goes back to step 0 with the last batch.
                step = len(feed) + (number % len(feed) if sampler.evaluation else number)
                answer = who(feed, step, rank=rank, world_size=world).request
                for name in ("epoch", "step", "ids", "records", "views"):
                    assert np.array_equal(getattr(answer, name), getattr(request, name)), name
                seeds = of_rank.sampler.seeds(request.epoch, request.step)
                assert np.array_equal(
                    answer.seeds, seeds[of_rank.sampler.batch(request.epoch, request.step) >= 0]
                )
    assert diff(feed, feed).ok
