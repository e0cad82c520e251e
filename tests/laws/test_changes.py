"""After changes, the batches are those of the final schedule from step 0, on every route."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import grain
import keras
import numpy as np
import pytest
import tensorflow as tf
import webdataset as wds
from support.cases import mark_long
from torchdata.stateful_dataloader import StatefulDataLoader

from twinfeed import (
    BatchSampler,
    DatasetSource,
    DecodeError,
    Feed,
    JaxLoader,
    MixtureSampler,
    NumpyLoader,
    PKBatchSampler,
    RandomSampler,
    RecordDataset,
    RequestSampler,
    ResumeCallback,
    Sampler,
    Selector,
    ShardShuffleSampler,
    TensorFlowLoader,
    TorchLoader,
    WeightedSampler,
    as_tensors,
    choose,
    choose_samples,
    diff,
    pack,
    samples,
    when,
    who,
)
from twinfeed.loaders.grain import as_map_dataset

pytestmark = [
    pytest.mark.usefixtures("graphs_as_written"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

RECORDS, STEPS, TOTAL = 48, 24, 60
LABELS = np.arange(RECORDS) // 4
SOURCE = DatasetSource({"x": np.arange(RECORDS, dtype=np.float32)}, digest="0 to 47")
Changes = dict[int, int]
Ids = list[list[int]]


def pk(changes: Changes) -> PKBatchSampler:
    """A stream whose P changes, and whose batches have 8 records all the same."""
    k = {step: 8 // p for step, p in changes.items()}
    return PKBatchSampler(LABELS, p=changes, k=k, seed=3, batches_per_epoch=STEPS)


def feed(changes: Changes, **options: Any) -> Feed:
    return Feed(SOURCE, pk(changes), **options)


def drawn(changes: Changes, rank: int = 0, world: int = 1) -> Ids:
    """The ids of a run that had the final schedule from its first step on."""
    sampler = pk(changes).shard(rank, world)
    return [sampler.batch(*divmod(step, STEPS)).tolist() for step in range(TOTAL)]


def train(loader: Any, changes: Changes, calls: dict[int, int]) -> Iterator[list[int]]:
    """Yield the ids that a loop receives up to step `TOTAL`.

    `calls` has the P of a change for each step after which `change` is called. The steps from which
    they act are added to `changes`.
    """
    while loader.global_step < TOTAL:
        for batch in loader:
            if loader.global_step in calls:
                ahead = 2 * STEPS if loader.lookahead is None else loader.lookahead
                at = loader.global_step + ahead
                changes[at] = calls[loader.global_step]
                asked = {"at": at} if loader.lookahead is None else {}
                assert loader.change(pk(changes), **asked) == at
            yield np.asarray(batch["id"]).tolist()
            if loader.global_step == TOTAL:
                return


LOADERS: dict[str, Callable[..., Any]] = {
    "numpy": NumpyLoader,
    "numpy, prefetch": lambda fed, **o: NumpyLoader(fed, prefetch=3, threads=3, **o),
    "torch": lambda fed, **o: TorchLoader(fed, device="cpu", prefetch=2, **o),
    "torch, workers": lambda fed, **o: TorchLoader(
        fed, device="cpu", num_workers=4, persistent_workers=True, **o
    ),
    "jax": JaxLoader,
    "tensorflow": TensorFlowLoader,
}


@pytest.mark.parametrize("name", LOADERS)
def test_loop_receives_final_schedule(name: str, tmp_path: Path) -> None:
    """Of two changes; and `who`, `when` and `diff` say so."""
    changes, path = {0: 2}, tmp_path / "ledger.jsonl"
    with LOADERS[name](feed(changes), ledger=path) as loader:
        received = list(train(loader, changes, {4: 4, 9: 8}))
        assert loader.state_dict()["fingerprint"] == pk(changes).fingerprint
    assert len(changes) == 3
    assert received == drawn(changes)
    assert received != drawn({0: 2})
    final = feed(changes)
    for step in range(TOTAL):
        (request,) = who(path, final, step)
        assert request.ids.tolist() == received[step]
    ran = [step for step, ids in enumerate(received) if 5 in ids]
    assert when(path, final, 5) == ran
    with NumpyLoader(feed(changes), ledger=tmp_path / "whole.jsonl") as loader:
        assert list(train(loader, changes, {})) == received
    assert diff(path, tmp_path / "whole.jsonl") is None


def test_dataloader_of_torch_draws_final_schedule() -> None:
    """What its loop has received is not known, so the step is named by `at=`."""
    changes = {0: 2}
    loader = TorchLoader(feed(changes), device="cpu")
    dataloader = loader.dataloader()
    received = []
    for batch in chain(dataloader, dataloader):
        received.append(batch["id"].tolist())
        if len(received) in (4, STEPS + 2):
            with pytest.raises(ValueError, match="comes too late"):
                loader.change(pk({**changes, len(received) - 1: 8}), at=len(received) - 1)
            changes[len(received) + 5] = 4 * len(changes)
            loader.change(pk(changes), at=len(received) + 5)
    assert received == drawn(changes)[: 2 * STEPS]


CASES = [
    (call, call + more, world, workers)
    for workers in (0, 4)
    for world in (1, 2, 4)
    for call in range(1, 30, 1 + 2 * workers)  # workers take long to start
    for more in (1, 20)
]
SHORT = [(1, 6, 2, 0), (22, 42, 1, 0), (24, 25, 4, 0)]


@pytest.mark.parametrize(
    ("call", "stop", "world", "workers"),
    [*SHORT, *[pytest.param(*case, marks=pytest.mark.long) for case in CASES]],
)
def test_stopped_run_resumes_by_final_schedule(
    call: int, stop: int, world: int, workers: int
) -> None:
    """Each rank is stopped after its change and resumed from a state before or after it."""
    for rank in range(world):
        changes = {0: 4}
        options = {"device": "cpu", "num_workers": workers, "prefetch": 1 + call % 3}
        states, received = [], []
        with TorchLoader(feed(changes).shard(rank, world), **options) as loader:
            for ids in train(loader, changes, {call: 8}):
                received.append(ids)
                states.append(loader.state_dict())
                if len(received) == stop:
                    break
        for saved in {call - 1, stop - 1}:
            with TorchLoader(feed(changes).shard(rank, world), device="cpu") as loader:
                loader.load_state_dict(states[saved])
                rest = list(train(loader, changes, {}))
            assert received[: saved + 1] + rest == drawn(changes, rank, world)


def test_killed_run_resumes_by_final_schedule(tmp_path: Path) -> None:
    """The ledger of the run that was killed after its change, and of its resumption."""
    path, changes = tmp_path / "ledger.jsonl", {0: 2}
    child = os.fork()
    if not child:
        warnings.simplefilter("ignore")
        for number, _ in enumerate(train(NumpyLoader(feed(changes), ledger=path), changes, {5: 4})):
            if number == 12:
                os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    changes[6] = 4  # the look-ahead is 1
    with NumpyLoader(feed(changes), ledger=path) as loader:
        loader.load_state_dict(loader.state_at(0, 4))
        rest = list(train(loader, changes, {}))
    expected, final = drawn(changes), feed(changes)
    assert rest == expected[4:]
    for step in range(TOTAL):
        times = [request.ids.tolist() for request in who(path, final, step)]
        assert times == [expected[step]] * (2 if 4 <= step <= 12 else 1)


INDEX = pack([{"x": np.float32(n)} for n in range(RECORDS)], mkdtemp(), container="tar")["data"]
CLASSES = RECORDS // 4
Part = tuple[Ids, Any]  # the ids of some consecutive steps, and the state after them


def of_classes(changes: Changes) -> PKBatchSampler:
    """As `pk`, but of classes whose records the sampler does not know."""
    k = {step: 8 // p for step, p in changes.items()}
    return PKBatchSampler.of_classes(CLASSES, p=changes, k=k, seed=3, batches_per_epoch=STEPS)


def received(loader: Any, state: Any, steps: int, batches_of: Callable[[Any], Any] = iter) -> Part:
    """Iterate over a loader from a state on."""
    with loader:
        if state is not None:
            loader.load_state_dict(state)
        batches = chain.from_iterable(batches_of(loader) for _ in count())
        return [np.asarray(batch).tolist() for batch in islice(batches, steps)], loader.state_dict()


def from_pipeline(changes: Changes, state: Any, steps: int) -> Part:
    source = samples(Feed(INDEX, pk(changes)))
    ids = wds.map(lambda sample: int(sample["__key__"]))
    pipeline = wds.DataPipeline(source, ids, wds.batched(8, collation_fn=list))
    return received(source, state, steps, lambda source: source.track(pipeline))


def from_pipelines(changes: Changes, state: Any, steps: int) -> Part:
    pipelines = [[number] * TOTAL for number in range(CLASSES)]
    return received(choose_samples(of_classes(changes), pipelines), state, steps)


def from_datasets(changes: Changes, state: Any, steps: int) -> Part:
    datasets = [tf.data.Dataset.from_tensors(number).repeat() for number in range(CLASSES)]
    return received(choose(of_classes(changes), datasets), state, steps)


def from_selector(changes: Changes, state: Any, steps: int) -> Part:
    return received(Selector(of_classes(changes), CLASSES), state, steps)


def from_grain(changes: Changes, state: Any, steps: int) -> Part:
    few = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    batches = iter(as_map_dataset(feed(changes), epochs=3).to_iter_dataset(few))
    if state is not None:
        batches.set_state(state)
    return [next(batches)["id"].tolist() for _ in range(steps)], batches.get_state()


def from_dataloader(changes: Changes, state: Any, steps: int) -> Part:
    fed = feed(changes)
    loader = StatefulDataLoader(
        RecordDataset(fed), batch_sampler=RequestSampler(fed), collate_fn=as_tensors
    )
    if state is not None:
        loader.load_state_dict(state)
    batches = chain.from_iterable(iter(loader) for _ in count())
    return [batch["id"].tolist() for batch in islice(batches, steps)], loader.state_dict()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("stop", mark_long([STEPS + 6, 5, STEPS], but_every=3))
@pytest.mark.parametrize(
    ("route", "stream"),
    [
        (from_pipeline, pk),
        (from_pipelines, of_classes),
        (from_datasets, of_classes),
        (from_selector, of_classes),
        (from_grain, pk),
        (from_dataloader, pk),
    ],
)
def test_route_without_change_resumes_by_longer_schedule(
    route: Callable[[Changes, Any, int], Part], stream: Callable[[Changes], Any], stop: int
) -> None:
    """It is stopped, and resumed by a sampler that changes at the step of the state."""
    changes = {0: 2, 3: 4}
    first, state = route(changes, None, stop)
    changes[stop] = 2
    rest, state = route(changes, state, 4)
    changes[stop + 4] = 8
    rest += route(changes, state, TOTAL - stop - 4)[0]
    final = stream(changes)
    batches = [final.batch(*divmod(step, STEPS)) for step in range(TOTAL)]
    if stream is of_classes:
        batches = [final.group_of(ids) for ids in batches]
    assert first + rest == [batch.tolist() for batch in batches]


def other_shape(loader: Any) -> None:
    loader.change(
        PKBatchSampler(LABELS, p=2, k={0: 4, 50: 3}, seed=3, batches_per_epoch=STEPS), at=50
    )


def drawn_already(loader: Any) -> None:
    """TensorFlow draws the steps 3 to 6 in one call."""
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    loader.change(pk({0: 2, 5: 4}), at=5)


def test_excluding_a_record_finds_transform_that_writes_to_arrays() -> None:
    """Another record comes twice then, and samples share arrays: it is said now, not in the next
    epoch.
    """

    def write(sample: dict[str, Any]) -> dict[str, Any]:
        sample["x"] += 1
        return {"x": sample["x"]}

    order = RandomSampler(RECORDS, seed=0)
    source = DatasetSource({"x": np.zeros((RECORDS, 2))})
    with NumpyLoader(Feed(source, BatchSampler(order, batch_size=8), transform=write)) as loader:
        received = [next(iter(loader))["id"].tolist()]
        excluding = RandomSampler(RECORDS, seed=0, exclude={40: [3]})
        with pytest.raises(DecodeError, match="copy the array"):
            loader.change(BatchSampler(excluding, batch_size=8))
        received += [batch["id"].tolist() for batch in loader]
        assert received == [ids.tolist() for ids in loader.feed.sampler.batches(0, 0, len(loader))]


NEVER = 1000


@pytest.mark.parametrize(
    "order",
    [
        lambda step: RandomSampler(RECORDS, seed=0, exclude={step: [3, 40]}),
        lambda step: ShardShuffleSampler(
            [20, 28], block=4, window=3, seed=0, exclude={step: [3, 40]}
        ),
        lambda step: WeightedSampler({0: np.arange(RECORDS), step: np.ones(RECORDS)}, seed=0),
        lambda step: MixtureSampler(
            [RandomSampler(24, seed=0), RandomSampler(16, seed=1), RandomSampler(8, seed=2)],
            weights={0: [3, 1, 0]} if step == NEVER else {0: [3, 1, 0], step: [1, 2, 1]},
            num_samples=RECORDS,
            seed=0,
        ),
    ],
    ids=["random", "shards", "weighted", "mixture"],
)
def test_every_schedule_may_change_at_any_step(order: Callable[[int], Sampler]) -> None:
    """From each step of an epoch and of the next, with shards that are read ahead."""
    index = pack([{"x": np.float32(n)} for n in range(RECORDS)], mkdtemp())["data"]
    for call in range(1, 12):
        before, final = (BatchSampler(order(step), batch_size=8) for step in (NEVER, call + 3))
        with NumpyLoader(Feed(index, before), prefetch=2, threads=0, readahead=100) as loader:
            received = []
            while loader.epoch < 3:
                for batch in loader:
                    assert batch["x"].tolist() == batch["id"].tolist()
                    received.append(batch["id"].tolist())
                    if loader.global_step == call:
                        assert loader.change(final) == call + 3
        assert received == [
            ids.tolist() for epoch in range(3) for ids in final.batches(epoch, 0, 6)
        ]


@pytest.mark.parametrize(
    ("loader", "call", "word"),
    [
        (TensorFlowLoader, lambda loader: loader.change(pk({0: 2, 50: 4})), "at= must be given"),
        (TensorFlowLoader, other_shape, "fixed_size of the sampler would change from 8 to None"),
        (TensorFlowLoader, drawn_already, "from step 5 on comes too late, .* give all ranks"),
        (samples, lambda loader: loader.change(pk({0: 2, 50: 4})), "workers draw by themselves"),
    ],
)
def test_change_that_framework_cannot_serve_is_refused(
    loader: Callable[..., Any], call: Callable[[Any], None], word: str
) -> None:
    """A change that it cannot serve is refused, and the batches stay those of before."""
    index = pack([{"x": np.float32(n)} for n in range(RECORDS)], mkdtemp())["data"]
    with loader(Feed(index, pk({0: 2}))) as refusing:
        with pytest.raises(ValueError, match=word):
            call(refusing)
        assert refusing.state_dict()["fingerprint"] == pk({0: 2}).fingerprint


def test_sample_seeds_do_not_change() -> None:
    changes = {0: 2}

    def seed(sample: dict[str, Any]) -> dict[str, Any]:
        return {"drawn": np.uint64(sample["seed"])}

    with NumpyLoader(feed(changes, transform=seed)) as loader:
        seeds = []
        for batch in loader:
            seeds.append(batch["drawn"].tolist())
            if loader.step == 2:
                changes[2 + loader.lookahead] = 4
                loader.change(pk(changes))
    assert seeds == [pk(changes).seeds(0, step).tolist() for step in range(STEPS)]


def test_keras_fit_trains_by_final_schedule() -> None:
    received, changes = [], {0: 2}

    class Model(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            received.append(data[0].numpy()[:, 0].astype(int).tolist())
            return {"loss": tf.constant(0.0)}

    class Change(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if resume.loader.global_step == 3:
                changes[STEPS + 5] = 4
                assert resume.loader.change(pk(changes), at=STEPS + 5) == STEPS + 5

        def get_state(self) -> dict[str, Any]:
            return {}

        def set_state(self, state: dict[str, Any]) -> None:
            pass

    inputs = keras.Input([1])
    model = Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", run_eagerly=True)
    resume = ResumeCallback(TensorFlowLoader(feed(changes)), mkdtemp())
    with resume.loader:
        resume.fit(
            model,
            lambda batch: (tf.expand_dims(batch["x"], 1), batch["x"]),
            epochs=2,
            callbacks=Change(),
            verbose=0,
        )
    assert received == drawn(changes)[: 2 * STEPS]
