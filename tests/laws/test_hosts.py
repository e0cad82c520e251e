"""Every sampler in the loaders of other libraries: the ids delivered are those of NumpyLoader."""

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain, islice, repeat
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import grain
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from absl import flags
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from support import PROGRAMS
from support.datasets import Numbers
from support.programs import run
from support.sampler_cases import CASES
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from twinfeed.loaders import Feed, NumpyLoader
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    IdSequence,
    PKBatchSampler,
    RandomSampler,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # what the hosts are about to retire

Delivered = list[list[int]]
Host = Callable[..., tuple[Delivered, Any]]
"""`host(stream, state, steps, **options)`: deliver so many batches from a state on, and return them
with the state after them. The state is None at the start.
"""

STREAMS = {
    name: make
    for name, make in CASES
    if 0 < make().num_records < 1000 and make().traits.num_ids is None and not make().traits.padded
}


def is_order(stream: BatchStream) -> bool:
    """Return whether a host can make the batches, as each epoch of the order is cut into them."""
    if not isinstance(stream, BatchSampler) or stream._inner_sampler.traits.needs_steps:
        return False
    if stream._replacements is not None:
        return False
    return len(stream) == -(-len(stream._inner_sampler) // stream.batch_size // stream.world_size)


ORDERS = [name for name, make in STREAMS.items() if is_order(make())]


def take(passes: Iterable[Iterable[Any]], steps: int) -> Delivered:
    batches = islice(chain.from_iterable(passes), steps)
    return [batch["number"].tolist() for batch in batches]


def order_of(stream: BatchStream) -> Any:
    """Return a new sampler of a stream's records, of its rank."""
    assert isinstance(stream, BatchSampler)
    order = copy.copy(stream._inner_sampler)
    ranks = stream.world_size
    return order.shard(stream.rank, ranks, uneven="keep") if ranks > 1 else order


def parts_of(stream: BatchStream) -> dict[str, Any]:
    """Return what a DataLoader is given: a sampler where torch can make the batches."""
    if is_order(stream):
        return {"sampler": order_of(stream), "batch_size": stream.batch_size}
    return {"batch_sampler": stream}


def run_stateful(loader: Any, state: Any, steps: int) -> tuple[Delivered, Any]:
    if state is not None:
        loader.load_state_dict(state)
    return take(repeat(loader), steps), copy.deepcopy(loader.state_dict())


def stateful(stream: BatchStream, state: Any, steps: int, **options: Any) -> tuple[Delivered, Any]:
    return run_stateful(StatefulDataLoader(Numbers(), **parts_of(stream), **options), state, steps)


def stateful_batches(stream: BatchStream, state: Any, steps: int) -> tuple[Delivered, Any]:
    return run_stateful(StatefulDataLoader(Numbers(), batch_sampler=stream), state, steps)


def accelerated(stream: BatchStream, state: Any, steps: int) -> tuple[Delivered, Any]:
    """As the page does it: skip the batches of the epoch, and set the sampler's epoch."""
    parts = parts_of(stream)
    loader = prepare_data_loader(DataLoader(Numbers(), **parts), put_on_device=False)
    first, skipped = divmod(state or 0, len(loader))

    def passes() -> Iterator[Any]:
        for epoch in range(first, first + steps + 1):
            rest = skip_first_batches(loader, skipped if epoch == first else 0)
            rest.set_epoch(epoch)
            next(iter(parts.values())).set_epoch(epoch)
            yield rest

    return take(passes(), steps), (state or 0) + steps


def by_grain(stream: BatchStream, state: Any, steps: int, workers: int = 0) -> Any:
    ids = IdSequence(order_of(stream), epochs=4)
    dataset = grain.MapDataset.source(ids).map(Numbers().__getitem__).batch(stream.batch_size)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    processes = grain.MultiprocessingOptions(num_workers=workers)
    iterator = iter(dataset.to_iter_dataset(options).mp_prefetch(processes))
    if state is not None:
        iterator.set_state(state)
    delivered = take([iterator], steps)
    state = json.loads(json.dumps(iterator.get_state()))
    iterator.close()
    return delivered, state


def by_tf_data(stream: BatchStream, state: Any, steps: int) -> tuple[Delivered, Any]:
    size, start = stream.batch_size, state or 0
    ids = IdSequence(order_of(stream), epochs=4)[start * size :]
    dataset = tf.data.Dataset.from_tensor_slices(np.asarray(ids)).batch(size)
    return [batch.tolist() for batch in dataset.take(steps).as_numpy_iterator()], start + steps


class Batches(keras.utils.PyDataset):
    """Item n is the n-th batch from a step on."""

    num_batches = None

    def __init__(self, stream: BatchStream, start: int) -> None:
        super().__init__()
        self.stream, self.start = stream, start

    def __getitem__(self, item: int) -> Any:
        return (self.stream.batch(*divmod(self.start + item, len(self.stream))),)


class Model(keras.Model):
    """A model that keeps the ids of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.delivered: Delivered = []
        self.compile(run_eagerly=True)

    def train_step(self, data: Any) -> dict[str, float]:
        self.delivered.append(data[0].numpy().tolist())
        return {"loss": 0.0}


def by_keras(stream: BatchStream, state: Any, steps: int) -> tuple[Delivered, Any]:
    model, start = Model(), state or 0
    model.fit(Batches(stream, start), steps_per_epoch=steps, verbose=0)
    return model.delivered, start + steps


def by_loop(stream: BatchStream, state: Any, steps: int) -> tuple[Delivered, Any]:
    """A loop of one's own, as in JAX: the number of the step is the state."""
    start = state or 0
    numbers = range(start, start + steps)
    return [stream.batch(*divmod(n, len(stream))).tolist() for n in numbers], start + steps


def by_lightning(stream: BatchStream, state: Any, steps: int) -> tuple[Delivered, Any]:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from support.lightning_module import Notes, trainer

    start, saved = state or (0, None)
    stop, folder = start + steps, mkdtemp(dir=".")
    module = Notes(lambda batch: batch["number"].tolist())
    loader: Any = StatefulDataLoader(Numbers(), **parts_of(stream))
    saver = ModelCheckpoint(folder, "state", every_n_train_steps=stop)
    options = {"max_steps": stop, "use_distributed_sampler": False, "callbacks": [saver]}
    trainer(Path(folder), **options).fit(module, loader, ckpt_path=saved)
    return module.trained, (stop, f"{folder}/state.ckpt")


def by_transformers(stream: BatchStream, state: Any, steps: int) -> tuple[Delivered, Any]:
    import transformers

    start, saved = state or (0, None)
    sampler, delivered, stop, folder = order_of(stream), [], start + steps, mkdtemp(dir=".")

    class Trainer(transformers.Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return sampler

        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> torch.Tensor:
            delivered.append(inputs["number"].tolist())
            return model(torch.zeros(1)).sum()

    arguments = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=stream.batch_size,
        remove_unused_columns=False,
        max_steps=stop,
        save_steps=stop,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=Numbers())
    trainer.train(resume_from_checkpoint=saved)
    return delivered, (stop, f"{folder}/checkpoint-{stop}")


SERVED: list[BatchStream] = []  # the stream of `served`, which a trainer pickles by its name


def served(dataset: Any, **_: Any) -> BatchStream:
    return SERVED[-1]


def by_sentence_transformers(stream: BatchStream, state: Any, steps: int) -> tuple[Delivered, Any]:
    """The label of each sentence is the number of its record."""
    import datasets
    import sentence_transformers as st
    from sentence_transformers.sentence_transformer.modules import BoW, Dense

    start, saved = state or (0, None)
    delivered, stop, folder = [], start + steps, mkdtemp(dir=".")
    SERVED[:] = [stream]

    class Trainer(st.SentenceTransformerTrainer):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> torch.Tensor:
            delivered.append(inputs["label"].tolist())
            return next(model.parameters()).sum()

    columns = {"sentence": ["word"] * stream.num_records, "label": range(stream.num_records)}
    arguments = st.SentenceTransformerTrainingArguments(
        folder,
        batch_sampler=served,
        max_steps=stop,
        save_steps=stop,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    modules = [BoW(["word"]), Dense(1, 1)]
    trainer = Trainer(
        st.SentenceTransformer(modules=modules, device="cpu"),
        arguments,
        train_dataset=datasets.Dataset.from_dict(columns),
        loss=torch.nn.Identity(),
    )
    trainer.train(resume_from_checkpoint=saved)
    return delivered, (stop, f"{folder}/checkpoint-{stop}")


BY_ORDER: dict[str, Host] = {"Grain": by_grain, "tf.data": by_tf_data}
BY_STREAM: dict[str, Host] = {
    "StatefulDataLoader": stateful,
    "StatefulDataLoader, batch_sampler": stateful_batches,
    "Accelerate": accelerated,
    "a loop of one's own": by_loop,
}
SLOW: dict[str, Host] = {"PyDataset of Keras": by_keras, "Lightning": by_lightning}
SLOW_BY_ORDER: dict[str, Host] = {"Trainer of transformers": by_transformers}
EXTRA: dict[str, Host] = {"sentence-transformers": by_sentence_transformers}
HOSTS = BY_ORDER | BY_STREAM | SLOW | SLOW_BY_ORDER | EXTRA


def cases_of(host: str) -> list[str]:
    return ORDERS if host in BY_ORDER | SLOW_BY_ORDER else [*STREAMS]


@cache
def expected_of(name: str) -> list[int]:
    """Return the ids of four epochs of a NumpyLoader."""
    loader = NumpyLoader(Feed({"x": np.zeros(STREAMS[name]().num_records)}, STREAMS[name]()))
    return [*chain.from_iterable(batch["id"].tolist() for _ in range(4) for batch in loader)]


def check(host: str, name: str, stop: int, **options: Any) -> None:
    """Stop after so many batches, and take the rest of the epoch and a batch more."""
    deliver, make = HOSTS[host], STREAMS[name]
    rest = len(make()) - stop % len(make()) + 1
    first, state = deliver(make(), None, stop, **options)
    second, _ = deliver(make(), state, rest, **options)
    assert (len(first), len(second)) == (stop, rest)
    ids = [*chain.from_iterable(first + second)]
    assert ids == expected_of(name)[: len(ids)]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags.FLAGS.mark_as_parsed()  # which Grain's workers ask for


@pytest.mark.parametrize(
    "host",
    [
        host if host in BY_ORDER | BY_STREAM else pytest.param(host, marks=pytest.mark.long)
        for host in HOSTS
        if host not in EXTRA
    ],
)
def test_every_sampler_resumes_at_one_step(host: str) -> None:
    """At one step, another for each."""
    for number, name in enumerate(cases_of(host)):
        check(host, name, 1 + number % (len(STREAMS[name]()) + 1))


@pytest.mark.long
@pytest.mark.parametrize("name", [*STREAMS][::6])  # a second each
def test_some_samplers_resume_in_sentence_transformers(name: str) -> None:
    pytest.importorskip("sentence_transformers", reason="of the extra `hosts`")
    check("sentence-transformers", name, 1 + len(name) % (len(STREAMS[name]()) + 1))


@pytest.mark.long
@pytest.mark.parametrize("host", [*BY_ORDER, *BY_STREAM])
def test_every_sampler_resumes_at_every_step(host: str) -> None:
    for name in cases_of(host):
        for stop in range(1, len(STREAMS[name]()) + 2):
            check(host, name, stop)


@pytest.mark.long
@pytest.mark.parametrize("stop", range(1, 13))
@pytest.mark.parametrize("host", [*SLOW, *SLOW_BY_ORDER])
def test_slow_hosts_resume_at_every_step(host: str, stop: int) -> None:
    check(host, "random", stop)


@pytest.mark.long
@pytest.mark.parametrize("how", ["fork", "forkserver", "spawn"])
def test_workers_of_any_start_method_resume(how: str) -> None:
    names = [*STREAMS][::4] if how == "fork" else ["random"]
    for number, name in enumerate(names):
        stop = 1 + number % (len(STREAMS[name]()) + 1)
        check("StatefulDataLoader", name, stop, num_workers=2, multiprocessing_context=how)


@pytest.mark.long
@pytest.mark.parametrize("how", ["forkserver", "spawn"])
def test_workers_of_any_start_method_read_id_sequences(how: str) -> None:
    """All in one DataLoader, as its workers take seconds to start. They unpickle the samplers."""
    sequences = [IdSequence(order_of(STREAMS[name]()), epochs=4) for name in ORDERS]
    dataset = ConcatDataset([Subset(Numbers(), ids) for ids in sequences])
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": how}
    loader = DataLoader(dataset, batch_size=100, **options)
    delivered = chain.from_iterable(batch["number"].tolist() for batch in loader)
    assert [*delivered] == [*chain.from_iterable(map(expected_of, ORDERS))]


@pytest.mark.long
@pytest.mark.parametrize("stop", [5, 11])
def test_grain_workers_resume(stop: int) -> None:
    check("Grain", "random", stop, workers=2)


RANKED: list[Callable[[], BatchStream]] = [
    lambda: BatchSampler(RandomSampler(96, seed=3), batch_size=12),
    lambda: ExactOnceBatchSampler(96, batch_size=12),
    lambda: PKBatchSampler(np.arange(96) % 8, p=6, k=2, seed=3),
]
# Accelerate deals batches to ranks itself: examples/hosts/accelerate_ranks.py.
DEALT = [host for host in [*BY_ORDER, *BY_STREAM, "PyDataset of Keras"] if host != "Accelerate"]


@pytest.mark.parametrize("host", DEALT)
def test_hosts_resume_with_one_rank_then_three_then_two(host: str) -> None:
    """Each goes on from a state of the ranks before; a step of all ranks is a batch, as a set."""
    for make in RANKED[:1] if host in BY_ORDER else RANKED:
        start, state = 0, None
        for world_size in (1, 3, 2):
            ranks = [make().shard(rank, world_size) for rank in range(world_size)]
            runs = [HOSTS[host](rank, state, 5) for rank in ranks]
            for step, parts in enumerate(zip(*(ids for ids, _ in runs), strict=True), start):
                epoch, batch = divmod(step, 8)
                assert sorted(chain(*parts)) == sorted(make().batch(epoch, batch).tolist())
            start, state = start + 5, runs[-1][1]


@pytest.mark.long
@pytest.mark.parametrize("host", ["lightning", "transformers"])
def test_trainers_resume_with_one_rank_then_three_then_two(host: str, tmp_path: Path) -> None:
    stream = BatchSampler(RandomSampler(600, seed=0), batch_size=24)
    start = 0
    for stop, ranks in ((39, 1), (65, 3), (78, 2)):
        run(PROGRAMS / "host_ranks.py", host, str(tmp_path), str(stop), ranks=ranks)
        files = [tmp_path / f"{stop}-{rank}.json" for rank in range(ranks)]
        parts = [json.loads(file.read_text()) for file in files]
        assert [len(part) for part in parts] == [stop - start] * ranks
        for step, batch in enumerate(zip(*parts, strict=True), start):
            assert sorted(chain(*batch)) == sorted(stream.batch(*divmod(step, 25)).tolist())
        start = stop
