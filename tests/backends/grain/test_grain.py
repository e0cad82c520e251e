"""Batches through Grain: by global step, on threads and in workers, and states of one stream."""

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
import pytest
from absl import flags
from support import PROGRAMS
from support.batches import noted
from support.programs import PYTHON, QUIET
from support.refusals import Call, Refused

from twinfeed.loaders import Feed, Index, NumpyLoader, Seeded, pack
from twinfeed.loaders.grain import as_map_dataset
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    RandomSampler,
    ReuseSampler,
    StateMismatchError,
)

FEW = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
WORKERS = grain.MultiprocessingOptions(num_workers=2)


def brighter(sample: dict[str, Any]) -> dict[str, Any]:
    """An augmentation that draws from the sample's seed."""
    return sample | {"x": sample["x"] + np.random.default_rng(sample["seed"]).random(3, np.float32)}


@pytest.fixture(scope="module", autouse=True)
def _parsed() -> None:
    flags.FLAGS.mark_as_parsed()  # which Grain's workers ask for


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    records = [
        {"x": np.arange(3, dtype=np.float32) * n % 7 / 7, "word": b"%d" % n, "y": np.float32(n % 5)}
        for n in range(41)
    ]
    return pack(records, tmp_path_factory.mktemp("grain"))["data"]


def feed_of(index: Index, seed: int = 0) -> Feed:
    return Feed(index, BatchSampler(RandomSampler(41, seed=seed), batch_size=8), transform=brighter)


@pytest.fixture(scope="module")
def expected(index: Index) -> list[dict[str, Any]]:
    """The batches of three epochs."""
    loader = NumpyLoader(feed_of(index))
    return [noted(batch) for _ in range(3) for batch in loader]


def batches(index: Index, options: grain.ReadOptions = FEW, **rest: Any) -> grain.IterDataset:
    return as_map_dataset(feed_of(index, **rest), epochs=3).to_iter_dataset(options)


@pytest.mark.parametrize(("threads", "buffer"), [(0, 0), (1, 2), (4, 8), (16, 500)])
def test_dataset_index_is_global_step(
    index: Index, expected: list, threads: int, buffer: int
) -> None:
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffer)
    assert [noted(batch) for batch in batches(index, options)] == expected
    dataset = as_map_dataset(feed_of(index), epochs=3)
    assert [noted(batch) for batch in dataset[7:].to_iter_dataset(options)] == expected[7:]
    assert noted(dataset[13]) == expected[13]
    first_epoch = as_map_dataset(feed_of(index), epochs=1)
    assert noted(first_epoch[13]) == expected[13]
    assert [noted(batch) for batch in first_epoch.repeat(3).to_iter_dataset(options)] == expected


def states(iterator: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """The state before each batch, and at the end, as JSON."""
    yield json.loads(json.dumps(iterator.get_state()))
    for _ in iterator:
        yield json.loads(json.dumps(iterator.get_state()))


def test_iterator_state_resumes_at_every_step(index: Index, expected: list) -> None:
    for step, state in enumerate(states(iter(batches(index)))):
        resumed = iter(batches(index))
        resumed.set_state(state)
        assert [noted(batch) for batch in resumed] == expected[step:]


@pytest.mark.long
def test_workers_give_the_same_batches_and_resume(index: Index, expected: list) -> None:
    first, again = (iter(batches(index).mp_prefetch(WORKERS)) for _ in range(2))
    before_state = [noted(next(first)) for _ in range(5)]
    state = json.loads(json.dumps(first.get_state()))
    assert before_state + [noted(batch) for batch in first] == expected
    again.set_state(state)
    assert [noted(batch) for batch in again] == expected[5:]
    for iterator in (first, again):
        iterator.close()


def test_ranks_give_global_batches_and_states_load_at_any_rank(index: Index) -> None:
    whole = Feed(index, ExactOnceBatchSampler(41, batch_size=8))
    ids = []
    for world in (1, 3):
        ranks = [as_map_dataset(whole.shard(rank, world), epochs=1) for rank in range(world)]
        ids.append([[*np.concatenate([rank[n]["id"] for rank in ranks])] for n in range(6)])
    assert ids[0] == ids[1]
    state = iter(as_map_dataset(whole.shard(1, 3), epochs=1).to_iter_dataset(FEW)).get_state()
    iter(as_map_dataset(whole, epochs=1).to_iter_dataset(FEW)).set_state(state)


ALONE = {"transform": Seeded(brighter)}
ONCE = ExactOnceBatchSampler(41, batch_size=8)
REUSE = BatchSampler(ReuseSampler(41, reuse=2, live=8, seed=0), batch_size=4)
REFUSED: Refused = [
    (lambda i: as_map_dataset(feed_of(i), epochs=1)[-1], IndexError, r"at least 0, got -1: .*len"),
    (lambda i: as_map_dataset(feed_of(i), epochs=1)["x"], TypeError, "index must be an integer"),
    (lambda i: as_map_dataset(feed_of(i)), TypeError, r"write as_map_dataset\(feed, epochs=90\)"),
    (lambda i: as_map_dataset(Feed(i, REUSE), epochs=1), ValueError, "reuse"),
    (lambda i: as_map_dataset(Feed(i, ONCE, **ALONE), epochs=1), ValueError, "Seeded"),
    (
        lambda i: iter(batches(i, seed=1)).set_state(iter(batches(i)).get_state()),
        StateMismatchError,
        "seed: the state has 0",
    ),
    *(
        (lambda i, s=state: iter(batches(i)).set_state(s), StateMismatchError, "by another dataset")
        for state in ({"next_index": 3}, {}, [], None, 7)
    ),
]


@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_grain_refuses_bad_arguments(
    index: Index, call: Call, kind: type[Exception], word: str
) -> None:
    with pytest.raises(kind, match=word):
        call(index)


def dataloader(index: Index, **rest: Any) -> Any:
    """Return an iterator of Grain's DataLoader over a dataset of its own."""
    dataset = as_map_dataset(feed_of(index, **rest), epochs=3)
    order = grain.samplers.IndexSampler(len(dataset), grain.sharding.NoSharding(), num_epochs=1)
    return iter(grain.DataLoader(data_source=dataset, sampler=order, worker_count=0))


def test_grain_dataloader_resumes_over_equal_dataset(index: Index, expected: list) -> None:
    """It compares the reprs of datasets, which name the stream."""
    first, resumed = dataloader(index), dataloader(index)
    for _ in range(8):
        next(first)
    resumed.set_state(first.get_state())
    assert [noted(batch) for batch in resumed] == expected[8:]
    with pytest.raises(ValueError, match=r'"seed": 0(?s:.*)"seed": 1'):
        dataloader(index, seed=1).set_state(first.get_state())


@pytest.mark.parametrize(
    "backend",
    ["jax", *(pytest.param(name, marks=pytest.mark.long) for name in ("torch", "tensorflow"))],
)
def test_keras_on_grain_dataset_trains_on_equal_batches(index: Index, backend: str) -> None:
    done = subprocess.run(
        [PYTHON, PROGRAMS / "grain_keras.py", index.path],
        env=os.environ | QUIET | {"KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert "the weights are equal" in done.stdout, done.stderr
