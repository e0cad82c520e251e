"""What grows with the data or the ranks, counted: draws, calls, words; never seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from twinfeed.samplers import (
    BatchSampler,
    MixtureSampler,
    PKBatchSampler,
    RandomSampler,
    ReuseSampler,
    Sampler,
    SequentialSampler,
    ShardShuffleSampler,
    SubsetSampler,
    ViewSampler,
    WeightedSampler,
)
from twinfeed.samplers.drawing import round_robin, weighted_order
from twinfeed.samplers.drawing.fair_subsets import FairSubsets
from twinfeed.samplers.drawing.random_words import derive, random_words, root_key
from twinfeed.samplers.drawing.round_robin import RoundRobin, ShuffledRoundRobin
from twinfeed.samplers.drawing.weighted_order import log


def counting(
    monkeypatch: pytest.MonkeyPatch, kind: Any, name: str, measure: Callable[..., int]
) -> list[int]:
    """Note what `measure` says of the arguments of each call."""
    noted: list[int] = []
    real = getattr(kind, name)

    def noting(*given: Any, **named: Any) -> Any:
        noted.append(measure(*given))
        return real(*given, **named)

    monkeypatch.setattr(kind, name, noting)
    return noted


ORDERS: dict[str, Callable[[], Sampler]] = {
    "sequential": lambda: SequentialSampler(10**6),
    "random": lambda: RandomSampler(10**6, seed=0),
    "shuffle": lambda: ShardShuffleSampler([10**5] * 10, block=1024, window=64, seed=0),
    "weighted": lambda: WeightedSampler(np.arange(1, 1000), num_samples=10**6, seed=0),
    "subset": lambda: SubsetSampler(np.arange(10**6), of=10**6, order=RandomSampler(10**6, seed=0)),
    "views": lambda: ViewSampler(
        RandomSampler(10**6, seed=0), np.full(10**6, 2), per_epoch="one", seed=0
    ),
    "reuse": lambda: ReuseSampler(10**5, reuse=2, live=64_000, seed=0),
    "mixture": lambda: MixtureSampler(
        [RandomSampler(50_000, seed=0)] * 3, weights=[1, 2, 3], num_samples=10**6, seed=0
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_rank_draws_only_its_own_slice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a thousand ranks, a batch of 64,000: 64 positions are asked for."""
    order = ORDERS[name]()
    rank = BatchSampler(order, batch_size=64_000).shard(7, 1000)
    drawn = counting(monkeypatch, type(order), "draw", lambda self, epoch, places: places.size)
    for step in (0, 1, len(rank) - 2):
        rank.batch(0, step)
    rank.batches(0, 0, 2)
    assert drawn == [64, 64, 64, 128]


def test_rank_visits_only_the_parts_of_its_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks divide the sections, and where a slice lies in three."""
    order = ShardShuffleSampler([10**4] * 20, seed=0, block=100, window=64, sections=32)
    stream = BatchSampler(order, batch_size=320)
    visited = counting(
        monkeypatch, RoundRobin, "indices_at", lambda self, section, positions: positions.size
    )
    stream.shard(3, 32).batch(0, 5)
    assert visited == [10]
    visited.clear()
    stream.shard(1, 20).batch(0, 5)
    assert visited == [16]


@pytest.mark.parametrize("coverage", [None, "once"])
def test_rank_draws_only_its_own_classes(coverage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred classes a batch over a hundred ranks; more only between two traversals."""
    labels = np.arange(40_000) // 10
    stream = PKBatchSampler(labels, p=100, k=2, seed=0, coverage=coverage)
    rank = stream.shard(41, 100)
    drawn = counting(
        monkeypatch,
        FairSubsets,
        "_permuted",
        lambda self, number, traversal, positions: positions.size,
    )
    counts = []
    for step in range(60):
        drawn.clear()
        rank.batch(0, step)
        counts.append(sum(drawn))
    assert sorted(counts)[50] <= 3
    assert max(counts) < 10 * 100


