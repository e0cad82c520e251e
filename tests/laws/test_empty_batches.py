"""An evaluation over any ranks: each record once, and an empty batch is like any other."""

from collections import UserDict, namedtuple
from collections.abc import Callable, Sequence
from itertools import islice, product
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import mark_long
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from twinfeed.loaders import Feed, NumpyLoader
from twinfeed.loaders.tensorflow import TensorFlowLoader
from twinfeed.loaders.torch import (
    RecordDataset,
    RequestSampler,
    TorchLoader,
    as_tensors,
    exact_collate,
)
from twinfeed.samplers import ExactOnceBatchSampler

Pair = namedtuple("Pair", "number words")
MOST = 40
WORLDS = range(1, 9)


def graphs(samples: list[Any]) -> dict[str, Any]:
    """Rows that are no first axis: concatenated, between offsets, last, and counted."""
    nodes = [torch.arange(3)] * len(samples)
    return {
        "nodes": torch.cat([torch.empty(0, dtype=torch.int64), *nodes]),
        "offsets": torch.tensor([0, *(3 for _ in samples)]).cumsum(0),
        "time": np.ones((5, len(samples)), np.float32),
        "distances": torch.zeros(len(samples), len(samples)),
        "count": len(samples),
        "scale": torch.tensor(0.5),
        "version": "v1",
        "ids": torch.tensor([sample["id"] for sample in samples], dtype=torch.int64),
    }


def popped(samples: list[dict[str, Any]]) -> UserDict[str, Any]:
    """A function that takes its samples apart, as some tokenizers' do."""
    ids = torch.tensor([sample.pop("id") for sample in samples], dtype=torch.int64)
    return UserDict({"ids": ids, "samples": samples})


def whole(number: int) -> dict[str, Any]:
    return {"id": number, "x": np.ones((2, 3), np.float32), "name": f"n{number}", "none": 0.5}


STRUCTURES: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dicts": (whole, default_collate, lambda batch: batch["id"]),
    "tuples": (lambda n: (np.float32(n), "word"), default_collate, lambda batch: batch[0]),
    "named tuples": (lambda n: Pair(torch.tensor(n), [1, 2]), default_collate, lambda b: b.number),
    "numbers": (float, default_collate, lambda batch: batch),
    "nested": (lambda n: {"a": [{"b": n}]}, default_collate, lambda batch: batch["a"][0]["b"]),
    "lists": (whole, list, lambda batch: [sample["id"] for sample in batch]),
    "zipped": (lambda n: (n, [n] * n), lambda b: tuple(zip(*b, strict=True)), lambda b: b[0]),
    "other axes": (whole, graphs, lambda batch: batch["ids"]),
    "popped": (whole, popped, lambda batch: batch["ids"]),
}


def likeness(batch: Any) -> Any:
    """All of a batch but its rows: types, keys, dtypes, and the axes that no row has."""
    if isinstance(batch, (dict, UserDict)):
        return type(batch), {key: likeness(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], (torch.Tensor, tuple)):
        return type(batch), [likeness(value) for value in batch]
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return type(batch), batch.dtype, batch.ndim, batch.shape[1:]
    return type(batch)


@pytest.mark.parametrize("structure", mark_long(STRUCTURES, but_every=2))
def test_exact_collate_gives_each_record_once_on_any_ranks(structure: str) -> None:
    """With equally many steps, of 1 to 40 records, in a batch size that none of them divides."""
    item, collate_fn, ids_of = STRUCTURES[structure]
    for n, world_size in product(range(1, MOST + 1), WORLDS):
        collate = exact_collate([item(0)], collate_fn)
        sampler, found, steps = ExactOnceBatchSampler(n, batch_size=11), [], set()
        for rank in range(world_size):
            batches = [collate([item(k) for k in ids]) for ids in sampler.shard(rank, world_size)]
            steps.add(len(batches))
            found += [int(i) for batch in batches for i in ids_of(batch)]
        assert len(steps) == 1
        assert sorted(found) == list(range(n))


@pytest.mark.parametrize("structure", ["dicts", "tuples", "named tuples", "numbers", "popped"])
def test_empty_batch_has_the_likeness_of_a_real_one(structure: str) -> None:
    item, collate_fn, _ = STRUCTURES[structure]
    collate = exact_collate([item(0)], collate_fn)
    empty = collate([])
    assert likeness(empty) == likeness(collate([item(0), item(1)]))
    assert likeness(collate([])) == likeness(empty)


def test_rows_of_other_axes_shrink_too() -> None:
    empty = exact_collate([whole(0)], graphs)([])
    expected = graphs([])
    assert empty.keys() == expected.keys()
    for name, value in expected.items():
        assert likeness(empty[name]) == likeness(value), name
        assert np.array_equal(empty[name], value), name


def test_a_changed_empty_batch_changes_no_later_one() -> None:
    collate = exact_collate([whole(0)])
    collate([])["x"] = None
    assert collate([])["x"].shape == (0, 2, 3)


