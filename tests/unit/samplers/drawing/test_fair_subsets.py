"""Fair subsets: distinct, fair at every step, equal to their slow definition."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import sampler_definitions as slow
from support.cases import mark_long

from twinfeed.samplers.drawing.fair_subsets import FairSubsets


def _subsets(n: int, m: int, count: int, key: int = 3) -> np.ndarray:
    """Return the first subsets of a single population."""
    return FairSubsets(np.array([n]), m, key).subsets(np.zeros(count, np.int64), np.arange(count))


@pytest.mark.parametrize("n", range(1, 24))
def test_subsets_are_distinct_and_fair_at_every_step(n: int) -> None:
    """For every m: no item twice in a subset while there are m, counts always within one."""
    for m in range(1, n + 4):
        subsets = _subsets(n, m, 5 * n)
        sizes = [len(set(subset)) for subset in subsets.tolist()]
        assert sizes == [min(n, m)] * len(subsets)
        uses = np.cumsum([np.bincount(subset, minlength=n) for subset in subsets], axis=0)
        assert np.ptp(uses, axis=1).max() <= 1
        within = np.array([np.bincount(subset, minlength=n) for subset in subsets])
        assert np.ptp(within, axis=1).max() <= 1


@settings(max_examples=150)
@given(n=st.integers(1, 99), m=st.integers(1, 50), key=st.integers(0, 2**64 - 1))
def test_subsets_equal_the_slow_definition(n: int, m: int, key: int) -> None:
    """Traversal by traversal in plain Python, repaired one entry at a time."""
    own = slow.word(key, 0)
    assert _subsets(n, m, 12, key).tolist() == slow.fair_subsets(n, m, own, 12)


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 99), min_size=1, max_size=8),
    m=st.integers(1, 12),
    rows=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 60)), min_size=1, max_size=40),
)
def test_any_rows_in_any_order_equal_the_slow_definition(
    sizes: list[int], m: int, rows: list[tuple[int, int]]
) -> None:
    """Many populations at once, jumps back and forth."""
    fair = FairSubsets(np.array(sizes), m, 77)
    wanted = [(population % len(sizes), number) for population, number in rows]
    for part in (wanted[:5], wanted, wanted[::-1]):
        found = fair.subsets(*np.array(part).T)
        expected = [slow.fair_subsets(sizes[p], m, slow.word(77, p), t + 1)[t] for p, t in part]
        assert found.tolist() == expected


def test_populations_too_large_for_a_table_are_fair_too() -> None:
    """Around 2^15 items, table and arithmetic beside each other."""
    sizes, m, count = np.array([2**15, 2**15 + 1, 40_000]), 1000, 85
    fair = FairSubsets(sizes, m, 5)
    for population, size in enumerate(sizes.tolist()):
        subsets = fair.subsets(np.full(count, population), np.arange(count))
        assert all(len(np.unique(subset)) == m for subset in subsets)
        for stop in (10, 33, 41, count):
            assert np.ptp(np.bincount(subsets[:stop].ravel(), minlength=size)) <= 1


@pytest.mark.parametrize(("n", "m"), mark_long([(5, 3), (7, 4), (10, 4), (7, 3)], but_every=2))
def test_pairs_meet_as_often_as_in_independent_draws(n: int, m: int) -> None:
    """Fairness does not keep two items apart, or together."""
    count = 20_000
    together = np.zeros((n, n))
    for subset in _subsets(n, m, count):
        together[np.ix_(subset, subset)] += 1
    expected = count * m * (m - 1) / (n * (n - 1))
    for pair in combinations(range(n), 2):
        assert abs(together[pair] - expected) < 5 * np.sqrt(expected)
