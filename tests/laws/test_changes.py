"""A run resumed with a longer schedule is one that had it from step 0 on, on every route."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, count, islice
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
    TensorFlowLoader,
    TorchLoader,
    WeightedSampler,
    as_tensors,
    choose,
    pack,
    samples,
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
    return Feed(SOURCE, pk({0: 2}), **options).with_sampler(pk(changes))


def drawn(changes: Changes, rank: int = 0, world: int = 1) -> Ids:
    """The ids of a run that had the final schedule from its first step on."""
    sampler = pk(changes).shard(rank, world)
    return [sampler.batch(*divmod(step, STEPS)).tolist() for step in range(TOTAL)]


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


def from_loader(
    loader: Callable[..., Any], options: dict[str, Any], changes: Changes, state: Any, steps: int
) -> Part:
    make = partial(loader, feed(changes), **options)
    return received(make(), state, steps, lambda made: (batch["id"] for batch in made))


def from_torch_dataloader(changes: Changes, state: Any, steps: int) -> Part:
    """What its loop has received is only known at the end of a pass."""
    loader: TorchLoader = TorchLoader(feed(changes), device="cpu")
    dataloader = loader.dataloader()
    ids = received(loader, state, steps, lambda _: (batch["id"] for batch in dataloader))[0]
    start = 0 if state is None else state["epoch"] * STEPS + state["step"]
    return ids, loader.state_at(*divmod(start + steps, STEPS))


def from_pipeline(changes: Changes, state: Any, steps: int) -> Part:
    source = samples(Feed(INDEX, pk(changes)))
    ids = wds.map(lambda sample: int(sample["__key__"]))
    pipeline = wds.DataPipeline(source, ids, wds.batched(8, collation_fn=list))
    return received(source, state, steps, lambda source: source.track(pipeline))


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


LOADERS: dict[str, Callable[[Changes, Any, int], Part]] = {
    name: partial(from_loader, loader, options)
    for name, loader, options in [
        ("numpy", NumpyLoader, {}),
        ("numpy, ahead", NumpyLoader, {"prefetch": 3, "threads": 3}),
        ("torch", TorchLoader, {"device": "cpu", "prefetch": 2}),
        ("torch, workers", TorchLoader, {"device": "cpu", "num_workers": 2}),
        ("jax", JaxLoader, {}),
        ("tensorflow", TensorFlowLoader, {}),
    ]
}
ROUTES = [
    *((route, pk) for route in LOADERS.values()),
    (from_torch_dataloader, pk),
    (from_pipeline, pk),
    (from_datasets, of_classes),
    (from_selector, of_classes),
    (from_grain, pk),
    (from_dataloader, pk),
]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("stop", mark_long([STEPS + 6, 5, STEPS], but_every=3))
@pytest.mark.parametrize(
    ("route", "stream"),
    ROUTES,
    ids=[*LOADERS, *(route.__name__ for route, _ in ROUTES[len(LOADERS) :])],
)
def test_longer_schedule_resumes_as_if_it_had_been_there_from_step_0(
    route: Callable[[Changes, Any, int], Part], stream: Callable[[Changes], Any], stop: int
) -> None:
    """Batches and states; the change is at the step of the state, and later."""
    changes = {0: 2, 3: 4}
    first, state = route(changes, None, stop)
    changes[stop] = 2
    rest, state = route(changes, state, 4)
    changes[stop + 6] = 8
    more, state = route(changes, state, TOTAL - stop - 4)
    final = stream(changes)
    batches = [final.batch(*divmod(step, STEPS)) for step in range(TOTAL)]
    if stream is of_classes:
        batches = [final.group_of(ids) for ids in batches]
    assert first + rest + more == [batch.tolist() for batch in batches]
    whole, end = route(changes, None, TOTAL)
    assert whole == first + rest + more
    assert state == end


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (4, 2), (2, 1)])
def test_longer_schedule_resumes_on_any_number_of_ranks(before: int, after: int) -> None:
    """From the state of any rank, to the end of the epoch."""
    for rank in range(before):
        with NumpyLoader(feed({0: 4}).shard(rank, before)) as loader:
            first = [batch["id"].tolist() for batch in islice(loader, 7)]
            state = loader.state_dict()
        changes = {0: 4, 7: 8, 9: 4}
        assert first == drawn(changes, rank, before)[:7]
        for resumed in range(after):
            with NumpyLoader(feed(changes).shard(resumed, after)) as loader:
                loader.load_state_dict(state)
                rest = [batch["id"].tolist() for batch in loader]
            assert rest == drawn(changes, resumed, after)[7:STEPS]


NEVER = 1000


@pytest.mark.parametrize(
    "order",
    [
        lambda step: WeightedSampler({0: np.arange(RECORDS), step: np.ones(RECORDS)}, seed=0),
        lambda step: MixtureSampler(
            [RandomSampler(24, seed=0), RandomSampler(16, seed=1), RandomSampler(8, seed=2)],
            weights={0: [3, 1, 0]} if step == NEVER else {0: [3, 1, 0], step: [1, 2, 1]},
            num_samples=RECORDS,
            seed=0,
        ),
    ],
    ids=["weighted", "mixture"],
)
def test_every_schedule_may_change_at_any_step(order: Callable[[int], Sampler]) -> None:
    """In each step of an epoch and of the next, with shards that are read ahead."""
    index = pack([{"x": np.float32(n)} for n in range(RECORDS)], mkdtemp())["data"]
    for step in range(1, 12):
        before, final = (BatchSampler(order(change), batch_size=8) for change in (NEVER, step))
        ids: Ids = []
        state = None
        for sampler, stop in ((before, step), (final, 18)):
            with NumpyLoader(Feed(index, sampler), prefetch=2, readahead=100) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                batches = chain.from_iterable(iter(loader) for _ in count())
                for batch in islice(batches, stop - len(ids)):
                    assert batch["x"].tolist() == batch["id"].tolist()
                    ids.append(batch["id"].tolist())
                state = loader.state_dict()
        assert ids == [made.tolist() for epoch in range(3) for made in final.batches(epoch, 0, 6)]


def test_longer_schedule_does_not_change_sample_seeds() -> None:
    changes = {0: 2, 5: 4}

    def seed(sample: dict[str, Any]) -> dict[str, Any]:
        return {"drawn": np.uint64(sample["seed"])}

    with NumpyLoader(feed(changes, transform=seed)) as loader:
        seeds = [batch["drawn"].tolist() for batch in loader]
    assert seeds == [pk({0: 2}).seeds(0, step).tolist() for step in range(STEPS)]


def test_keras_fit_goes_on_by_longer_schedule() -> None:
    ids: Ids = []

    class Model(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            ids.append(data[0].numpy()[:, 0].astype(int).tolist())
            return {"loss": tf.constant(0.0)}

    folder, changes = mkdtemp(), {0: 2}
    for epochs in (1, 2):
        inputs = keras.Input([1])
        model = Model(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", run_eagerly=True)
        with TensorFlowLoader(feed(changes)) as loader:
            ResumeCallback(loader, folder).fit(
                model,
                lambda batch: (tf.expand_dims(batch["x"], 1), batch["x"]),
                epochs=epochs,
                verbose=0,
            )
        changes[STEPS] = 4
    assert ids == drawn({0: 2, STEPS: 4})[: 2 * STEPS]
