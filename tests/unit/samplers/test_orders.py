"""Weighted, subset, split, views, mixture, and exact-once: what each promises."""

from __future__ import annotations

import functools
import math
import operator
import pickle
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.cases import mark_long

from twinfeed.samplers import (
    BatchSampler,
    ClassOrder,
    ExactOnceBatchSampler,
    MixtureSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    ShardShuffleSampler,
    SubsetSampler,
    ViewSampler,
    WeightedSampler,
    split,
)
from twinfeed.samplers.drawing.weighted_order import log


def _flat(sampler: BatchSampler | MixtureSampler, epoch: int = 0) -> np.ndarray:
    """Return an epoch of ids."""
    return np.concatenate(sampler.batches(epoch, 0, len(sampler)))


ORDERS = {
    "sequential": SequentialSampler(7),
    "random": RandomSampler(7, seed=0),
    "random-feistel": RandomSampler(40_000, seed=0),
    "subset": SubsetSampler([9, 2, 40, 7, 5, 1, 3], of=41),
    "shards": ShardShuffleSampler([3, 4], block=2, window=2, seed=0),
    "shards-stored": ShardShuffleSampler([7], block=2, window=2, order_within="stored", seed=0),
    "weighted": WeightedSampler([1, 2, 3], num_samples=7, seed=0),
    "weighted-no-replacement": WeightedSampler(np.arange(8), replacement=False, seed=0),
    "views": ViewSampler(RandomSampler(7, seed=0), [2] * 7, per_epoch="one", seed=0),
}


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> Sampler:
    """Every order, of seven positions or more."""
    return ORDERS[str(request.param)]


def test_orders_take_positions_of_any_shape_and_integer_type(order: Sampler) -> None:
    """Lists, single positions and narrow integers give what an int64 array gives."""
    expected = order.ids(200, np.arange(6))
    assert expected.dtype == np.int64
    assert order.ids(np.uint8(200), list(range(6))).tolist() == expected.tolist()
    assert order.ids(200, np.arange(6, dtype=np.uint8).reshape(2, 3)).tolist() == (
        expected.reshape(2, 3).tolist()
    )
    assert order.ids(200, 5) == expected[5]
    assert order.ids(200, []).tolist() == []


def test_orders_refuse_invalid_positions(order: Sampler) -> None:
    """No position wraps around, and none is rounded."""
    for outside in (-1, len(order)):
        words = rf"positions must be in \[0, {len(order)}\), got {outside}"
        with pytest.raises(IndexError, match=words):
            order.ids(0, [0, outside])
    with pytest.raises(TypeError, match="positions must be integers, got dtype float64"):
        order.ids(0, [0.5])
    with pytest.raises(TypeError, match=r"epoch must be an integer, got 0\.5"):
        order.ids(0.5, [0])


