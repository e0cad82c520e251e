"""The option `apart`: no two records of a group in a batch, whenever that is possible."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinfeed.samplers import (
    BatchSampler,
    MixtureSampler,
    PKBatchSampler,
    RandomSampler,
    ShardShuffleSampler,
    SubsetSampler,
    ViewSampler,
    WeightedSampler,
    replaced,
)
from twinfeed.samplers.distinct_groups import DistinctGroupsSampler


def partitions(n: int) -> Iterator[tuple[int, ...]]:
    """Yield every partition of n records into groups, as the number of each record's group."""
    found: list[tuple[int, ...]] = [()]
    for _ in range(n):
        found = [(*each, g) for each in found for g in range(max(each, default=-1) + 2)]
    yield from found


@cache
def can_place(counts: tuple[int, ...], capacities: tuple[int, ...]) -> bool:
    """Say whether groups fit batches, no two of a group in one, by trying every choice."""
    if not counts:
        return True
    open_batches = [i for i, capacity in enumerate(capacities) if capacity]
    return any(
        can_place(counts[1:], tuple(c - (i in chosen) for i, c in enumerate(capacities)))
        for chosen in combinations(open_batches, counts[0])
    )


def is_possible(groups: np.ndarray, batch_size: int, last_batch: str) -> bool:
    """Say whether batches can keep groups apart, by the definition."""
    n = len(groups)
    counts = [int((groups == g).sum()) if g >= 0 else 1 for g in sorted({*groups.tolist()})]
    counts += [1] * max(0, int((groups < 0).sum()) - 1)
    full, rest = divmod(n, batch_size)
    if last_batch != "drop":
        return can_place(tuple(counts), (batch_size,) * full + (rest,) * (rest > 0))
    drops = product(*(range(count + 1) for count in counts))
    left = (
        tuple(c - d for c, d in zip(counts, drop, strict=True))
        for drop in drops
        if sum(drop) == rest
    )
    return any(can_place(each, (batch_size,) * full) for each in left)


def check_epoch(groups: np.ndarray, sampler: BatchSampler, epoch: int) -> list[list[int]]:
    """Check an epoch's batches; return them."""
    batches = sampler.batches(epoch, 0, len(sampler))
    for ids in batches:
        of_batch = groups[ids[ids >= 0]]
        assert len(np.unique(of_batch[of_batch >= 0])) == np.count_nonzero(of_batch >= 0)
    ids = np.concatenate(batches)
    ids = np.sort(ids[ids >= 0])
    if sampler._last_batch == "drop":
        assert len(np.unique(ids)) == len(ids) == len(sampler) * sampler.batch_size
    else:
        assert np.array_equal(ids, np.arange(len(groups)))
    return [ids.tolist() for ids in batches]


