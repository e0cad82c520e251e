"""P x K: whole batches, fair at every step, for any classes and any schedule."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike
from support import sampler_definitions as slow
from support.sampler_cases import LABELS, NAMES, SUPER

from twinfeed.samplers import ExactOnceBatchSampler, PKBatchSampler, StateMismatchError

FIRST_NAMES = np.array(["zoe", "amy", "bob", "cid", "dan", "eve", "fay", "gus", "hal", "ida"])
CLASS_SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=8)
CHANGES = st.dictionaries(st.integers(1, 40), st.integers(1, 4), max_size=3)


def _labels(sizes: list[int], seed: int = 0) -> np.ndarray:
    """Return shuffled labels of classes of these sizes."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))


def _check_batches(
    sampler: PKBatchSampler, labels: np.ndarray, ps: list[int], ks: list[int]
) -> None:
    """Check law 3 and law 4 over global steps of which P and K are given."""
    steps, sizes = len(sampler), np.bincount(labels)
    batches = [b for e in range(len(ps) // steps) for b in sampler.batches(e, 0, steps)]
    classes, records = np.zeros(len(sizes), int), np.zeros(len(labels), int)
    for step, (batch, p, k) in enumerate(zip(batches, ps, ks, strict=True)):
        blocks = labels[batch].reshape(p, k)
        assert (blocks == blocks[:, :1]).all()
        assert len(np.unique(blocks)) == p
        for block in batch.reshape(p, k):
            assert len(np.unique(block)) == min(k, sizes[labels[block[0]]])
        if step and p != ps[step - 1]:
            classes[:] = 0
        if step and (p, k) != (ps[step - 1], ks[step - 1]):
            records[:] = 0
        classes[blocks[:, 0]] += 1
        np.add.at(records, batch, 1)
        assert np.ptp(classes) <= 1
        assert all(np.ptp(records[labels == c]) <= 1 for c in np.unique(labels))


def _at(schedule: dict[int, int], steps: int) -> list[int]:
    """Return the value of a schedule at each step."""
    return [schedule[max(s for s in schedule if s <= step)] for step in range(steps)]


@settings(max_examples=40)
@given(sizes=CLASS_SIZES, data=st.data(), seed=st.integers(0, 2**64 - 1))
def test_batches_are_whole_and_fair_for_any_schedule(
    sizes: list[int], data: st.DataObject, seed: int
) -> None:
    """Laws 3 and 4: P distinct classes, K records each, counts within 1 between changes."""
    p_values = st.integers(1, len(sizes))
    p = {0: data.draw(p_values), **data.draw(st.dictionaries(st.integers(1, 40), p_values))}
    k = {0: data.draw(st.integers(1, 5)), **data.draw(CHANGES)}
    labels = _labels(sizes)
    sampler = PKBatchSampler(labels, p=p, k=k, seed=seed, batches_per_epoch=15, small="repeat")
    _check_batches(sampler, labels, _at(p, 60), _at(k, 60))


def test_draws_are_fair_over_many_epochs_and_unequal_classes() -> None:
    """The long run: 2,000 steps over the cases' labels."""
    sampler = PKBatchSampler(LABELS, p=4, k=2, seed=5, batches_per_epoch=100)
    _check_batches(sampler, LABELS, [4] * 2000, [2] * 2000)


def test_draws_equal_the_slow_definition() -> None:
    """Classes by fair groups of P, records by fair groups of K numbered by the class's draws."""
    sampler = PKBatchSampler(LABELS, p=4, k=2, seed=5)
    keys = sampler._source.keys
    sizes = Counter(LABELS.tolist())
    order = sorted(sizes, key=lambda label: -sizes[label])  # stable: equal sizes by first record
    members = [np.flatnonzero(label == LABELS) for label in order]
    class_key = slow.word(slow.word(keys["class"], 0), 0)
    record_key = slow.word(keys["record"], 0)
    draws: Counter[int] = Counter()
    expected = []
    for group in slow.fair_subsets(10, 4, class_key, 3 * len(sampler)):
        batch: list[int] = []
        for number in group:
            walk = slow.fair_subsets(
                len(members[number]), 2, slow.word(record_key, number), draws[number] + 1
            )
            batch += members[number][walk[-1]].tolist()
            draws[number] += 1
        expected.append(batch)
    found = [b.tolist() for e in range(3) for b in sampler.batches(e, 0, len(sampler))]
    assert found == expected


def test_change_of_k_does_not_change_the_classes() -> None:
    """The classes of every step are those of the stream without the change."""
    ks = {0: 2, 7: 1, 20: 3}
    changed = PKBatchSampler(LABELS, p=4, k=ks, seed=1, batches_per_epoch=30, small="repeat")
    plain = PKBatchSampler(LABELS, p=4, k=2, seed=1, batches_per_epoch=30)
    for step, k in enumerate(_at(ks, 60)):
        left = LABELS[changed.batch(*divmod(step, 30))][::k]
        assert np.array_equal(left, LABELS[plain.batch(*divmod(step, 30))][::2])


def test_schedules_count_training_steps_across_epochs() -> None:
    """K changes at global step 1000, in the middle of an epoch of 30."""
    sampler = PKBatchSampler(LABELS, p=4, k={0: 1, 1000: 2}, seed=1, batches_per_epoch=30)
    sizes = [len(b) for e in (33,) for b in sampler.batches(e, 0, 30)]
    assert sizes == [4] * 10 + [8] * 20


@pytest.mark.parametrize("small", ["raise", "repeat", "drop"])
def test_state_covers_the_schedule_up_to_its_position(small: str) -> None:
    """What K and P become later refuses no state."""

    def made(p: Any, k: Any) -> PKBatchSampler:
        labels = np.repeat(np.arange(8), 5)
        return PKBatchSampler(labels, p=p, k=k, seed=0, batches_per_epoch=5, small=small)

    plain, later = made(4, 2), made({0: 4, 9: 2}, {0: 2, 7: 3, 12: 4})
    for one, other in ((plain, later), (later, plain)):
        assert other.position_of(json.loads(json.dumps(one.state_at(1, 2)))) == (1, 2)
        for place, named in (((1, 3), "k from step 7"), ((2, 0), "p from step 9")):
            with pytest.raises(StateMismatchError, match=f"{named}: the state has"):
                other.position_of(one.state_at(*place))
    assert np.array_equal(later.batches(0, 0, 5), plain.batches(0, 0, 5))
    assert np.array_equal(later.batches(1, 0, 2), plain.batches(1, 0, 2))


def test_state_of_many_changes_is_small_and_covers_past_changes() -> None:
    """Changes so far are a hash, which a longer schedule has too, and another one has not."""

    def made(ks: dict[int, int]) -> PKBatchSampler:
        return PKBatchSampler(LABELS, p=4, k=ks, seed=1, batches_per_epoch=30)

    ks = {step: step % 2 + 1 for step in range(300)}
    state = json.loads(json.dumps(made({**ks, 400: 1}).state_at(11, 0)))
    assert len(json.dumps(state)) < 4096
    assert made({**ks, 330: 1, 500: 2}).position_of(state) == (11, 0)
    with pytest.raises(StateMismatchError, match="changes so far: the state has '299 changes"):
        made({**ks, 7: 1}).position_of(state)


def test_repeated_value_in_a_schedule_is_no_change() -> None:
    """A schedule that repeats a value is the schedule without that entry."""
    one = PKBatchSampler(LABELS, p=4, k={0: 2, 5: 2, 9: 1}, seed=1, batches_per_epoch=20)
    two = PKBatchSampler(LABELS, p=4, k={0: 2, 9: 1}, seed=1, batches_per_epoch=20)
    assert one.fingerprint == two.fingerprint
    assert np.array_equal(one.batch(0, 15), two.batch(0, 15))


def test_random_k_draws_every_size_in_whole_classes() -> None:
    """K is drawn for each batch, keyed; a class's records stay distinct while it has K."""
    sampler = PKBatchSampler(LABELS, p=3, k=(2, 5), seed=1, batches_per_epoch=400, min_class_size=5)
    batches = sampler.batches(0, 0, 400)
    found = Counter(len(b) // 3 for b in batches)
    assert sorted(found) == [2, 3, 4, 5]
    assert min(found.values()) > 60
    for batch in batches:
        blocks = LABELS[batch].reshape(3, -1)
        assert (blocks == blocks[:, :1]).all()
        assert len(np.unique(batch)) == len(batch)


@pytest.mark.parametrize(
    "labels",
    [
        -3 * LABELS + 7,
        (LABELS - 5) * 2**60,
        LABELS.astype(np.uint8),
        LABELS.tolist(),
        [np.array(label) for label in LABELS],
        FIRST_NAMES[LABELS],
        FIRST_NAMES[LABELS].tolist(),
        FIRST_NAMES[LABELS].astype(object),
    ],
)
def test_labels_of_any_type_and_numbering_give_same_batches(labels: ArrayLike) -> None:
    """Law 1: int or str, dense or sparse, in any order: classes are who shares a label."""
    expected = PKBatchSampler(LABELS, p=4, k=2, seed=5).batches(0, 0, 14)
    found = PKBatchSampler(labels, p=4, k=2, seed=5).batches(0, 0, 14)
    assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"k": (2, 3), "batches_per_epoch": 9},
        {"coverage": "once", "small": "drop"},
        {"order_within": "stored"},
    ],
)
def test_records_option_equals_sampler_over_those_records(options: dict[str, Any]) -> None:
    labels = np.random.default_rng(0).integers(0, 12, 300)
    chosen = np.random.default_rng(1).permutation(300)[:120]
    given: dict[str, Any] = {"p": 4, "k": 2, "seed": 7, **options}
    some = PKBatchSampler(labels, records=chosen, **given)
    of_the_chosen = PKBatchSampler(labels[np.sort(chosen)], **given)
    assert some.num_records == 300
    assert len(some) == len(of_the_chosen)
    for epoch in range(2):
        for step in range(len(of_the_chosen)):
            ids = np.sort(chosen)[of_the_chosen.batch(epoch, step)]
            np.testing.assert_array_equal(some.batch(epoch, step), ids)
    same = PKBatchSampler(labels, records=np.sort(chosen), **given)
    assert same.fingerprint == some.fingerprint
    assert PKBatchSampler(labels, **given).fingerprint != some.fingerprint
    assert PKBatchSampler(labels, records=chosen[1:], **given).fingerprint != some.fingerprint


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([0, 300], "records must be below 300, their number, got 300"),
        ([0, 5, 0], "records must differ from each other, got 0 more than once"),
        ([-1], "records must be at least 0, got -1 at 0"),
        ([], "p must be at most the number of classes in the data, 0 of those kept"),
    ],
)
def test_records_option_is_checked(records: list[int], message: str) -> None:
    labels = np.arange(300) % 12
    with pytest.raises(ValueError, match=message):
        PKBatchSampler(labels, p=4, k=2, seed=7, records=np.array(records, np.int64))