@pytest.mark.parametrize(
    ("workers", "start"),
    mark_long([(0, None), (2, "fork"), (2, "spawn"), (2, "forkserver")], but_every=4),
)
def test_dataloader_gives_empty_batches(workers: int, start: str | None) -> None:
    """Also again from workers that stay."""
    dataset = TensorDataset(torch.arange(3), torch.ones(3, 2))
    for rank in (2, 3):  # the last one with a record, and the first without
        loader = DataLoader(
            dataset,
            batch_sampler=ExactOnceBatchSampler(dataset, batch_size=8).shard(rank, 8),  # type: ignore[arg-type]
            collate_fn=exact_collate(dataset),
            num_workers=workers,
            multiprocessing_context=start,
            persistent_workers=workers > 0,
        )
        for _ in range(2):
            ((ids, ones),) = loader
            assert ids.tolist() == list(range(3))[rank : rank + 1]
            assert ones.shape == (len(ids), 2)


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    number = int(sample["number"])
    return {
        "x": np.full((2, 3), number, np.float32),
        "list": np.arange(number),
        "name": f"n{number}",
    }


def doubled(batch: dict[str, Any], seed: int) -> dict[str, Any]:
    return batch | {"double": 2 * batch["x"]}


def plain(feed: Feed) -> DataLoader[Any]:
    """A DataLoader of one's own over a feed."""
    dataset, requests = RecordDataset(feed), RequestSampler(feed)
    return DataLoader(dataset, batch_sampler=requests, collate_fn=as_tensors)  # type: ignore[arg-type]


LOADERS: dict[str, Any] = {
    "numpy": NumpyLoader,
    "torch": TorchLoader,
    "plain": plain,
    "tensorflow": TensorFlowLoader,
}


@pytest.mark.parametrize(
    ("name", "n", "world_size"),
    [
        *product(LOADERS, [3], [8]),
        *mark_long([(name, 40, 7) for name in LOADERS], but_every=9, first=8),
    ],
)
def test_loaders_give_each_record_once_on_any_ranks(name: str, n: int, world_size: int) -> None:
    """Their empty batches too have all fields, dtypes and shapes of rows."""
    options = {"decode": decode, "collate": {"list": "ragged"}, "batch_transform": doubled}
    feed = Feed(
        {"number": np.arange(n)},
        ExactOnceBatchSampler(n, batch_size=11),
        side={"row": np.ones((n, 4), np.int16)},
        **options,  # type: ignore[arg-type]
    )
    ranks = [list(LOADERS[name](feed.shard(rank, world_size))) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {len(feed.sampler)}
    batches = [batch for batches in ranks for batch in batches]
    assert sorted(int(i) for batch in batches for i in batch["id"]) == list(range(n))
    for field in ("id", "x", "double", "row"):
        assert len({(str(b[field].dtype), tuple(b[field].shape[1:])) for b in batches}) == 1
        assert all(len(batch[field]) == len(batch["id"]) for batch in batches)
    assert len({(*batch,) for batch in batches}) == 1
    skipping = [
        feed.with_sampler(feed.sampler.shard(rank, world_size, empty="skip"))  # type: ignore[call-arg]
        for rank in range(world_size)
    ]
    for feed_of_rank, kept in zip(skipping, ranks, strict=True):
        ids = [[*map(int, batch["id"])] for batch in LOADERS[name](feed_of_rank)]
        assert ids == [[*map(int, batch["id"])] for batch in kept if len(batch["id"])]
        assert len(ids) == len(feed_of_rank.sampler)


@pytest.mark.long
def test_numpy_loader_gives_each_record_once_on_all_ranks() -> None:
    for n, world_size in islice(product(range(1, MOST + 1), WORLDS), 0, None, 3):
        test_loaders_give_each_record_once_on_any_ranks("numpy", n, world_size)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Opaque:
    """A batch of a class of one's own."""


def sparse(samples: list[Any]) -> dict[str, Any]:
    return {"x": [torch.eye(3).to_sparse()]}


def squeezed(samples: list[Any]) -> torch.Tensor:
    return torch.ones(len(samples), 2).squeeze()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Stream(),), r"records by number, dataset\[0\], got a Stream"),
        (({"x": [1, 2]},), "got a dict"),
        ((7,), "got an int"),
        ((ExactOnceBatchSampler(3, batch_size=1),), "got an ExactOnceBatchSampler"),
        (([1], None), "collate_fn must be a function, got a NoneType"),
        ((), r"write exact_collate\(dataset, collate_fn\)"),
    ],
)
def test_other_arguments_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        exact_collate(*arguments)


@pytest.mark.parametrize(
    ("collate_fn", "message"),
    [
        (lambda samples: Opaque(), "no rows can be made of an Opaque, batch: let collate_fn give"),
        (sparse, r"of a Tensor, batch\['x'\]\[0\]: let"),
        (squeezed, "of a Tensor, batch: let"),
        (lambda samples: {len(samples): 1}, "of a dict, batch: let"),
        (lambda samples: 1 if len(samples) == 1 else [1], "of an int, batch: let"),
    ],
)
def test_batches_without_known_rows_are_refused_at_the_first_batch(
    collate_fn: Callable[[Sequence[Any]], Any], message: str
) -> None:
    """On every rank, and not at the end of a long evaluation on one."""
    with pytest.raises(TypeError, match=message):
        exact_collate([1, 2], collate_fn)([1, 2])
