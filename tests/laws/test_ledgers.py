"""The ids that a loop receives are those that `who` says, on every route; each is the same run."""

import copy
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import webdataset as wds
from torch.utils.data import DataLoader

from twinfeed import (
    BatchSampler,
    Feed,
    JaxLoader,
    Ledger,
    NumpyLoader,
    PKBatchSampler,
    RandomSampler,
    ResumeCallback,
    TensorFlowLoader,
    TorchLoader,
    choose,
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
STEPS = len(FEED)
Ids = list[list[int]]


def loop(loader: Any) -> Ids:
    """The ids of two epochs, with a stop and a rollback in the second."""
    with loader:
        received = [np.asarray(batch["id"]).tolist() for batch in loader]
        for batch in loader:
            received.append(np.asarray(batch["id"]).tolist())
            if loader.step == 3:
                break
        loader.load_state_dict(loader.state_at(1, 1))
        return received + [np.asarray(batch["id"]).tolist() for batch in loader]


ROLLED_BACK = [*range(STEPS), *range(STEPS, STEPS + 3), *range(STEPS + 1, 2 * STEPS)]
WHOLE = list(range(2 * STEPS))


def tracked(ledger: Path) -> Ids:
    loader = TensorFlowLoader(FEED, ledger=ledger)
    with loader:
        dataset = loader.dataset.map(lambda batch: batch["id"]).prefetch(3)
        return [ids.numpy().tolist() for _ in range(EPOCHS) for ids in loader.track(dataset)]


def passes(batches_of: Callable[[Any], Any], loader: Any) -> Ids:
    """The ids of whole passes of a framework, after a look at a batch that none trains on."""
    with loader:
        batches = batches_of(loader)
        next(iter(batches))
        return [np.asarray(batch["id"]).tolist() for _ in range(EPOCHS) for batch in batches]


def fitted(ledger: Path) -> Ids:
    """The ids that `fit` trained on, of a run that ends in the middle and one that resumes it."""
    received: Ids = []
    folder = mkdtemp()

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if resume.loader.global_step == STEPS + 3 and not received:
                raise KeyboardInterrupt

        def get_state(self) -> dict[str, Any]:
            return {}

        def set_state(self, state: dict[str, Any]) -> None:
            pass

    for _ in range(2):
        model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        resume = ResumeCallback(TensorFlowLoader(FEED, ledger=ledger), folder, save_freq=2)
        try:
            resume.fit(
                model,
                lambda batch: (tf.expand_dims(batch["x"], 1), batch["y"]),
                epochs=EPOCHS,
                callbacks=Stop(),
                verbose=0,
            )
        except KeyboardInterrupt:
            received = [FEED.sampler.batch(*divmod(step, STEPS)).tolist() for step in FITTED]
        resume.loader.close()
    return received


def pipeline(ledger: Path) -> Ids:
    """The ids of a pipeline of webdataset, as `loop`."""
    source = samples(FEED, ledger=ledger)
    ids = wds.map(lambda sample: int(sample["__key__"].rpartition("#")[2]))
    stages = wds.DataPipeline(source, ids, wds.batched(4, collation_fn=list))
    with source:
        received = [*source.track(stages), *islice(source.track(stages), 3)]
        source.load_state_dict(source.state_at(1, 1))
        return received + list(source.track(stages))


def by_hand(ledger: Path) -> Ids:
    """The ids of a DataLoader over a dataset that the library does not know."""
    batches = DataLoader(range(RECORDS), batch_sampler=copy.copy(FEED.sampler))
    received: Ids = []
    with Ledger(ledger, FEED) as noted:
        for step, ids in enumerate(chain(batches, batches)):
            noted.delivered(step)
            received.append(ids.tolist())
    return received


# The save of step 2 of the second epoch is the last one before the end in its step 3.
FITTED = [*range(STEPS + 3), *range(STEPS + 2, 2 * STEPS)]

ROUTES: dict[str, tuple[Callable[[Path], Ids], list[int]]] = {
    "numpy": (lambda path: loop(NumpyLoader(FEED, ledger=path)), ROLLED_BACK),
    "torch": (lambda path: loop(TorchLoader(FEED, device="cpu", ledger=path)), ROLLED_BACK),
    "torch, workers": (
        lambda path: loop(TorchLoader(FEED, device="cpu", num_workers=2, ledger=path)),
        ROLLED_BACK,
    ),
    "torch, dataloader": (
        lambda path: passes(lambda loader: loader.dataloader(), TorchLoader(FEED, ledger=path)),
        WHOLE,
    ),
    "tensorflow": (lambda path: loop(TensorFlowLoader(FEED, ledger=path)), ROLLED_BACK),
    "tensorflow, track": (tracked, WHOLE),
    "tensorflow, dataset": (
        lambda path: passes(lambda loader: loader.dataset, TensorFlowLoader(FEED, ledger=path)),
        WHOLE,
    ),
    "keras": (fitted, FITTED),
    "webdataset": (pipeline, ROLLED_BACK),
    "by hand": (by_hand, WHOLE),
    "jax": (lambda path: loop(JaxLoader(FEED, ledger=path)), ROLLED_BACK),
}


@pytest.mark.parametrize("route", ROUTES)
def test_who_reports_what_loop_received(route: str, tmp_path: Path) -> None:
    work, steps = ROUTES[route]
    received = work(tmp_path / "ledger.jsonl")
    assert len(received) == len(steps)
    for step in range(2 * STEPS):
        ids = [received[number] for number, ran in enumerate(steps) if ran == step]
        requests = who(tmp_path / "ledger.jsonl", FEED, step)
        assert [request.ids.tolist() for request in requests] == ids, step
    for record in (0, RECORDS - 1):
        ran = [step for step, ids in zip(steps, received, strict=True) if record in ids]
        assert when(tmp_path / "ledger.jsonl", FEED, record) == ran
    with NumpyLoader(FEED, ledger=tmp_path / "numpy.jsonl") as loader:
        assert sum(1 for _ in range(EPOCHS) for _ in loader) == 2 * STEPS
    assert diff(tmp_path / "ledger.jsonl", tmp_path / "numpy.jsonl") is None


def test_choose_writes_ledger(tmp_path: Path) -> None:
    sampler = PKBatchSampler.of_classes(3, p=2, k=1, seed=0, batches_per_epoch=4)
    datasets = [tf.data.Dataset.from_tensors(number).repeat() for number in range(3)]
    with choose(sampler, datasets, ledger=tmp_path / "ledger.jsonl") as loader:
        received = [batch.numpy().tolist() for batch in loader]
    ids = [who(tmp_path / "ledger.jsonl", sampler, step)[0].ids for step in range(4)]
    assert [sampler.group_of(each).tolist() for each in ids] == received