@pytest.mark.parametrize(("n", "m"), [(7, 3), (40, 13), (41, 13), (5, 4), (3, 7)])
def test_columns_of_a_subset_equal_the_whole_subset(n: int, m: int) -> None:
    """Any columns, also between two traversals."""
    subsets, rows = FairSubsets(np.array([n, n + 1]), m, 5), np.arange(60)
    population = rows % 2
    whole = subsets.subsets(population, rows)
    for low in range(m):
        for high in range(low + 1, m + 1):
            assert np.array_equal(subsets.subsets(population, rows, low, high), whole[:, low:high])


def test_mixture_of_many_orders_draws_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for each order and batch would be a call for nearly each sample."""
    orders = [RandomSampler(10_000, seed=seed) for seed in range(1000)]
    mixture = MixtureSampler(orders, weights=[1] * 1000, num_samples=10**6, seed=0)
    calls = counting(monkeypatch, RandomSampler, "draw", lambda self, epoch, positions: 1)
    stream = BatchSampler(mixture, batch_size=64)
    for step in range(1000):
        stream.batch(0, step)
    assert len(calls) == 1000
    calls.clear()
    stream.batch(0, 3)
    assert len(calls) <= 64


def test_a_round_of_many_segments_is_sorted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reuse with many live records: a round serves many batches."""
    live = 50_000
    stream = BatchSampler(ReuseSampler(live * 2, reuse=4, live=live, seed=0), batch_size=100)
    made = counting(monkeypatch, round_robin, "random_words", lambda key, counter: np.size(counter))
    tables = counting(monkeypatch, ShuffledRoundRobin, "__init__", lambda *given: 1)
    for step in range(1000):
        stream.batch(0, step)
    assert sum(made) <= 2 * live + 2000
    assert len(tables) == 1


def sorted_at_once(sampler: WeightedSampler, weights: np.ndarray, epoch: int) -> np.ndarray:
    """Return the records of an epoch by one sort of all waits."""
    records = np.flatnonzero(weights)
    word = random_words(derive(root_key(0, "weighted"), epoch), records) >> np.uint64(11)
    waits = -log((word + 0.5) * 2.0**-53) / weights[records]
    return records[np.argsort(waits, kind="stable")[: len(sampler)]]


@pytest.mark.parametrize("samples", [1, 3000, 4999])
@pytest.mark.parametrize("piece", [64, 1000, 1 << 15])
def test_chunked_draws_without_replacement_equal_one_sort(
    samples: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order, and while the next epoch is prepared."""
    monkeypatch.setattr(weighted_order, "_BUCKET", piece)
    monkeypatch.setattr(weighted_order, "_CHUNK", 128)
    weights = np.random.default_rng(0).integers(0, 9, 6000)
    assert np.count_nonzero(weights) > samples
    order = WeightedSampler(weights, num_samples=samples, replacement=False, seed=0)
    asked = np.random.default_rng(1).permutation(samples)
    for epoch in (0, 1, 2, 1):
        expected = sorted_at_once(order, weights, epoch)
        for part in np.array_split(asked, 7):
            assert np.array_equal(order.ids(epoch, part), expected[part])
        assert np.array_equal(order.ids(epoch, np.arange(samples)), expected)


def test_no_draw_without_replacement_sorts_or_hashes_an_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the first draw, each draw does its share, also at the beginning of an epoch."""
    monkeypatch.setattr(weighted_order, "_BUCKET", 4096)
    records, batch = 200_000, 500
    order = WeightedSampler(np.arange(1, records + 1), replacement=False, seed=0)
    stream = BatchSampler(order, batch_size=batch)
    stream.batch(0, 0)
    made = counting(
        monkeypatch, weighted_order, "random_words", lambda key, counter: np.size(counter)
    )
    for epoch in range(3):
        for step in range(len(stream)):
            made.clear()
            stream.batch(epoch, step)
            assert sum(made) <= weighted_order._CHUNK + 3 * 4096 + weighted_order._SAMPLE
    stream.batch(3, 0)
    made.clear()
    stream.batches(2, len(stream) - 2, len(stream))
    assert sum(made) <= 3 * 4096
