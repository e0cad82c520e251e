"""Constant memory: with mapped arrays, a process's memory does not grow with the data."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import sampler_cases
from support.cases import mark_long
from support.inside import prefix_sums

from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ClassOrder,
    ExactOnceBatchSampler,
    MixtureSampler,
    PKBatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    ShardShuffleSampler,
    StateMismatchError,
    SubsetSampler,
    ViewSampler,
    WeightedSampler,
)

Arrays = list[np.ndarray[Any, Any]]


def batches(order: Sampler) -> BatchStream:
    return BatchSampler(order, batch_size=64)


def seven(n: int) -> Arrays:
    """Return counts from 0 to 6."""
    return [np.arange(n) % 7]


def falling(n: int) -> Arrays:
    """Return counts from 3 to 1."""
    return [np.sort(np.arange(n) % 3 + 1)[::-1].copy()]


def thirds(n: int) -> Arrays:
    """Return ids of every third record."""
    return [np.arange(n, dtype=np.int32) * 3]


def classes(n: int) -> Arrays:
    """Return the arrays of a class order."""
    (sizes,) = falling(n)
    return [np.arange(sizes.sum(), dtype=np.int32), np.cumsum(sizes) - sizes, sizes]


def pk(*arrays: Any, **options: Any) -> BatchStream:
    records, starts, sizes = arrays
    order = ClassOrder.from_arrays(records=records, starts=starts, sizes=sizes, digest="")
    return PKBatchSampler(order, p=16, seed=0, batches_per_epoch=1000, **options)


def shuffle(n: int) -> Sampler:
    return ShardShuffleSampler([n], block=n // 10, window=10, seed=1)


def views(counts: Any, **options: Any) -> BatchStream:
    places = len(counts) if options["per_epoch"] == "one" else int(counts.sum())
    return batches(ViewSampler(RandomSampler(places, seed=1), counts, seed=0, **options))


CASES: dict[str, tuple[Callable[[int], Arrays], Callable[..., BatchStream]]] = {
    "weights": (seven, lambda weights: batches(WeightedSampler(weights, seed=0))),
    "narrow weights": (
        lambda n: [seven(n)[0].astype(np.uint8)],
        lambda weights: batches(WeightedSampler(weights, seed=0)),
    ),
    "fractions": (
        lambda n: [seven(n)[0] / 3],
        lambda weights: batches(WeightedSampler(weights, seed=0)),
    ),
    "one view": (falling, partial(views, per_epoch="one")),
    "all views": (seven, partial(views, per_epoch="all")),
    "subset": (
        thirds,
        lambda ids: batches(
            SubsetSampler(ids, of=3 * len(ids), order=RandomSampler(len(ids), seed=1))
        ),
    ),
    "subset in blocks": (
        thirds,
        lambda ids: batches(SubsetSampler(ids, of=3 * len(ids), order=shuffle(len(ids)))),
    ),
    "shard shuffle": (
        lambda n: [np.repeat(1000, n // 1000).astype(np.int32)],
        lambda lengths: batches(ShardShuffleSampler(lengths, block=100, window=8, seed=1)),
    ),
    "evaluation": (
        thirds,
        lambda ids: ExactOnceBatchSampler(3 * len(ids), batch_size=64, records=ids),
    ),
    "P x K": (classes, partial(pk, k=1)),
    "P x K of large classes": (classes, partial(pk, k=2, min_class_size=2)),
    "P x K, K changes": (classes, partial(pk, k={0: 1, 50: 2}, small="drop")),
}


def mapped(arrays: Arrays, folder: Path) -> Arrays:
    """Return the same arrays, mapped."""
    paths = [folder / f"{number}.npy" for number in range(len(arrays))]
    for path, array in zip(paths, arrays, strict=True):
        np.save(path, array)
    return [np.load(path, mmap_mode="r") for path in paths]


def drawn(stream: BatchStream) -> list[Any]:
    """Return some batches, with their records, views and spans."""
    ids = [stream.batch(1, step) for step in (0, 1, 5, len(stream) - 1)]
    seen = [array for each in ids for array in (each, stream.records(each), stream.views(each))]
    seen += [array for each in ids for array in stream.spans(stream.records(each))]
    assert {type(array) for array in seen} == {np.ndarray}
    return [array.tolist() for array in seen]


@pytest.mark.parametrize("name", CASES)
def test_mapped_arrays_give_stream_of_arrays_in_memory(name: str, tmp_path: Path) -> None:
    """Also after pickling, which takes the paths of the arrays alone."""
    arrays, make = CASES[name]
    plain, stream = make(*arrays(20_000)), make(*mapped(arrays(20_000), tmp_path))
    sent = pickle.dumps(stream)
    assert len(sent) < 3_000
    for each in (stream, pickle.loads(sent)):
        assert each.fingerprint == plain.fingerprint
        assert drawn(each) == drawn(plain)


@pytest.mark.parametrize("name", ["weights", "fractions", "one view", "all views"])
def test_sparse_prefix_sums_draw_like_full_table(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With zeros among the counts, and a last run that is shorter."""
    arrays, make = CASES[name]
    plain = drawn(make(*arrays(1000)))
    monkeypatch.setattr(prefix_sums, "_TABLE_CHUNK", 64)
    for most in (1, 7, 300, 999):
        monkeypatch.setattr(prefix_sums.PrefixSums.__init__, "__defaults__", (most,))
        assert drawn(make(*arrays(1000))) == plain


