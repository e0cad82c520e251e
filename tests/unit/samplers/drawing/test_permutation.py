"""The keyed words and permutations: equal to their slow definitions, and random enough."""

from __future__ import annotations

import tracemalloc
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import sampler_definitions as slow
from support.cases import mark_long

from twinfeed.samplers import RandomSampler
from twinfeed.samplers.drawing.permutation import (
    MAX_TABLE_SIZE,
    inverse_permute,
    permute,
    permute_rows,
    random_permutations,
)
from twinfeed.samplers.drawing.random_words import derive, random_words, root_key, uniform_below

KEYS = random_words(2026, np.arange(1000))
LARGE = [2**20 - 1, 2**20 + 1, 10**12]


@given(key=st.integers(0, 2**64 - 1), counter=st.integers(0, 2**63 - 1))
def test_words_equal_splitmix64(key: int, counter: int) -> None:
    """The vectorised word equals the definition in Python integers, and keys are words."""
    assert int(random_words(key, np.array([counter]))[0]) == slow.word(key, counter)
    assert derive(key, counter, 3) == slow.word(slow.word(key, counter), 3)


@given(word=st.integers(0, 2**64 - 1), bound=st.integers(1, 2**62))
def test_uniform_below_is_below_and_proportional_to_the_word(word: int, bound: int) -> None:
    """Scaling loses at most the carry of the lowest partial products."""
    found = int(uniform_below(np.array([word], dtype=np.uint64), bound)[0])
    assert 0 <= word * bound // 2**64 - found <= 2
    assert 0 <= found < bound


def test_keys_of_seed_and_epoch_are_independent() -> None:
    """Seed 1 epoch 2, seed 2 epoch 1 and other purposes have nothing in common."""
    keys = {
        derive(root_key(seed, purpose), epoch)
        for seed in range(20)
        for purpose in ("a", "b")
        for epoch in range(20)
    }
    assert len(keys) == 800
    one, two = RandomSampler(1000, seed=1), RandomSampler(1000, seed=2)
    positions = np.arange(1000)
    assert np.mean(one.ids(2, positions) == two.ids(1, positions)) < 0.02


