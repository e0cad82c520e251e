"""Diagnostics: they see the known bad case, and nothing bad in a good stream."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import sampler_definitions as slow
from support.cases import mark_long

from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    ReuseSampler,
    SequentialSampler,
    ShardShuffleSampler,
    diagnose,
    simulate_shuffle_buffer,
)


def test_a_small_buffer_over_sorted_records_is_flagged() -> None:
    """70,000 sorted records, a buffer of 10,000: early batches are low records, low labels."""
    labels = np.arange(70_000) // 700
    ids = simulate_shuffle_buffer(70_000, buffer_size=10_000, seed=0)
    assert ids[:640].max() < 10_640
    assert labels[ids[:640]].max() <= 15
    found = diagnose(ids, batch_size=64, labels=labels)
    text = " / ".join(found.findings)
    assert "records move 29% as far" in text
    assert "correlate by 0.90" in text
    assert "the first tenth has 25 classes, 100 in a uniform shuffle" in text


def test_a_buffer_of_100_has_the_published_numbers() -> None:
    """10,000 sorted records: 99 places early at most, mean 73, 5.4 of 47.5 classes a batch."""
    labels = np.arange(10_000) // 100
    ids = simulate_shuffle_buffer(10_000, buffer_size=100, seed=0)
    found = diagnose(ids, batch_size=64, labels=labels)
    assert found.displacement.value == pytest.approx(73, abs=2)
    assert found.displacement.uniform == pytest.approx(3333, abs=1)
    assert found.distinct["classes"].value == pytest.approx(5.4, abs=0.15)
    assert found.distinct["classes"].uniform == pytest.approx(47.55, abs=0.01)


@settings(max_examples=50)
@given(n=st.integers(0, 200), buffer=st.integers(1, 250), seed=st.integers(0, 2**63))
def test_simulated_buffer_releases_no_record_early(n: int, buffer: int, seed: int) -> None:
    """A permutation in which no record leaves more than buffer - 1 places early."""
    ids = simulate_shuffle_buffer(n, buffer_size=buffer, seed=seed)
    assert np.array_equal(np.sort(ids), np.arange(n))
    assert (ids - np.arange(n)).max(initial=0) <= buffer - 1


def test_uniform_shuffles_have_no_flags_and_ratios_near_one() -> None:
    """The random order, and the shard-aware shuffle of records that are not sorted by class."""
    labels = np.random.default_rng(0).integers(0, 50, 20_000)
    for order in (
        RandomSampler(20_000, seed=0),
        ShardShuffleSampler([2000] * 10, seed=0, block=50, window=32),
    ):
        found = diagnose(
            BatchSampler(order, batch_size=50), labels=labels, shard_lengths=[2000] * 10
        )
        assert found.ok
        assert found.displacement.ratio == pytest.approx(1, abs=0.05)
        assert found.distinct["classes"].ratio == pytest.approx(1, abs=0.05)
        assert abs(found.rank_correlation) < 0.15
        assert found.records == 20_000


@pytest.mark.parametrize(
    ("n", "size", "block"),
    mark_long([(60, 30, 1), (60, 30, 2), (40, 1, 7), (90, 9, 4)], but_every=2),
)
def test_expected_values_equal_the_mean_of_uniform_shuffles(n: int, size: int, block: int) -> None:
    """Mean distinct blocks, in a batch and in the first tenth, and mean displacement."""
    shuffles = [
        diagnose(BatchSampler(RandomSampler(n, seed=seed), batch_size=size), block=block)
        for seed in range(300)
    ]
    for measures in (
        [found.distinct["blocks"] for found in shuffles],
        [found.head_distinct["blocks"] for found in shuffles],
        [found.displacement for found in shuffles],
    ):
        values = [measure.value for measure in measures]
        error = measures[0].deviation / 300**0.5
        assert abs(np.mean(values) - measures[0].uniform) <= 4 * error + 1e-9
        assert np.std(values) <= 1.2 * measures[0].deviation + 1e-9


@pytest.mark.parametrize("n", mark_long([1, 2, 3, 5, 10, 20, 50, 100, 200], but_every=3, first=2))
def test_a_uniform_shuffle_of_few_records_has_no_flags(n: int) -> None:
    """Chance alone makes no flag: fewer than 1 in 100 shuffles have a flag, however few records."""
    labels = np.minimum(np.arange(n), 4) + np.arange(n) * 5 // n
    flagged = [
        seed
        for seed in range(200)
        if diagnose(
            BatchSampler(RandomSampler(n, seed=seed), batch_size=max(1, n // 4)),
            labels=labels,
            block=max(1, n // 5),
        ).findings
    ]
    assert len(flagged) < 2


def test_shard_shuffle_mixes_better_than_buffer_of_equal_size() -> None:
    """Sorted records: 32 blocks of 50 against a buffer of 1,600, and the table that says so."""
    labels = np.arange(20_000) // 200
    order = ShardShuffleSampler([2000] * 10, seed=0, block=50, window=32)
    lanes = diagnose(BatchSampler(order, batch_size=64), labels=labels)
    ids = simulate_shuffle_buffer(20_000, buffer_size=1600, seed=0)
    buffered = diagnose(ids, batch_size=64, labels=labels)
    assert lanes.displacement.ratio > 5 * buffered.displacement.ratio
    assert lanes.distinct["classes"].value > 1.3 * buffered.distinct["classes"].value


@settings(max_examples=80)
@given(groups=st.lists(st.integers(0, 6), min_size=1, max_size=40), data=st.data())
def test_worst_window_is_found_at_any_position(groups: list[int], data: st.DataObject) -> None:
    """Of as many samples as a batch has, anywhere: the fewest classes, and the first such place."""
    size = data.draw(st.integers(1, len(groups)))
    found = diagnose(np.arange(len(groups)), batch_size=size, labels=groups)
    in_a_row = slow.distinct_in_a_row(groups, size)
    least, position = found.worst["classes"]
    assert (least.value, position) == (in_a_row.min(), in_a_row.argmin())


def test_tail_of_one_class_is_flagged() -> None:
    """A shuffle that ends in a single class: batches are good on average, and the end is named."""
    labels = np.arange(20_000) // 200
    order = RandomSampler(19_900, seed=0).ids(0, np.arange(19_900))
    found = diagnose(np.append(order, np.arange(19_900, 20_000)), batch_size=64, labels=labels)
    assert found.worst["classes"][0].value == 1
    assert found.worst["classes"][1] >= 19_890
    where = f"from position {found.worst['classes'][1]:,} on"
    assert found.findings == [f"64 samples {where} hold 1 classes, 47.5 in a uniform shuffle"]
    assert f"in a row 1 {where}" in str(found)


def test_stored_order_padding_reuse_and_repeats_are_counted() -> None:
    """Exact numbers for streams that are known."""
    stored = diagnose(BatchSampler(SequentialSampler(100), batch_size=10), block=10)
    assert stored.rank_correlation == pytest.approx(1)
    assert stored.displacement.value == 0
    assert stored.distinct["blocks"].value == 1
    padded = diagnose(ExactOnceBatchSampler(11, batch_size=4, last_batch="pad"))
    assert padded.samples == 11
    assert diagnose([4, 4], batch_size=1).rank_correlation == 0
    reused = diagnose(BatchSampler(ReuseSampler(40, reuse=3, live=8, seed=0), batch_size=4))
    assert reused.samples == 120
    order = RandomSampler(100, seed=0)
    batches = BatchSampler(order, batch_size=9)
    assert diagnose(order, batch_size=9, epoch=2) == diagnose(batches, epoch=2)


def test_batches_of_few_classes_are_as_their_options_say() -> None:
    """A finding is a line of the text."""
    labels = np.arange(60) // 6
    sampler = PKBatchSampler(labels, p=4, k=2, seed=0, batches_per_epoch=3)
    found = diagnose(sampler, labels=labels)
    assert found.distinct["classes"].value == 4
    assert found.ok
    assert diagnose(RandomSampler(60, seed=0), batch_size=60).ok
    stored = diagnose(range(100), batch_size=10)
    assert str(stored).splitlines()[-1] == f"! {stored.findings[-1]}"