def test_mask_gives_the_records_where_it_is_true() -> None:
    """As for labels of -1, which are no class: of P×K and of an evaluation."""
    labels = np.array([0, 0, -1, 1, 1, -1, -1])
    mask, ids = labels >= 0, [0, 1, 3, 4]
    options: dict[str, Any] = {"p": 2, "k": 2, "seed": 0}
    by_mask, by_ids = (PKBatchSampler(labels, records=r, **options) for r in (mask, ids))
    assert by_mask.state_dict() == by_ids.state_dict()
    assert [by_mask.batch(0, 0).tolist()] == [by_ids.batch(0, 0).tolist()]
    exact = ExactOnceBatchSampler(7, batch_size=4, records=mask)
    assert exact.batch(0, 0).tolist() == ids
    for wrong in (mask[:6], mask[:, None]):
        with pytest.raises(ValueError, match=r"records as a mask must be bool\[7\], got \("):
            PKBatchSampler(labels, records=wrong, **options)
    with pytest.raises(ValueError, match="class"):
        PKBatchSampler(labels, records=np.zeros(7, bool), **options)


def test_ranks_get_whole_classes() -> None:
    """A rank's slice has P / world_size classes of K."""
    sampler = PKBatchSampler(NAMES, p=4, k=2, seed=5)
    for world_size in (1, 2, 4):
        for rank in range(world_size):
            for batch in sampler.shard(rank, world_size).batches(0, 0, 14):
                counts = Counter(NAMES[batch].tolist())
                assert list(counts.values()) == [2] * (4 // world_size)


ALTERNATING = dict(enumerate([1, 2] * 40))  # its text is compared as a whole


@pytest.mark.parametrize(
    ("saved", "later", "counts"),
    [
        ({"k": 2, "min_class_size": 6}, {"k": {0: 2, 7: 6}, "min_class_size": 6}, None),
        ({"k": 2, "min_class_size": 6}, {"k": {0: 2, 7: 6}}, None),
        ({"k": 4}, {"k": {0: 4, 7: 5}}, None),  # no class has 4 records
        ({"k": {0: 4, 7: 5}}, {"k": 4}, None),
        ({"k": ALTERNATING}, {"k": ALTERNATING, "min_class_size": 2}, None),
        ({"k": 4}, {"k": {0: 4, 7: 6}}, (8, 7)),
        ({"k": {0: 2, 7: 6}}, {"k": 2}, (7, 10)),
        ({"k": 2, "min_class_size": 3}, {"k": 2}, (9, 10)),
        ({"k": (2, 2)}, {"k": (2, 3), "min_class_size": 5}, (10, 8)),
    ],
)
def test_state_with_small_drop_covers_the_kept_classes(
    saved: dict[str, Any], later: dict[str, Any], counts: tuple[int, int] | None
) -> None:
    """Equal sets of classes give equal batches, whatever made them; other sets are named."""
    fixed: dict[str, Any] = {"p": 4, "seed": 5, "small": "drop", "batches_per_epoch": 5}
    before, after = (PKBatchSampler(LABELS, **fixed, **options) for options in (saved, later))
    state = json.loads(json.dumps(before.state_at(1, 2)))
    if counts is None:
        assert after.position_of(state) == (1, 2)
        for epoch, stop in ((0, 5), (1, 2)):
            pairs = zip(before.batches(epoch, 0, stop), after.batches(epoch, 0, stop), strict=True)
            assert all(np.array_equal(ids, others) for ids, others in pairs)
        return
    with pytest.raises(StateMismatchError) as caught:
        after.position_of(state)
    assert (
        "classes that small='drop' keeps (min_class_size fixes them for any k): the state has "
        f"{counts[0]}, this sampler has {counts[1]}"
    ) in str(caught.value)


@pytest.mark.parametrize(("small", "classes"), [("repeat", 10), ("drop", 7)])
def test_small_classes_are_repeated_or_left_out(small: str, classes: int) -> None:
    """Classes of 2, 3 and 5 records with K = 6; repeats begin after all its records came."""
    sampler = PKBatchSampler(LABELS, p=4, k=6, seed=5, small=small, batches_per_epoch=50)
    assert sampler.num_classes == classes
    drawn = np.concatenate(sampler.batches(0, 0, 50))
    assert len(np.unique(LABELS[drawn])) == classes
    for block in drawn.reshape(-1, 6):
        counts = Counter(block.tolist())
        assert len(counts) == min(6, np.count_nonzero(LABELS[block[0]] == LABELS))
        assert max(counts.values()) - min(counts.values()) <= 1


def test_super_classes_fill_whole_batches_in_turn() -> None:
    """One super-class a batch, in proportion to classes in every window, fair within each."""
    sampler = PKBatchSampler(LABELS, p=3, k=2, seed=5, super_labels=SUPER, batches_per_epoch=50)
    parents = []
    classes = Counter(dict.fromkeys(range(10), 0))
    for epoch in range(4):
        for batch in sampler.batches(epoch, 0, 50):
            assert len(np.unique(SUPER[batch])) == 1
            assert len(np.unique(LABELS[batch])) == 3
            parents.append(SUPER[batch[0]])
            classes.update(np.unique(LABELS[batch]).tolist())
            for parent in ("odd", "even"):
                counts = [classes[label] for label in np.unique(LABELS[parent == SUPER])]
                assert max(counts) - min(counts) <= 1
    windows = [Counter(parents[i : i + 5]) for i in range(196)]
    assert all(window == {"even": 3, "odd": 2} for window in windows)


def test_argument_that_is_no_labels_is_refused() -> None:
    with pytest.raises(TypeError, match=r"one for each record, such as .*, got dict"):
        PKBatchSampler({"labels": [1, 2]}, p=1, k=1, seed=0)  # type: ignore[arg-type]


def test_labels_may_be_any_strings_or_integers() -> None:
    """As lists and as arrays, and also if a name is no UTF-8."""
    plain = PKBatchSampler(NAMES.tolist(), p=4, k=2, seed=0)
    for labels in (
        NAMES,
        NAMES.astype(object),
        np.ma.masked_array(NAMES),
        *([NAMES.astype(np.dtypes.StringDType())] if hasattr(np.dtypes, "StringDType") else []),
    ):
        assert PKBatchSampler(labels, p=4, k=2, seed=0).fingerprint == plain.fingerprint
    strange = PKBatchSampler(np.char.add(NAMES, "\udcff"), p=4, k=2, seed=0)
    assert np.array_equal(strange.batch(0, 0), plain.batch(0, 0))
    counted = PKBatchSampler(LABELS.astype(object), p=4, k=2, seed=0)
    assert np.array_equal(counted.batch(0, 0), plain.batch(0, 0))


def test_fingerprints_differ_for_labels_with_equal_concatenation() -> None:
    """No separator hides where one name ends and the next begins."""
    prints = {
        PKBatchSampler(names, p=1, k=1, seed=0).fingerprint["labels"]
        for names in (["x", "x\0x", "x"], ["x\0x", "x", "x"], ["xx", "x", "x"], ["x", "xx", "x"])
    }
    assert len(prints) == 4


@pytest.mark.parametrize("classes", [1, 5, 6, 10])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5])
def test_epochs_of_all_classes_contain_every_class(classes: int, p: int) -> None:
    """In the first epoch, in every epoch if P divides the classes, else in two in a row."""
    if p > classes:
        return
    labels = np.repeat(np.arange(classes), 2)
    steps = -(-classes // p)
    sampler = PKBatchSampler(labels, p=p, k=2, seed=0, batches_per_epoch=steps)
    drawn = [set(labels[np.concatenate(sampler.batches(e, 0, steps))]) for e in range(30)]
    assert len(drawn[0]) == classes
    if classes % p == 0:
        assert {len(epoch) for epoch in drawn} == {classes}
    assert {len(first | second) for first, second in pairwise(drawn)} == {classes}


def test_default_epochs_have_as_many_batches_as_records_fill() -> None:
    """N // (P * K) over the classes that are kept, and at least 1."""
    assert len(PKBatchSampler(LABELS, p=4, k=2, seed=0)) == 116 // 8
    assert len(PKBatchSampler(LABELS, p=4, k=6, seed=0, small="drop")) == 106 // 24
    assert len(PKBatchSampler(LABELS, p=10, k=40, seed=0, small="repeat")) == 1


def test_ten_thousand_classes_are_only_numpy_arrays() -> None:
    """A sampler has no Python object for each record or class: its pickle is its arrays."""
    labels = np.random.default_rng(0).integers(0, 10_000, 200_000)
    sampler = PKBatchSampler(labels, p=8, k=4, seed=0, small="repeat")
    sampler.batches(0, 0, 50)
    assert len(pickle.dumps(sampler)) < 4 * 200_000 + 6 * 8 * 10_000 + 20_000


@given(sizes=CLASS_SIZES, data=st.data(), mode=st.sampled_from(["once", "all"]))
def test_coverage_once_and_all_contain_the_promised_records(
    sizes: list[int], data: st.DataObject, mode: str
) -> None:
    """Once: no record twice, as many batches as can be. All: every record, in the fewest."""
    k = data.draw(st.integers(1, min(4, max(sizes))))
    kept = [size for size in sizes if size >= k]
    p = data.draw(st.integers(1, len(kept)))
    labels = _labels(sizes)
    sampler = PKBatchSampler(labels, p=p, k=k, seed=3, coverage=mode, small="drop")
    for epoch in range(4):
        batches = sampler.batches(epoch, 0, len(sampler))
        for batch in batches:
            blocks = labels[batch].reshape(p, k)
            assert (blocks == blocks[:, :1]).all()
            assert len(np.unique(blocks)) == p
            assert len(np.unique(batch)) == p * k
        drawn = np.concatenate(batches)
        if mode == "once":
            assert len(np.unique(drawn)) == len(drawn)
            assert len(batches) == slow.most_batches(tuple(size // k for size in kept), p)
        else:
            assert len(np.unique(drawn)) == sum(kept)
            needed = [-(-size // k) for size in kept]
            assert len(batches) == max(-(-sum(needed) // p), *needed)


def test_fullest_first_rule_makes_the_most_batches() -> None:
    """The brute force behind the brute force: no choice of classes makes more batches."""

    @cache
    def best(chunks: tuple[int, ...], p: int) -> int:
        left = [i for i, count in enumerate(chunks) if count]
        options = combinations(left, p)
        return max(
            (
                1 + best(tuple(sorted(c - (i in chosen) for i, c in enumerate(chunks))), p)
                for chosen in options
            ),
            default=0,
        )

    rng = np.random.default_rng(0)
    for _ in range(60):
        chunks = tuple(sorted(rng.integers(0, 5, rng.integers(1, 6)).tolist()))
        for p in range(1, len(chunks) + 1):
            assert slow.most_batches(chunks, p) == best(chunks, p)


def test_records_left_out_by_once_rotate_over_epochs() -> None:
    """Records left out as remainders are others in every epoch: all come in turn."""
    labels = np.repeat(np.arange(6), 11)
    sampler = PKBatchSampler(labels, p=3, k=4, seed=0, coverage="once")
    assert len(sampler) == 4
    out = [np.setdiff1d(np.arange(66), np.concatenate(sampler.batches(e, 0, 4))) for e in range(11)]
    times = np.bincount(np.concatenate(out), minlength=66)
    assert times.tolist() == [3] * 66


def test_chunks_left_out_rotate_over_classes() -> None:
    """Two chunks too many each epoch: over seven epochs of seven classes each loses two."""
    labels = np.repeat(np.arange(7), 10)
    sampler = PKBatchSampler(labels, p=3, k=5, seed=0, coverage="once")
    drawn = [
        np.bincount(labels[np.concatenate(sampler.batches(e, 0, 4))], minlength=7) // 5
        for e in range(14)
    ]
    lost = (2 - np.array(drawn)).sum(axis=0)
    assert np.array(drawn).sum(axis=1).tolist() == [12] * 14
    assert lost.tolist() == [4] * 7


def test_stored_order_cycles_through_each_class() -> None:
    """The classes are those of the random walk; the n-th draw of a class goes on where it was."""
    options = {"p": 4, "k": 3, "small": "repeat", "batches_per_epoch": 9, "seed": 1}
    stored = PKBatchSampler(LABELS, order_within="stored", **options)
    usual = PKBatchSampler(LABELS, **options)
    num_drawn: dict[int, int] = {}
    for epoch in range(3):
        for step in range(9):
            classes = LABELS[usual.batch(epoch, step)]
            for label, record in zip(classes, stored.batch(epoch, step), strict=True):
                own = np.flatnonzero(label == LABELS)
                assert record == own[num_drawn.get(label, 0) % len(own)]
                num_drawn[label] = num_drawn.get(label, 0) + 1


def test_stored_order_is_refused_with_coverage() -> None:
    with pytest.raises(ValueError, match="order_within must be 'random' with coverage='once'"):
        PKBatchSampler(LABELS, p=4, k=2, seed=0, coverage="once", order_within="stored")


@pytest.mark.parametrize("coverage", ["once", "all"])
def test_each_rank_of_a_covering_epoch_has_most_classes(coverage: str) -> None:
    """300 classes in proportion over 8 ranks: no rank gets only a few classes, in any epoch."""
    labels = np.repeat(np.arange(300), np.random.default_rng(0).integers(4, 200, 300))
    sampler = PKBatchSampler(labels, p=8, k=4, seed=0, coverage=coverage)
    for epoch in (0, 1):
        for rank in range(8):
            batches = sampler.shard(rank, 8).batches(epoch, 0, len(sampler))
            num_classes = len(np.unique(labels[np.concatenate(batches)]))
            assert num_classes >= 0.8 * 300