@pytest.mark.parametrize(
    "n", [1, 2, 3, 4, *(pytest.param(n, marks=pytest.mark.long) for n in (5, 6, 7, 8))]
)
def test_every_possible_partition_is_served_and_every_other_refused(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By brute force, in windows of 1, 2 and 3 batches.

    All groups of up to 6 records; of more, all sizes of groups, each in one drawn arrangement.
    """
    variants = [*product((1, 2, 3), (False, True))]
    cases = [np.array(groups) for groups in partitions(n)]
    if n > 6:
        of_sizes = {(*np.sort(np.bincount(groups)),): groups for groups in cases}
        cases = [*map(np.random.default_rng(n).permutation, of_sizes.values())]
    for i, groups in enumerate(cases):
        single = np.where(np.bincount(groups)[groups] == 1, -1, groups)
        for batch_size, last_batch in product(range(1, n + 1), ("smaller", "pad", "drop")):
            possible = is_possible(groups, batch_size, last_batch)
            chosen = [variants[(i + batch_size) % len(variants)]] if n == 6 else variants
            for window, has_none in chosen:
                given = single if has_none else groups
                monkeypatch.setattr(DistinctGroupsSampler, "_min_window", window)
                options: dict[str, Any] = {"batch_size": batch_size, "last_batch": last_batch}
                order = RandomSampler(n, seed=n * 7 + batch_size)
                if not possible:
                    with pytest.raises(ValueError, match=r"record.* batch.*: lower batch_size"):
                        BatchSampler(order, **options, apart=given)
                    continue
                sampler = BatchSampler(order, **options, apart=given)
                for epoch in (0, 1):
                    whole = check_epoch(given, sampler, epoch)
                    fresh = BatchSampler(order, **options, apart=given)
                    step = len(whole) // 2
                    assert fresh.batch(epoch, step).tolist() == whole[step]


def batches_of(groups: Any, batch_size: int = 4, n: int | None = None, **options: Any) -> Any:
    """Return batches apart over a random order of as many records as there are groups."""
    n = len(groups) if n is None else n
    return BatchSampler(RandomSampler(n, seed=3), batch_size=batch_size, apart=groups, **options)


def large_groups() -> np.ndarray:
    """Return the groups of 4,000 records: one in every batch of 8, heavy, light and single ones."""
    sizes = [500, 500, 499, 300, 251, 250, 249, 120, 31] + [2] * 300
    groups = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), [-1] * 700])
    return groups[np.random.default_rng(1).permutation(len(groups))]


@pytest.mark.parametrize("last_batch", ["smaller", "pad", "drop"])
@pytest.mark.parametrize("left_out", [0, 3])
def test_groups_of_many_windows_are_apart(
    last_batch: Any, left_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that span windows, in windows of 61 to 122 batches, with and without a last batch."""
    monkeypatch.setattr(DistinctGroupsSampler, "_min_window", 61)
    groups = large_groups()
    groups = np.delete(groups, np.flatnonzero(groups == -1)[:left_out])
    sampler = batches_of(groups, 8, last_batch=last_batch)
    for epoch in range(3):
        check_epoch(groups, sampler, epoch)
    for world_size in range(1, 9):
        parts = zip(
            *(sampler.shard(r, world_size).batches(2, 58, 64) for r in range(world_size)),
            strict=True,
        )
        whole = [np.concatenate(part).tolist() for part in parts]
        assert whole == [ids.tolist() for ids in sampler.batches(2, 58, 64)]


def test_run_resumes_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh sampler with the state of any step has the rest."""
    monkeypatch.setattr(DistinctGroupsSampler, "_min_window", 5)
    groups = np.array([*range(8)] * 11 + [-1] * 9)
    expected = list(batches_of(groups, 6))
    for step in range(len(expected)):
        sampler = batches_of(groups, 6)
        sampler.load_state_dict(sampler.state_at(0, step))
        assert list(sampler) == expected[step:]


def test_groups_of_one_give_a_uniform_order() -> None:
    """Every record is equally often in every batch and place, with and without a heavy group."""
    for groups in (np.full(12, -1), np.arange(12), np.array([0] * 3 + [-1] * 9)):
        sampler = batches_of(groups)
        found = np.array([[*np.concatenate(sampler.batches(e, 0, 3))] for e in range(1200)])
        counts = np.array([np.bincount(found[:, place], minlength=12) for place in range(12)])
        assert ((counts - 100) ** 2 / 100).sum() < 200  # chi-square of 121 degrees of freedom


def test_pairs_meet_as_often_as_at_random() -> None:
    """Records of other groups share a batch equally often: the groups of 12 in pairs."""
    sampler = batches_of(np.repeat(np.arange(6), 2))
    met = np.zeros((12, 12))
    for epoch in range(1000):
        for ids in sampler.batches(epoch, 0, 3):
            met[np.ix_(ids, ids)] += 1
    pairs = met[np.triu_indices(12, 1)].reshape(-1)
    others = pairs[pairs > 0]  # 60 pairs of other groups
    assert len(others) == 60
    assert np.abs(others - 300).max() < 75  # 5 standard deviations


def test_impossible_groups_are_named_with_counts() -> None:
    """Gale and Ryser: the largest group alone does not decide."""
    with pytest.raises(ValueError, match=r"4 records of 1 groups do not fit the 1 full batches"):
        batches_of([-1, 1, 1, 1, 1, 1])
    with pytest.raises(ValueError, match=r"2 records of 1 groups .* the last has, a group once, 2"):
        batches_of([1, 1, 1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"2 records of 2 groups do not fit the 1 full batches"):
        batches_of([0, 0, 1, 1, 2])
    with pytest.raises(
        ValueError, match=r"2 records of 1 groups .* last_batch='drop' leaves out 1"
    ):
        batches_of([0, 0, 0, 1, 2], last_batch="drop")
    with pytest.raises(ValueError, match=r"6 records of 1 groups do not fit the 2 full batches"):
        batches_of([7] * 8)


@pytest.mark.parametrize(
    "groups",
    [
        ["x", "x", "y", "y", "", None],
        ("x", "x", "y", "y", None, None),
        np.array(["x", "x", "y", "y", "", ""]),
        np.array(["x", "x", "y", "y", "", None], object),
    ],
)
def test_streams_depend_on_groups_not_on_their_names(groups: Any) -> None:
    """Names are numbered as they come: other names, the same stream and state."""
    expected = batches_of(["cat", "cat", "dog", "dog", "", ""], 3)
    sampler = batches_of(groups, 3)
    assert list(sampler) == list(expected)
    assert sampler.state_dict() == expected.state_dict()


def test_integers_of_any_kind_are_groups() -> None:
    """None is -1, whatever the type of the array."""
    expected = list(batches_of(np.array([5, 5, 9, 9, -1, -1]), 3))
    masked = np.ma.array([5, 5, 9, 9, 0, 0], mask=[0, 0, 0, 0, 1, 1])
    for groups in ([5, 5, 9, 9, None, None], masked, np.array([5, 5, 9, 9, -1, -1], np.int8)):
        assert list(batches_of(groups, 3)) == expected
    hashes = list(batches_of([-7, -7, 1 << 80, 1 << 80, -1, None], 3))
    assert hashes == list(batches_of([1, 1, 2, 2, -1, -1], 3))
    for hashed in (
        np.array([-7, -7, 8, 8, -1, -1]),
        np.array([3, 3, 2**64 - 1, 2**64 - 1, 4, 5], np.uint64),
    ):
        batches = [set(hashed[ids].tolist()) for ids in batches_of(hashed, 3)]
        assert [*map(len, batches)] in ([3, 3], [3, 2], [2, 3])


@pytest.mark.parametrize(
    ("groups", "kind", "word"),
    [
        ([1, 1, 2], ValueError, "one group for each of 4 records, got (3,)"),
        ([[1], [1], [2], [2]], ValueError, "one group for each of 4 records, got (4, 1)"),
        ([1.0, 2.0, 3.0, float("nan")], TypeError, "apart must be integers or strings: 4 of 4"),
        (np.array([1, 2, 3, np.nan]), TypeError, "got dtype float64: give -1 in place of NaN"),
        (["a", "a", float("nan"), "b"], TypeError, "1 of 4 are not, nan at 2"),
        (["a", "a", 1, "b"], TypeError, "all of one kind: 1 of 4 are not, 1 at 2"),
        ([True, False, None, 1], TypeError, "apart must be integers or strings: "),
        (np.array([True, False, True, True]), TypeError, "got dtype bool"),
        ([b"a", b"b", b"c", b"d"], TypeError, "b'a' at 0"),
        ([{}, [], (), 1], TypeError, "{} at 0"),
        ("abcd", TypeError, "a group for each record, got a str"),
        (4, TypeError, "a group for each record, got an int"),
        ({0: 1, 1: 1, 2: 1, 3: 1}, TypeError, "got a dict"),
        (iter([1, 1, 2, 2]), TypeError, "got a list_iterator"),
        ([], ValueError, "one group for each of 4 records, got (0,)"),
    ],
)
def test_bad_groups_are_refused(groups: Any, kind: type[Exception], word: str) -> None:
    """In batches and in P x K."""
    calls: list[Callable[[], Any]] = [
        lambda: batches_of(groups, 2, 4),
        lambda: PKBatchSampler([0, 0, 1, 1], p=1, k=1, seed=0, apart=groups),
    ]
    for call in calls:
        with pytest.raises(kind) as caught:
            call()
        assert word in str(caught.value)


def test_one_huge_string_costs_its_own_length() -> None:
    """An array of strings would have the longest length for every record: 40 GB here."""
    groups = ["x" * 1_000_000, *map(str, range(10_000))]
    assert batches_of(groups, 64).batch(0, 0).shape == (64,)


def test_groups_are_copied_and_mapped_groups_pickle_as_paths(tmp_path: Path) -> None:
    """A change of the caller's array changes nothing; a large file is not in the pickle."""
    groups = np.arange(100_000) // 2
    sampler = batches_of(groups, 64)
    expected = sampler.batch(1, 7)
    np.save(tmp_path / "groups.npy", groups)
    mapped = batches_of(np.load(tmp_path / "groups.npy", mmap_mode="r"), 64)
    groups[:] = 0
    pickled = pickle.dumps(mapped)
    assert len(pickled) < 3000
    for same in (batches_of(np.arange(100_000) // 2, 64), sampler, pickle.loads(pickled)):
        assert np.array_equal(same.batch(1, 7), expected)
        assert same.fingerprint == sampler.fingerprint


def test_orders_of_their_own_are_refused_by_name() -> None:
    """Subsets and views of a random order are served, with the groups of all records."""
    halves = [RandomSampler(2, seed=0), RandomSampler(2, seed=1)]
    mixture = MixtureSampler(halves, weights=[1, 1], num_samples=4, seed=0)
    for order, name in (
        (WeightedSampler([1] * 4, num_samples=4, seed=0), "WeightedSampler"),
        (ShardShuffleSampler([2, 2], seed=0, block=1, window=2), "ShardShuffleSampler"),
        (mixture, "MixtureSampler"),
        (SubsetSampler(range(4), of=4, order=mixture), "MixtureSampler"),
    ):
        with pytest.raises(ValueError, match=rf"apart= needs a RandomSampler.*got {name}\("):
            BatchSampler(order, batch_size=2, apart=[0, 1, 2, 3])
    groups = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    order = SubsetSampler([1, 0, 2, 3, 7, 6], of=8, order=RandomSampler(6, seed=0))
    plain = BatchSampler(order, batch_size=3).state_dict()
    sampler = BatchSampler(order, batch_size=3, apart=groups)
    assert sampler.state_dict() != plain
    assert BatchSampler(order, batch_size=3).state_dict() == plain
    for epoch in range(20):
        assert all(len({*groups[ids]}) == 3 for ids in sampler.batches(epoch, 0, 2))
    captions = ViewSampler(RandomSampler(6, seed=0), [2, 1, 3], per_epoch="all", seed=0)
    once = BatchSampler(captions, batch_size=2, apart=[0, 1, 2])
    assert not once.traits.repeats
    assert BatchSampler(captions, batch_size=2, apart=[0, 1, -1]).traits.repeats
    for epoch in range(20):
        assert all(len({*once.records(ids)}) == 2 for ids in once.batches(epoch, 0, 3))


def test_replacements_keep_groups_apart() -> None:
    """A good record is of the group of the bad one, or of none."""
    sampler = batches_of([0, 0, 1, 1, -1, -1])
    replaced(sampler, {0: {0: [1, 4]}})
    with pytest.raises(ValueError, match="id 2 is of another class, group"):
        replaced(sampler, {0: {0: 2}})
    pk = PKBatchSampler([0, 0, 0, 1, 0, 0], p=2, k=1, seed=0, apart=[0, 0, 1, 1, -1, -1])
    replaced(pk, {0: {0: [1, 4]}})
    replaced(pk, {0: {4: 5}})
    for bad, good in ((0, 2), (4, 0)):
        with pytest.raises(ValueError, match=f"id {good} is of another class, group"):
            replaced(pk, {0: {bad: good}})


def test_records_of_a_class_are_of_different_groups() -> None:
    """P x K: groups of a class, and records of a group, are equally often used at every step."""
    labels = np.repeat([0, 1, 2], [10, 7, 5])
    sessions = np.array([0, 0, 0, 0, 0, 1, 1, 2, 3, -1, 0, 0, 1, 1, 2, 2, -1, 5, 6, 7, 5, 5])
    sampler = PKBatchSampler(labels, p=2, k=3, seed=1, apart=sessions, batches_per_epoch=40)
    used = np.zeros(22, int)
    own = np.where(sessions < 0, -2 - np.arange(22), sessions)
    pair = np.unique(np.stack([labels, own]), axis=1, return_inverse=True)[1].reshape(-1)
    for ids in sampler.batches(0, 0, 40):
        np.add.at(used, ids, 1)
        assert all(len({*pair[part]}) == 3 for part in ids.reshape(2, 3))
        assert all(len({*labels[part]}) == 1 for part in ids.reshape(2, 3))
        by_pair = np.bincount(pair, weights=used)
        for label in range(3):
            assert np.ptp(by_pair[np.unique(pair[labels == label])]) <= 1
        assert all(np.ptp(used[pair == p]) <= 1 for p in range(pair.max() + 1))
    assert len(sampler.shard(1, 2).batch(0, 0)) == 3


def test_classes_of_few_groups_are_refused_repeated_or_dropped() -> None:
    """`small` counts groups; other walks over the records exclude `apart`."""
    labels, sessions = [0] * 5 + [1] * 5, [0, 0, 0, 1, 2, 0, 0, 1, 1, 1]
    options: dict[str, Any] = {"p": 1, "k": 3, "seed": 0, "apart": sessions}
    with pytest.raises(ValueError, match=r"1 of 2 classes have fewer than k=3 groups of records"):
        PKBatchSampler(labels, **options)
    assert PKBatchSampler(labels, small="drop", **options).num_classes == 1
    repeated = PKBatchSampler(labels, small="repeat", **options)
    assert {*map(len, repeated.batches(0, 0, 3))} == {3}
    assert repr(repeated).endswith("3 batches of p=1 x k=3, 3 ids, groups apart)")
    for wrong in (
        {"coverage": "once"},
        {"super_labels": labels},
        {"order_within": "stored"},
        {"labels": [[0], [1]] * 5},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must .* with apart"):
            PKBatchSampler(**{"labels": labels, **options, "small": "drop", **wrong})