@pytest.mark.parametrize("name", mark_long(CASES, but_every=2))
def test_memory_does_not_grow_with_mapped_arrays(name: str, tmp_path: Path) -> None:
    """While a sampler over six million entries is made, hashed, pickled and drawn from."""
    arrays, make = CASES[name]
    given = mapped(arrays(6_000_000), tmp_path)
    drawn(make(*arrays(1000)))  # imports and first calls
    tracemalloc.start()
    try:
        stream = make(*given)
        drawn(stream)
        assert len(pickle.dumps([stream, stream.state_dict()])) < 4_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000


def test_arrays_in_memory_are_copied() -> None:
    """What their owner changes later changes no stream."""
    weights = np.arange(100)
    order = WeightedSampler(weights, seed=0)
    before = order.ids(0, np.arange(50)).tolist()
    weights[:] = 1
    assert order.ids(0, np.arange(50)).tolist() == before


def mixture(orders: list[Sampler]) -> BatchStream:
    weights = np.arange(len(orders)) + 1
    return batches(MixtureSampler(orders, weights=weights, num_samples=1000, seed=0))


def nested(depth: int) -> Sampler:
    """Return a mixture of five mixtures of five mixtures, and so on."""
    if not depth:
        return RandomSampler(9, seed=0)
    orders = [nested(depth - 1)] * 5
    return MixtureSampler(orders, weights=[1, 2, 3, 4, 5], num_samples=99, seed=0)


MANY: dict[str, Callable[[], BatchStream]] = {
    "orders": lambda: mixture([RandomSampler(9, seed=n) for n in range(5000)]),
    "mixtures of mixtures": lambda: mixture([nested(4)] * 5),
    "changes of K": lambda: PKBatchSampler(
        np.arange(99) % 9,
        p=2,
        k={step: step % 3 + 1 for step in range(500)},
        seed=0,
        batches_per_epoch=9,
    ),
    "changes of weights": lambda: batches(
        MixtureSampler(
            [SequentialSampler(9), SequentialSampler(5)],
            weights={step: [1, step % 5 + 1] for step in range(500)},
            num_samples=1000,
            seed=0,
        )
    ),
    "shards": lambda: batches(ShardShuffleSampler(np.full(5000, 9), block=1024, window=64, seed=0)),
    "views": lambda: batches(
        ViewSampler(RandomSampler(5000, seed=0), [2] * 5000, per_epoch="one", seed=0)
    ),
}


@pytest.mark.parametrize("make", [*MANY.values(), *(make for _, make in sampler_cases.CASES)])
def test_state_is_below_four_kilobytes(make: Callable[[], BatchStream]) -> None:
    """Of every sampler, however many orders, changes, shards or records it has."""
    stream = make()
    assert len(json.dumps(stream.state_dict())) < 4096
    other = make()
    other.load_state_dict(stream.state_dict())


def test_state_of_other_orders_is_refused_among_many() -> None:
    """One seed of five thousand differs."""
    orders: list[Sampler] = [RandomSampler(9, seed=n) for n in range(5000)]
    state = mixture(orders).state_dict()
    with pytest.raises(StateMismatchError, match=r"order\.orders: the state has '5000 values"):
        mixture([*orders[:-1], RandomSampler(9, seed=0)]).load_state_dict(state)
