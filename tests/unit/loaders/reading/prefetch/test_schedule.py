"""Law 12: a stream is drawn once for all who look into it, on every way to a training loop."""

import pickle
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import mark_long
from support.sampler_cases import CASES

import twinfeed.loaders
from twinfeed.loaders import DiskCache, Feed, Index, NumpyLoader, open_index, pack
from twinfeed.loaders.reading.prefetch.schedule import STEPS, Schedule
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    PKBatchSampler,
    RandomSampler,
    ReuseSampler,
    ShardShuffleSampler,
)

RECORDS, EPOCHS = 1500, 2


@settings(max_examples=60)
@given(data=st.data(), world=st.integers(1, 3))
def test_schedule_batches_equal_sampler_batches(data: st.DataObject, world: int) -> None:
    """In any order, of any rank."""
    _, make = data.draw(st.sampled_from(CASES))
    sampler = make()
    with suppress(ValueError):  # P x K, whose classes the ranks cannot share
        sampler = sampler.shard(world - 1, world)
    schedule = Schedule(sampler)
    for _ in range(4):
        epoch = data.draw(st.integers(0, 3))
        start = data.draw(st.integers(0, len(sampler)))
        stop = data.draw(st.integers(start, len(sampler)))
        found = schedule.batches(epoch, start, stop)
        expected = sampler.batches(epoch, start, stop)
        assert [ids.tolist() for ids in found] == [ids.tolist() for ids in expected]
    again = pickle.loads(pickle.dumps(schedule))
    assert [ids.tolist() for ids in again.batches(epoch, start, stop)] == [
        ids.tolist() for ids in expected
    ]


def test_schedule_caches_at_most_its_window() -> None:
    stream = BatchSampler(RandomSampler(1 << 22, seed=0), batch_size=1 << 12)
    schedule = Schedule(stream)
    for epoch in (0, 1, 0):
        for step in range(0, len(stream), 50):
            schedule.batches(epoch, step, step + 1)
            assert sum(len(ids) for chunk in schedule._chunks.values() for ids in chunk) < 2 << 20


def test_writing_to_batch_ids_changes_no_later_batch(index: Index) -> None:
    """What a loop writes to them changes nothing that comes."""
    feed = Feed(index, BatchSampler(RandomSampler(RECORDS, seed=1), batch_size=8))
    with NumpyLoader(feed) as loader:
        for step, batch in enumerate(loader):
            assert batch["id"].tolist() == feed.sampler.batch(0, step).tolist()
            batch["id"][:] = 0


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    folder = tmp_path_factory.mktemp("scheduled")
    return pack([{"n": n, "x": bytes(200)} for n in range(RECORDS)], folder)["data"]