@pytest.mark.parametrize("n", [0, 1, 5, 761])
@pytest.mark.parametrize("last_batch", ["smaller", "pad"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_exact_once_covers_a_prime_over_any_ranks(n: int, last_batch: str, world_size: int) -> None:
    """Every record once, the same steps on every rank, padding only at the end, empties typed."""
    sampler = ExactOnceBatchSampler(n, batch_size=16, last_batch=last_batch)
    ranks = [sampler.shard(rank, world_size) for rank in range(world_size)]
    batches = [rank.batches(0, 0, len(rank)) for rank in ranks]
    assert {len(found) for found in batches} == {-(-n // 16)}
    assert all(b.dtype == np.int64 and b.ndim == 1 for found in batches for b in found)
    flat = np.concatenate([np.empty(0, np.int64), *(b for found in batches for b in found)])
    assert np.array_equal(np.sort(flat[flat >= 0]), np.arange(n))
    assert np.count_nonzero(flat < 0) == (-n % 16 if last_batch == "pad" else 0)
    assert sampler.traits.padded == (last_batch == "pad")


def test_fewer_records_than_ranks_leave_typed_empty_batches() -> None:
    """A rank with nothing left takes part in the step all the same."""
    sampler = ExactOnceBatchSampler(3, batch_size=8)
    sizes = [[len(b) for b in sampler.shard(rank, 5)] for rank in range(5)]
    assert sorted(sizes) == [[0], [0], [1], [1], [1]]


def test_ranks_without_a_record_skip_their_batch() -> None:
    """In every epoch: the other batches, their order, seeds and states are those of `"keep"`."""
    for n, batch_size, world_size in product(range(41), (8, 11), range(1, 9)):
        sampler, found = ExactOnceBatchSampler(n, batch_size=batch_size), []
        fingerprint = ExactOnceBatchSampler(n, batch_size=batch_size).fingerprint
        for rank in range(world_size):
            kept = sampler.shard(rank, world_size)
            skipping = sampler.shard(rank, world_size, empty="skip")
            batches = [ids for ids in kept if ids]
            found += functools.reduce(operator.iadd, batches, [])
            for epoch in (0, 1, 5):
                skipping.set_epoch(epoch)
                assert list(skipping) == batches
            assert len(skipping) == len(batches) >= len(kept) - 1
            assert skipping.fingerprint == kept.fingerprint == fingerprint
            for step in range(len(skipping)):
                assert np.array_equal(skipping.seeds(0, step), kept.seeds(0, step))
                assert skipping.state_at(0, step) == kept.state_at(0, step)
        assert sorted(found) == list(range(n))


def test_draws_follow_their_weights() -> None:
    """Counts over many draws are near their share, and zero stays zero."""
    weights = np.array([0, 1, 2, 5, 0.25])
    order = WeightedSampler(weights, num_samples=40_000, seed=1)
    counts = np.bincount(order.ids(0, np.arange(40_000)), minlength=5)
    expected = 40_000 * weights / weights.sum()
    assert counts[0] == 0
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected + 1)).all()


def test_integer_weights_are_used_as_they_are() -> None:
    """Scaling all weights by a power of two changes no draw; integers need no scaling."""
    places = np.arange(500)
    halves = WeightedSampler([0.5, 1.5, 1.0], num_samples=500, seed=1).ids(0, places)
    doubled = WeightedSampler([1.0, 3.0, 2.0], num_samples=500, seed=1).ids(0, places)
    assert np.array_equal(halves, doubled)
    assert np.array_equal(
        WeightedSampler(np.array([1, 3, 2], np.uint8), num_samples=500, seed=1).ids(0, places),
        WeightedSampler([1, 3, 2], num_samples=500, seed=1).ids(0, places),
    )


def test_a_tiny_weight_is_not_rounded_away() -> None:
    """A weight above zero stays above zero, however small beside the largest."""
    order = WeightedSampler([1.0, 1e-30], num_samples=2, replacement=False, seed=0)
    assert sorted(order.ids(0, np.arange(2)).tolist()) == [0, 1]


def test_without_replacement_the_first_is_drawn_by_weight() -> None:
    """The first of each epoch follows the weights; an epoch repeats nothing."""
    order = WeightedSampler([1, 2, 5], replacement=False, seed=3)
    epochs = np.array([order.ids(epoch, np.arange(3)) for epoch in range(1600)])
    assert (np.sort(epochs, axis=1) == np.arange(3)).all()
    counts = np.bincount(epochs[:, 0])
    expected = np.array([200, 400, 1000])
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


@given(x=st.floats(1e-300, 1e300))
def test_portable_logarithm_is_close_to_the_c_library(x: float) -> None:
    """Within a few units in the last place of the C library's."""
    assert log(np.array([x]))[0] == pytest.approx(math.log(x), rel=4e-15, abs=4e-16)


def test_subset_gives_its_records_in_the_inner_order() -> None:
    """Its ids, each once, in an order of places."""
    ids = np.array([9, 2, 40, 7, 5])
    inner = RandomSampler(5, seed=6)
    order = SubsetSampler(ids, of=max(ids) + 1, order=inner)
    assert np.array_equal(order.ids(3, np.arange(5)), ids[inner.ids(3, np.arange(5))])
    assert order.num_records == 41


@pytest.mark.parametrize("increases", [False, True])
def test_subset_of_ranges_is_that_of_their_records(increases: bool) -> None:
    """Its ids, its spans, and the mask that is made of them; its pickle is small."""
    bounds = [(6, 8), (0, 3), (20, 30)]
    bounds = sorted(bounds) if increases else bounds
    ids = np.concatenate([np.arange(*pair) for pair in bounds])
    for order in (
        RandomSampler(15, seed=1),
        ShardShuffleSampler([5, 10], block=3, window=2, seed=0),
    ):
        few = SubsetSampler(ranges=bounds, of=40, order=order)
        listed = SubsetSampler(ids, of=40, order=order)
        assert few.ids(2, np.arange(15)).tolist() == listed.ids(2, np.arange(15)).tolist()
        assert few.traits.reads_blocks == listed.traits.reads_blocks
        assert np.array_equal(few.spans(ids, 2), listed.spans(ids, 2))
        assert np.array_equal(few.traits.record_ids, ids)
        assert np.isin(np.arange(40), few.traits.record_ids).sum() == 15
    many = SubsetSampler(ranges=[(0, 10**9), (2 * 10**9, 3 * 10**9)], of=10**10)
    assert many.ids(0, [10**9 - 1, 10**9]).tolist() == [10**9 - 1, 2 * 10**9]
    assert len(pickle.dumps(many)) < 2000


def test_subset_divides_batches_by_sections_of_the_inner_order() -> None:
    """The shard-aware shuffle inside a subset divides batches as it would alone."""
    inner = ShardShuffleSampler([30, 34], seed=0, block=4, window=4, sections=2)
    inner_stream = BatchSampler(inner, batch_size=8)
    subset = BatchSampler(SubsetSampler(np.arange(64) + 100, of=164, order=inner), batch_size=8)
    assert np.array_equal(_flat(inner_stream) + 100, _flat(subset))


def parts(*records: Any, **options: Any) -> tuple[np.ndarray, ...]:
    """Return the parts of a split, of which none is empty: this is refused."""
    try:
        return split(*records, **options)
    except ValueError as error:
        assume("fell into part" not in str(error))
        raise


@given(n=st.integers(0, 3000), more=st.integers(0, 500), fraction=st.floats(0, 1))
def test_split_keeps_records_on_their_side_as_data_grows(
    n: int, more: int, fraction: float
) -> None:
    """Both sides are sorted and disjoint, and records keep their side."""
    train, validation = parts(n, fraction=fraction, seed=4)
    assert np.array_equal(np.sort(np.concatenate([train, validation])), np.arange(n))
    assert (np.diff(train) > 0).all()
    grown = parts(n + more, fraction=fraction, seed=4)[1]
    assert np.array_equal(grown[grown < n], validation)


def test_split_by_keys_follows_the_key_not_the_record_number() -> None:
    """A key has its side, whatever its number; about the fraction goes to validation."""
    keys = [f"image-{i}" for i in range(4000)]
    validation = {keys[i] for i in split(keys, fraction=0.25, seed=1)[1]}
    backwards = keys[::-1]
    assert {backwards[i] for i in split(backwards, fraction=0.25, seed=1)[1]} == validation
    assert len(validation) == pytest.approx(1000, abs=100)
    assert split(keys, fraction=0.0, seed=1)[1].size == 0
    assert split(keys, fraction=1.0, seed=1)[0].size == 0


def test_a_split_takes_keys_as_an_array_and_of_any_string() -> None:
    """Numpy's strings have the sides of Python's; a name that is no UTF-8 has a side too."""
    keys = ["a", "b\udcff", "c", "d", "e"]
    expected = [side.tolist() for side in split(keys, fraction=0.5, seed=0)]
    found = split(np.array(keys), fraction=np.float32(0.5), seed=np.uint8(0))
    assert [side.tolist() for side in found] == expected
    assert all(expected)


LABELS = st.lists(st.integers(0, 6), max_size=60)
FRACTIONS = st.floats(0, 1) | st.sampled_from([0.1, 0.2, 0.5])


@given(labels=LABELS, fraction=FRACTIONS, seed=st.integers(0, 1000))
def test_a_split_by_labels_has_the_fraction_of_each_class(
    labels: list[int], fraction: float, seed: int
) -> None:
    """Each class and all records together have it to within one record; no record is lost."""
    n = len(labels)
    train, validation = parts(n, fraction=fraction, seed=seed, by=labels)
    assert np.array_equal(np.sort(np.concatenate([train, validation])), np.arange(n))
    counts = np.bincount(labels, minlength=7) if n else np.zeros(7)
    held = np.bincount(np.array(labels, int)[validation], minlength=7)
    assert (abs(held - counts * fraction) < 1).all()
    assert abs(len(validation) - n * fraction) < 1


@given(labels=LABELS, seed=st.integers(0, 1000))
def test_split_by_labels_does_not_depend_on_class_names(labels: list[int], seed: int) -> None:
    """And takes, of each class, the records with the lowest hashes: more with a larger fraction."""
    sides = [parts(len(labels), fraction=f, seed=seed, by=labels)[1] for f in (0.3, 0.6)]
    for names in ([f"class {-label}" for label in labels], ClassOrder(labels)):
        assert np.array_equal(split(len(labels), fraction=0.3, seed=seed, by=names)[1], sides[0])
    if len(set(labels)) == 1:
        assert set(sides[0]) <= set(sides[1])


def test_rare_classes_have_their_share_of_validation() -> None:
    """Of 1,000 classes of 3 records a tenth is 300 records, not 0 of each class."""
    labels = np.repeat(np.arange(1000), 3)
    held = split(3000, fraction=0.1, seed=0, by=labels)[1]
    assert len(held) == 300
    assert np.bincount(labels[held]).max() == 1


@given(
    groups=st.lists(st.integers(-3, 30), min_size=2, max_size=60),
    more=st.lists(st.integers(-3, 30), max_size=9),
)
def test_no_group_straddles_a_split(groups: list[int], more: list[int]) -> None:
    """And a group keeps its side as data grows, whatever the number of its records."""
    train, validation = parts(len(groups), fraction=0.5, seed=3, groups=groups)
    of = np.array(groups)
    assert not set(of[train]) & set(of[validation])
    assert np.array_equal(np.sort(np.concatenate([train, validation])), np.arange(len(groups)))
    grown = split(len(groups + more), fraction=0.5, seed=3, groups=groups + more)[1]
    assert np.array_equal(grown[grown < len(groups)], validation)


def test_groups_of_one_record_equal_no_groups() -> None:
    plain = split(100, fraction=0.3, seed=5)
    grouped = split(100, fraction=0.3, seed=5, groups=np.arange(100))
    assert [side.tolist() for side in grouped] == [side.tolist() for side in plain]
    keys = [f"k{n}" for n in range(100)]
    named = split(100, fraction=0.3, seed=5, groups=keys)
    assert [side.tolist() for side in named] == [
        side.tolist() for side in split(keys, fraction=0.3, seed=5)
    ]


@given(
    # So many records, and fractions so large, that few splits have an empty part.
    labels=st.lists(st.integers(0, 6), min_size=40, max_size=90),
    fraction=st.floats(0.3, 0.8),
    seed=st.integers(0, 1000),
)
def test_split_into_several_sides_begins_as_split_into_two(
    labels: list[int], fraction: float, seed: int
) -> None:
    """So what changes among the later sides leaves the first as it is; no record is lost."""
    n, half = len(labels), fraction / 2
    for by in (None, labels):
        two, several = (
            parts(n, fraction=[1 - sum(later), *later], seed=seed, by=by)
            for later in ([fraction], [half, half / 2, half / 2])
        )
        assert np.array_equal(two[0], parts(n, fraction=fraction, seed=seed, by=by)[0])
        assert np.array_equal(two[0], several[0])
        assert np.array_equal(np.sort(np.concatenate(several)), np.arange(n))
        last = parts(n, fraction=half / 2, seed=seed)[1]
        assert by is not None or np.array_equal(several[-1], last)


@given(
    group_labels=st.lists(st.integers(0, 3), min_size=8, max_size=60),
    size=st.integers(1, 5),
    fractions=st.sampled_from([[0.8, 0.2], [0.5, 0.3, 0.2], [0.6, 0.0, 0.4]]),
    seed=st.integers(0, 9),
)
def test_split_by_class_and_group_keeps_groups_whole_and_classes_in_proportion(
    group_labels: list[int], size: int, fractions: list[float], seed: int
) -> None:
    """Groups of one class: each part has its fraction of each class, to within a group or so."""
    sizes = 1 + np.arange(len(group_labels)) % size
    groups = np.repeat(np.arange(len(group_labels)), sizes)
    labels = np.repeat(group_labels, sizes)
    sides = parts(len(groups), fraction=fractions, seed=seed, by=labels, groups=groups)
    assert np.array_equal(np.sort(np.concatenate(sides)), np.arange(len(groups)))
    of_groups = [set(groups[side].tolist()) for side in sides]
    assert sum(map(len, of_groups)) == len(group_labels)
    for side, fraction in zip(sides, fractions, strict=True):
        counts = np.bincount(labels[side], minlength=4)
        expected = fraction * np.bincount(labels, minlength=4)
        assert (abs(counts - expected) <= 1.5 * size).all()
        assert fraction > 0 or not len(side)


def test_split_by_class_and_group_takes_records_without_a_class_for_no_class() -> None:
    """The records of the classes that `ClassOrder.largest` leaves out count by number alone."""
    labels = np.array(list("100120022012210111000120"), int)
    groups = np.array(list("021105223210512000434220"), int)
    sides = split(24, fraction=0.5, seed=0, by=ClassOrder(labels)._largest(2), groups=groups)
    assert [np.bincount(labels[side])[:2].tolist() for side in sides] == [[5, 4], [5, 4]]


def test_split_into_several_sides_keeps_class_fractions() -> None:
    """Of large classes and of small ones, on each side to within two records."""
    for size in (3, 1000):
        labels = np.repeat(np.arange(3000 // size), size)
        sides = split(3000, fraction=[0.7, 0.2, 0.1], seed=0, by=labels)
        assert [len(side) for side in sides] == [2100, 600, 300]
        held = np.array([np.bincount(labels[side], minlength=3000 // size) for side in sides])
        assert (abs(held - size * np.array([[0.7], [0.2], [0.1]])) < 2).all()


def test_splits_have_golden_vectors() -> None:
    labels = [0, 1, 2, 0, 1, 0] * 4
    several = [0.5, 0.25, 0.25]
    assert split(24, fraction=several, seed=1, by=labels)[1].tolist() == [1, 3, 6, 14, 19, 23]
    assert split(24, fraction=several, seed=4)[1].tolist() == [2, 5, 7, 10, 13, 17, 18, 21, 22, 23]
    assert split(24, fraction=0.25, seed=1, by=labels)[1].tolist() == [0, 5, 8, 16, 18, 22]
    # Classes of 4 and 5 records, whose counts depend on the order in which classes are rounded.
    uneven = split(23, fraction=[0.5, 0.3, 0.2], seed=1, by=np.arange(23) * 7 % 5)
    assert uneven[1].tolist() == [0, 1, 2, 6, 7, 8, 18, 19]
    assert split(24, fraction=0.4, seed=4, groups=labels)[1].tolist() == [2, 8, 14, 20]
    trios = split(24, fraction=[0.5, 0.3, 0.2], seed=1, by=labels, groups=np.arange(24) // 3)
    assert trios[1].tolist() == [6, 7, 8, 15, 16, 17]
    # A sum of floats that is rounded at each step, as on Python 3.11, deals these otherwise.
    patients, ill = [0, 0, 0, 1, 1, 2, 2, 3, 3, 3], [1, 1, 1, 1, 0, 0, 0, 0, 0, 1]
    rounded = split(10, fraction=0.5, seed=0, by=ill, groups=patients)
    assert rounded[1].tolist() == [0, 1, 2, 5, 6]
    named = [f"g{label}" for label in labels]
    held = split(24, fraction=0.4, seed=5, groups=named)[1]
    assert held.tolist() == [1, 4, 7, 10, 13, 16, 19, 22]


def test_one_view_per_epoch_shows_each_in_turn() -> None:
    """After V epochs a record of V views has shown all of its views."""
    counts = [1, 2, 3, 4]
    stream = BatchSampler(
        ViewSampler(RandomSampler(4, seed=0), counts, per_epoch="one", seed=1), batch_size=3
    )
    views_seen: list[list[int]] = [[] for _ in counts]
    for epoch in range(12):
        ids = _flat(stream, epoch)
        records, views = stream.records(ids), stream.views(ids)
        assert sorted(records.tolist()) == [0, 1, 2, 3]
        for record, view in zip(records.tolist(), views.tolist(), strict=True):
            views_seen[record].append(view)
    for count, views in zip(counts, views_seen, strict=True):
        traversals = np.sort(np.array(views).reshape(-1, count), axis=1)
        assert (traversals == np.arange(count)).all()


def test_all_views_per_epoch_are_all_pairs() -> None:
    """Every (record, view) pair once; records without views never come."""
    order = ViewSampler(RandomSampler(6, seed=0), [2, 0, 3, 1], per_epoch="all", seed=1)
    ids = order.ids(0, np.arange(6))
    pairs = sorted(zip(order.records(ids).tolist(), order.views(ids).tolist(), strict=True))
    assert pairs == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2), (3, 0)]


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    data=st.data(),
    batch=st.integers(1, 7),
)
def test_mixture_is_exact_and_orders_run_their_own_epochs(
    lengths: list[int], data: st.DataObject, batch: int
) -> None:
    """Each period of sum(weights) samples is in proportion, and each stream its order's epochs."""
    weights = [data.draw(st.integers(1, 4)) for _ in lengths]
    orders = [RandomSampler(n, seed=i) for i, n in enumerate(lengths)]
    mixture = MixtureSampler(orders, weights=weights, num_samples=11 * batch, seed=0)
    stream = BatchSampler(mixture, batch_size=batch)
    flat = np.concatenate([_flat(stream, epoch) for epoch in range(3)])
    bounds = np.cumsum([0, *lengths])
    which = np.searchsorted(bounds, flat, side="right") - 1
    period = sum(weights)
    for start in range(0, len(flat) - period + 1, period):
        window = np.bincount(which[start : start + period], minlength=len(lengths))
        assert window.tolist() == weights
    for number, order in enumerate(orders):
        own = flat[which == number] - bounds[number]
        epochs = range(-(-len(own) // len(order)))
        expected = np.concatenate([order.ids(e, np.arange(len(order))) for e in epochs])
        # The head of an epoch may come in another order, so that no batch has a record twice.
        whole = len(own) // len(order) * len(order)
        own, expected = (ids[:whole].reshape(-1, len(order)) for ids in (own, expected))
        assert np.array_equal(np.sort(own, axis=1), np.sort(expected, axis=1))
        changed = (own != expected).any(axis=0)
        assert len(order) < 2 * batch or not changed[batch:].any()


def test_each_rank_of_a_mixture_gets_every_order() -> None:
    """Four orders in turn, batches of 8 over 8 ranks: no rank gets one order in all batches."""
    orders = [RandomSampler(1000, seed=seed) for seed in range(4)]
    for weights in ([1, 1, 1, 1], [5, 1, 1, 1], [2048, 1024, 512, 512]):
        mixture = MixtureSampler(orders, weights=weights, num_samples=8000, seed=0)
        stream = BatchSampler(mixture, batch_size=8)
        for rank in range(8):
            shard = stream.shard(rank, 8)
            ids = np.concatenate([b for e in (0, 1) for b in shard.batches(e, 0, len(shard))])
            share = np.bincount(ids // 1000, minlength=4) / len(ids)
            assert np.abs(share - np.array(weights) / sum(weights)).max() < 0.05


@pytest.mark.parametrize(
    ("weights", "lengths", "batch"),
    mark_long(
        [
            ([1, 1], [64, 999], 32),
            ([3, 1], [64, 999], 32),
            ([15, 1], [64, 50], 32),
            ([1, 1, 1], [10, 9, 64], 7),
            ([3, 1, 2], [11, 30, 40], 7),
            ([1], [70], 32),
            ([500, 1], [300, 7], 100),
        ],
        but_every=2,
    ),
)
def test_no_batch_of_a_mixture_has_a_record_twice(
    weights: list[int], lengths: list[int], batch: int
) -> None:
    """Where an order begins again in the middle of a batch; of views, no record twice either."""
    for views in (False, True):
        orders: list[Sampler] = [RandomSampler(n, seed=n) for n in lengths]
        if views:
            orders = [ViewSampler(o, [3] * len(o), per_epoch="one", seed=0) for o in orders]
        mixture = MixtureSampler(orders, weights=weights, num_samples=1003, seed=1)
        stream = BatchSampler(mixture, batch_size=batch)
        batches = [b for epoch in range(8) for b in stream.batches(epoch, 0, len(stream))]
        assert all(len(np.unique(stream.records(b))) == len(b) for b in batches)


def test_mixture_reduces_weights_and_pickles_small() -> None:
    """A common divisor makes no period longer; the table of a period is not pickled."""
    orders = [RandomSampler(7, seed=0), RandomSampler(9, seed=1)]

    def mixed(weights: list[int]) -> MixtureSampler:
        mixture = MixtureSampler(orders, weights=weights, num_samples=320, seed=2)
        return BatchSampler(mixture, batch_size=8)

    assert np.array_equal(_flat(mixed([30, 50])), _flat(mixed([3, 5])))
    assert mixed([30, 50]).fingerprint == mixed([3, 5]).fingerprint
    large = mixed([100_001, 50_000])
    clone = pickle.loads(pickle.dumps(large))
    assert np.array_equal(_flat(clone), _flat(large))
    assert len(pickle.dumps(large)) < 3000


def test_mixture_of_views_gives_records_and_views() -> None:
    """Ids, records and views are those of the joined index."""
    views = ViewSampler(SequentialSampler(2), [2, 3], per_epoch="one", seed=0)
    mixture = MixtureSampler([SequentialSampler(3), views], weights=[1, 1], num_samples=20, seed=0)
    stream = BatchSampler(mixture, batch_size=4)
    ids = _flat(stream)
    assert stream.num_records == 5
    records, shown = stream.records(ids), stream.views(ids)
    assert np.array_equal(records, np.where(ids < 3, ids, np.where(ids < 5, 3, 4)))
    assert np.array_equal(shown, np.where(ids < 3, 0, np.where(ids < 5, ids - 3, ids - 5)))


BLOCKS = ShardShuffleSampler([6, 0, 4], block=4, window=2, seed=0)


def spans(order: Sampler, records: list[int]) -> list[tuple[int, int]]:
    """Return the range of each record."""
    return list(zip(*(part.tolist() for part in order.spans(np.array(records))), strict=True))


def test_blocks_of_composed_samplers_cover_their_records() -> None:
    """A subset's are records, views' are records, a mixture's those of the joined index."""
    assert spans(BLOCKS, [0, 3, 4, 6, 9]) == [(0, 4), (0, 4), (4, 6), (6, 10), (6, 10)]
    some = SubsetSampler([1, 2, 3, 5, 6, 20, 40, 60, 80, 100], of=101, order=BLOCKS)
    assert spans(some, [1, 5, 6, 20, 100]) == [
        (1, 6),
        (1, 6),
        (6, 7),
        (20, 21),
        (100, 101),
    ]
    mixed = SubsetSampler([2, 1, 3, 5, 6, 20, 40, 60, 80, 100], of=101, order=BLOCKS)
    assert not mixed.traits.reads_blocks
    assert spans(mixed, [1]) == [(1, 2)]
    one = ViewSampler(BLOCKS, [2] * 10, per_epoch="one", seed=0)
    assert spans(one, [0, 9]) == [(0, 4), (6, 10)]
    pairs = ViewSampler(BLOCKS, [2] * 5, per_epoch="all", seed=0)
    assert spans(pairs, [0, 1, 2, 3, 4]) == [(0, 2), (0, 2), (2, 3), (3, 5), (3, 5)]
    both = MixtureSampler([RandomSampler(3, seed=0), BLOCKS], weights=[1, 1], num_samples=9, seed=0)
    assert both.traits.reads_blocks
    assert spans(both, [2, 3, 12]) == [(2, 3), (3, 7), (9, 13)]


@pytest.mark.parametrize("last_batch", ["smaller", "pad", "drop"])
@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_epochs_of_a_chosen_length_cut_the_endless_stream(last_batch: Any, length: int) -> None:
    """Epoch k is batches k * n to (k + 1) * n; the order begins anew wherever an epoch ends."""
    order = RandomSampler(15, seed=3)
    whole = BatchSampler(order, batch_size=4, last_batch=last_batch)
    endless = [ids.tolist() for epoch in range(9) for ids in whole.batches(epoch, 0, len(whole))]
    cut = BatchSampler(order, batch_size=4, last_batch=last_batch, batches_per_epoch=length)
    epochs = range(len(endless) // length)
    found = [ids.tolist() for epoch in epochs for ids in cut.batches(epoch, 0, length)]
    assert len(cut) == length
    assert found == endless[: len(found)]


def test_batches_per_epoch_must_be_a_positive_integer() -> None:
    for wrong, message in ((0, "at least 1"), (2.5, "batches_per_epoch must be an integer")):
        with pytest.raises((TypeError, ValueError), match=message):
            BatchSampler(SequentialSampler(4), batch_size=2, batches_per_epoch=wrong)  # type: ignore[arg-type]


def test_views_declare_repeats_where_a_batch_may_repeat_a_record() -> None:
    """Loaders share what is read for a record that comes twice: `repeats` must say so."""
    for per_epoch, counts in (("one", [3, 2]), ("all", [3, 2]), ("all", [1, 1])):
        places = sum(counts) if per_epoch == "all" else 2
        order = ViewSampler(RandomSampler(places, seed=0), counts, per_epoch=per_epoch, seed=0)  # type: ignore[arg-type]
        stream = BatchSampler(order, batch_size=places)
        records = [stream.records(stream.batch(epoch, 0)).tolist() for epoch in range(3)]
        assert stream.traits.repeats == any(len(set(row)) < len(row) for row in records)
