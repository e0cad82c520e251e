"""`BucketBatchSampler`: batches of one budget. The laws of all samplers are in test_samplers.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfeed.samplers import BucketBatchSampler


def lognormal(n: int, most: int) -> np.ndarray:
    return np.clip(np.random.default_rng(0).lognormal(4.8, 0.7, n).astype(int), 1, most)


@given(
    costs=st.lists(st.integers(1, 50), min_size=1, max_size=200),
    slack=st.integers(0, 300),
    multiple=st.integers(1, 8),
    window=st.none() | st.integers(0, 9),
    epoch=st.integers(0, 5),
)
def test_each_record_comes_once_within_the_budget(
    costs: list[int], slack: int, multiple: int, window: int | None, epoch: int
) -> None:
    array = np.array(costs, dtype=np.int64)
    budget = multiple * max(costs, default=1) + slack
    sampler = BucketBatchSampler(array, budget=budget, multiple=multiple, window=window, seed=3)
    batches = sampler.batches(epoch, 0, len(sampler))
    assert sorted(np.concatenate([*batches, []]).tolist()) == list(range(len(costs)))
    assert all(array[ids].max() * len(ids) <= budget for ids in batches)
    assert sum(len(ids) % multiple > 0 for ids in batches) == (len(costs) % multiple > 0)


def test_records_of_a_batch_seldom_share_a_batch_again() -> None:
    sampler = BucketBatchSampler(lognormal(20_000, 1024), budget=8192, multiple=8, seed=0)
    before, after = np.empty(20_000, np.int64), np.empty(20_000, np.int64)
    for epoch, batch_of in enumerate((before, after)):
        for step, ids in enumerate(sampler.batches(epoch, 0, len(sampler))):
            batch_of[ids] = step
    pairs = lambda batch_of: (np.bincount(batch_of).astype(np.int64) ** 2).sum() - 20_000  # noqa: E731
    assert pairs(before * len(sampler) + after) < 0.1 * pairs(before)


def test_padding_and_batches_are_few() -> None:
    costs = lognormal(20_000, 1024)
    sampler = BucketBatchSampler(costs, budget=8192, seed=0)
    batches = sampler.batches(0, 0, len(sampler))
    padded = sum(int(costs[ids].max()) * len(ids) for ids in batches)
    assert padded < 1.05 * costs.sum()
    assert len(sampler) < 1.1 * costs.sum() / 8192


def test_ranks_get_equal_counts_and_nearly_equal_costs() -> None:
    costs = lognormal(20_000, 1024)
    sampler = BucketBatchSampler(costs, budget=65_536, multiple=8, seed=0)
    ranks = [sampler.shard(rank, 8).batches(0, 0, len(sampler)) for rank in range(8)]
    assert all(len({len(ids) for ids in step}) == 1 for step in zip(*ranks, strict=True))
    loads = np.array([[costs[ids].sum() for ids in step] for step in zip(*ranks, strict=True)])
    assert (loads.max(1) / loads.mean(1)).mean() < 1.1


def test_budget_that_is_too_small_is_refused_with_the_number() -> None:
    with pytest.raises(ValueError, match="at least 56"):
        BucketBatchSampler([3, 7], budget=55, multiple=8, seed=0)


@pytest.mark.parametrize("costs", [[0, 1], [-1], [[1]], [0.5], ["a"]])
def test_invalid_costs_are_refused(costs: list) -> None:
    with pytest.raises((ValueError, TypeError), match="costs"):
        BucketBatchSampler(costs, budget=10, seed=0)


def test_costs_near_the_limit_keep_to_the_budget() -> None:
    """98 times 2^60 is no int64, and would look like less than the budget."""
    sampler = BucketBatchSampler([1] * 96 + [2**60] * 2, budget=2**61, window=0, seed=0)
    assert sorted(len(ids) for ids in sampler) == [2, 96]