@pytest.fixture
def drawn_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of ids of each drawing."""
    sizes: list[int] = []
    whole = BatchStream._batches

    def noted(self: BatchStream, *steps: int) -> list[Any]:
        made = whole(self, *steps)
        sizes.append(sum(map(len, made)))
        return made

    monkeypatch.setattr(BatchStream, "_batches", noted)
    return sizes


ORDERS = {
    "random": lambda index: RandomSampler(RECORDS, seed=0),
    "blocks": lambda index: ShardShuffleSampler(index.shard_lengths, seed=0, block=50, window=5),
    "reuse": lambda index: ReuseSampler(RECORDS, seed=0, reuse=2, live=96),
}


def passes(loader: Any, epochs: int = EPOCHS) -> Iterator[int]:
    for _ in range(epochs):
        for batch in loader:
            yield len(batch["id"])


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("options", [{"threads": 0, "prefetch": 0}, {"threads": 3}], ids=str)
@pytest.mark.parametrize("readahead", [None, pytest.param(0, marks=pytest.mark.long), 1 << 20])
def test_each_id_is_drawn_once(
    index: Index, drawn_sizes: list[int], kind: str, options: dict[str, Any], readahead: int | None
) -> None:
    sampler = BatchSampler(ORDERS[kind](index), batch_size=16)
    feed = Feed(index, sampler, decode=lambda sample: {"size": len(sample["x"])})
    with NumpyLoader(feed, readahead=readahead, **options) as loader:
        drawn_sizes.clear()
        delivered = sum(passes(loader))
    assert delivered == EPOCHS * len(sampler) * 16 - EPOCHS * (-sampler.num_ids % 16)
    # Of the next epoch, up to a range of steps; where bytes are prefetched, up to two epochs, as
    # this set is smaller than what is read ahead.
    ahead = 2 * len(sampler) if readahead != 0 else 2 * STEPS
    assert sum(drawn_sizes) <= 1.1 * delivered + ahead * 16


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2])
def test_each_id_is_drawn_once_over_remote_shards(
    index: Index, tmp_path: Path, drawn_sizes: list[int], kind: str, cached: bool, world: int
) -> None:
    fsspec.filesystem("memory").put(f"{index.path.parent}/", f"/{tmp_path.name}", recursive=True)
    cache = DiskCache(tmp_path / "cache", bytes=1 << 20) if cached else None
    there = open_index(index.path, root=f"memory://{tmp_path.name}", cache=cache)
    sampler = BatchSampler(ORDERS[kind](index), batch_size=16)
    feed = Feed(there, sampler)
    with NumpyLoader(feed.shard(0, world) if world > 1 else feed) as loader:
        drawn_sizes.clear()
        delivered = sum(passes(loader))
    beyond = 2 * len(sampler) * 16  # epochs after the end, of a set smaller than what is read ahead
    assert sum(drawn_sizes) <= 1.1 * delivered + beyond


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("kind", "workers"),  # reuse is for one process
    mark_long([("random", 2), ("random", 0), ("blocks", 2), ("blocks", 0)], but_every=3),
)
def test_each_id_is_drawn_once_by_torch(
    index: Index, drawn_sizes: list[int], kind: str, workers: int
) -> None:
    from twinfeed.loaders.torch import TorchLoader

    sampler = BatchSampler(ORDERS[kind](index), batch_size=16)
    with TorchLoader(Feed(index, sampler), num_workers=workers) as loader:
        drawn_sizes.clear()
        delivered = sum(passes(loader))
    assert sum(drawn_sizes) <= 1.1 * delivered + len(sampler) * 16


@pytest.mark.frameworks
@pytest.mark.parametrize("kind", mark_long(ORDERS, but_every=3))
@pytest.mark.parametrize(
    "decode", mark_long([lambda sample: {"size": len(sample["x"])}, None], but_every=2)
)
def test_each_id_is_drawn_once_by_tensorflow(
    index: Index, drawn_sizes: list[int], kind: str, decode: Any
) -> None:
    from twinfeed.loaders.tensorflow import TensorFlowLoader

    sampler = BatchSampler(ORDERS[kind](index), batch_size=16)
    with TensorFlowLoader(Feed(index, sampler, decode=decode)) as loader:
        drawn_sizes.clear()
        delivered = sum(passes(loader.dataset))
    assert sum(drawn_sizes) <= 1.1 * delivered + len(sampler) * 16


@pytest.mark.frameworks
def test_each_id_is_drawn_once_for_source_datasets(index: Index, drawn_sizes: list[int]) -> None:
    """And the number of its segment once."""
    from twinfeed.loaders.tensorflow import choose, source_datasets

    order = ShardShuffleSampler(index.shard_lengths, seed=0, block=50, window=5)
    feed = Feed(index, BatchSampler(order, batch_size=16))
    with choose(feed.sampler, source_datasets(feed)) as loader:
        drawn_sizes.clear()
        delivered = sum(passes(loader.dataset))
    assert sum(drawn_sizes) <= 2.2 * delivered


@pytest.mark.frameworks
@pytest.mark.parametrize("replay", [False, pytest.param(True, marks=pytest.mark.long)])
def test_each_id_is_drawn_once_by_choose(drawn_sizes: list[int], replay: bool) -> None:
    import tensorflow as tf

    from twinfeed.loaders.tensorflow import choose

    sampler = PKBatchSampler.of_classes(5, p=4, k=4, seed=0, batches_per_epoch=40)
    datasets = [tf.data.Dataset.range(9).repeat() for _ in range(5)]
    with choose(sampler, datasets, replay=replay) as loader:
        delivered = sum(len(batch) for _ in range(EPOCHS) for batch in loader)
    assert sum(drawn_sizes) <= 1.1 * delivered


def test_reading_one_batch_draws_few_ids(index: Index, drawn_sizes: list[int]) -> None:
    feed = Feed(index, BatchSampler(RandomSampler(RECORDS, seed=0), batch_size=16))
    drawn_sizes.clear()
    assert feed.spec  # which takes samples of two batches, once for a feed
    assert sum(drawn_sizes) == 32
    for options in ({"threads": 0, "prefetch": 0}, {}):
        with NumpyLoader(feed, **options) as loader:
            drawn_sizes.clear()
            next(iter(loader))
        assert sum(drawn_sizes) <= 32 * 16


DRAWING = re.compile(r"(sampler|stream)s?\)?\.(batch|batches|_batches|_chunks|_draw)\(")
MAY = {
    "reading/prefetch/schedule.py": "it is the one, and makes one request by hand",
    "keras/_fit_arguments.py": "only where a label is to be found that the model lacks",
    "pictures.py": "draws streams without data",
}


def test_only_listed_modules_draw_ids() -> None:
    root = Path(twinfeed.loaders.__path__[0])
    drawing = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for line in path.read_text().splitlines()
        if DRAWING.search(line) and ">>>" not in line
    }
    assert drawing <= MAY.keys()