@given(n=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
def test_small_permutations_are_sorted_words(n: int, key: int) -> None:
    """A table equals the slow sort."""
    assert permute(n, key, np.arange(n)).tolist() == slow.permutation(n, key)


@given(
    n=st.one_of(st.integers(1, 300), st.integers(MAX_TABLE_SIZE - 9, MAX_TABLE_SIZE)),
    key=st.integers(0, 2**64 - 1),
    width=st.integers(1, 9),
)
def test_rows_of_permutations_are_sorted_words_or_arithmetic(n: int, key: int, width: int) -> None:
    """Entries equal the slow definitions, in few long rows and in many short ones."""
    place = np.random.default_rng(n).integers(0, n, 20)
    entry = slow.row(n, key) if n <= 64 else [slow.narrow_feistel(n, key, int(i)) for i in place]
    expected = [entry[i] for i in place] if n <= 64 else entry
    sizes, keys = np.array([n, 5, 10**6, n]), np.array([1, 2, 3, key], dtype=np.uint64)
    rows = permute_rows(sizes, keys, np.resize(place, (4, 20)) % sizes[:, None])
    assert rows[3].tolist() == expected
    keys = np.full(20, key, np.uint64)
    rows = permute_rows(np.full(20, n), keys, place[:, None].repeat(width, 1))
    assert rows.tolist() == [[each] * width for each in expected]


@settings(max_examples=50)
@given(n=st.integers(MAX_TABLE_SIZE + 1, 2**62), key=st.integers(0, 2**64 - 1), data=st.data())
def test_large_permutations_are_the_feistel_network(n: int, key: int, data: st.DataObject) -> None:
    """Entries equal the walk in Python integers, alone and as a row among others."""
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    expected = [slow.feistel(n, key, place) for place in places]
    assert permute(n, key, np.array(places)).tolist() == expected
    sizes, keys = np.array([7, n, 10**6]), np.array([1, key, 2], dtype=np.uint64)
    rows = permute_rows(sizes, keys, np.array([places] * 3) % sizes[:, None])
    assert rows[1].tolist() == expected


@pytest.mark.parametrize(
    "n",
    [*range(1, 200), *range(MAX_TABLE_SIZE - 1, MAX_TABLE_SIZE + 2), 40_000, 181**2, 182 * 181],
)
def test_permutations_contain_every_item_once(n: int) -> None:
    """On both sides of each branch, and where the grid has no cell to spare."""
    assert np.array_equal(np.sort(permute(n, 11, np.arange(n))), np.arange(n))
    rows = permute_rows(np.full(3, n), KEYS[:3], np.resize(np.arange(n), (3, n)))
    assert np.array_equal(np.sort(rows), np.resize(np.arange(n), (3, n)))


@pytest.mark.parametrize("n", [1, 5, 1 << 15, (1 << 15) + 1, 40_000, 2**20 + 1, 10**12])
def test_inverse_permute_inverts_permute(n: int) -> None:
    at = np.unique(np.linspace(0, n - 1, 999).astype(np.int64))
    for key in (0, 7, 2**64 - 1):
        assert np.array_equal(inverse_permute(n, key, permute(n, key, at)), at)


def test_random_access_takes_constant_memory() -> None:
    """An id of 10^12 takes as little time and memory as an id of 10^6."""
    order = RandomSampler(10**12, seed=0)
    tracemalloc.start()
    ids = order.ids(10**6, np.array([0, 10**12 - 1]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(np.unique(ids)) == 2
    assert peak < 1_000_000


@pytest.mark.parametrize("n", range(1, 7))
def test_all_permutations_of_few_items_are_equally_likely(n: int) -> None:
    """Law 10: a chi-square over all n! permutations."""
    kinds = list(permutations(range(n)))
    rows = random_permutations(random_words(99, np.arange(60 * len(kinds))), n)
    _, counts = np.unique(rows, axis=0, return_counts=True)
    assert len(counts) == len(kinds)
    if n > 1:
        value = slow.p_value(((counts - 60) ** 2 / 60).sum(), len(kinds) - 1)
        assert 1e-4 < value < 1 - 1e-4


def _chi_square(
    rows: np.ndarray, columns: np.ndarray, sizes: tuple[int, int], *, whole: bool
) -> float:
    """Return the p-value of independence of two uniform numbers below their sizes.

    Of whole permutations the column sums are fixed as well, which takes away some freedom.
    """
    bins = [min(32, size) for size in sizes]
    cells = [r * b // s for r, b, s in zip((rows, columns), bins, sizes, strict=True)]
    counts = np.zeros(bins)
    np.add.at(counts, tuple(cells), 1)
    share = np.bincount(np.arange(sizes[1]) * bins[1] // sizes[1]) if sizes[1] < 2**22 else None
    column = np.full(bins[1], 1 / bins[1]) if share is None else share / sizes[1]
    expected = counts.sum(axis=1, keepdims=True) * column
    statistic = ((counts - expected) ** 2 / expected).sum()
    return slow.p_value(statistic, (bins[0] - whole) * (bins[1] - 1))


def one_by_one(n: int, place: np.ndarray) -> np.ndarray:
    """Return entries of one permutation a key."""
    return np.array([permute(n, key, place) for key in KEYS.tolist()])


def in_rows(n: int, place: np.ndarray) -> np.ndarray:
    """Return entries of one permutation a key, all at once."""
    return permute_rows(np.full(len(KEYS), n), KEYS, np.resize(place, (len(KEYS), len(place))))


EDGES = [33, 64, 65, 72, 100, 129, 1000, MAX_TABLE_SIZE - 1, MAX_TABLE_SIZE, MAX_TABLE_SIZE + 1]


@pytest.mark.parametrize(
    ("entries", "n"),
    mark_long(
        [*((one_by_one, n) for n in [7, 1000, *LARGE]), *((in_rows, n) for n in [7, *EDGES])],
        but_every=3,
    ),
)
def test_positions_values_and_differences_are_independent(entries: Any, n: int) -> None:
    """Law 10: 32 x 32 chi-squares of place against value and difference, 1,000 keys.

    For few items, all differences are equally frequent, too.
    """
    whole = n <= 1000
    place = np.arange(n - 1) if whole else np.arange(2048) * (n - 1) // 2048
    value, following = entries(n, place), entries(n, place + 1)
    places = np.broadcast_to(place, value.shape).ravel()
    values = _chi_square(places, value.ravel(), (n - 1, n), whole=whole)
    step = (following - value) % n - 1
    differences = _chi_square(places, step.ravel(), (n - 1, n - 1), whole=False)
    assert 1e-4 < values < 1 - 1e-4
    assert 1e-4 < differences < 1 - 1e-4
    if whole:
        times, expected = np.bincount(step.ravel(), minlength=n - 1), step.size / (n - 1)
        single = slow.p_value(((times - expected) ** 2 / expected).sum(), n - 2)
        assert 1e-4 < single < 1 - 1e-4


def test_chi_square_rejects_what_is_not_random() -> None:
    """The instrument sees a shift by a constant, and an affine map."""
    place = np.arange(1000)
    for value in ((place + 17) % 1000, place * 7 % 1000):
        assert _chi_square(place, value, (1000, 1000), whole=True) < 1e-4
