"""The laws of schedules: what changes at a training step leaves all before it as it was."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest

from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    IdSequence,
    MixtureSampler,
    PKBatchSampler,
    RandomSampler,
    Sampler,
    ShardShuffleSampler,
    StateMismatchError,
    SubsetSampler,
    ViewSampler,
    WeightedSampler,
)

STEPS = 60  # that are drawn, over several epochs
LENGTHS = [11, 4, 7]
LABELS = np.arange(99) % 9


class Case(NamedTuple):
    """A batch sampler of a schedule, and its changes by training step; the first is at step 0."""

    make: Callable[[Any], BatchStream]
    changes: dict[int, Any]


def mixture(weights: Any, lengths: list[int] = LENGTHS, num_samples: int = 45) -> Sampler:
    """Return a mixture of random orders of these lengths."""
    orders = [RandomSampler(n, seed=seed) for seed, n in enumerate(lengths)]
    return MixtureSampler(orders, weights=weights, num_samples=num_samples, seed=4)


def cut(make: Callable[[Any], Sampler], **options: Any) -> Callable[[Any], BatchStream]:
    """Return a factory of batches of a sampler."""
    return lambda changes: BatchSampler(make(changes), **{"batch_size": 4, **options})


def weighted(weights: Any, **options: Any) -> Sampler:
    """Return draws of 21 records a pass, by weight."""
    return WeightedSampler(weights, num_samples=21, seed=2, **options)


def once(weights: Any) -> Sampler:
    """Return draws without replacement."""
    return weighted(weights, replacement=False)


BY_RECORD = {
    0: np.arange(30) % 7,
    6: np.arange(30) % 5,
    12: np.ones(30),
    42: np.arange(30) % 4 / 3,
}


def shuffle(exclude: Any, n: int = 45, **options: Any) -> Sampler:
    """Return a shuffle of records, by blocks with a `window`."""
    if options:
        return ShardShuffleSampler([n // 2, n - n // 2], seed=3, exclude=exclude, **options)
    return RandomSampler(n, seed=3, exclude=exclude)


def shuffle_blocks(exclude: Any) -> Sampler:
    """Return a shuffle by blocks, in two sections."""
    return shuffle(exclude, block=5, window=4, sections=2)


def views(exclude: Any) -> Sampler:
    """Return a view of each record of a shuffle."""
    return ViewSampler(shuffle(exclude), [3] * 45, per_epoch="one", seed=0)


def exclude_from_classes(exclude: Any, **options: Any) -> BatchStream:
    """Return P x K batches of nine classes of eleven records, some of them excluded."""
    options = {"p": 4, "k": 2, "seed": 0, "batches_per_epoch": 8, **options}
    return PKBatchSampler(LABELS, exclude=exclude, **options)


EXCLUDED = {0: [40], 5: [1, 2], 17: [30, 2, 44], 43: range(9, 17)}
WEIGHTS = {0: [3, 1, 1], 5: [0, 2, 1], 6: [1, 0, 0], 29: [0.5, 0.25, 0.25], 47: [1, 1, 1]}
CASES: dict[str, Case] = {
    "mixture": Case(cut(mixture), WEIGHTS),
    "mixture-drop": Case(cut(mixture, last_batch="drop"), WEIGHTS),
    "mixture-pad": Case(cut(mixture, last_batch="pad"), WEIGHTS),
    "mixture-short-epochs": Case(cut(mixture, batches_per_epoch=5), WEIGHTS),
    "mixture-large-batches": Case(cut(mixture, batch_size=100, batches_per_epoch=7), WEIGHTS),
    # Of three records, a batch of the second weights has all, so that none can be moved back.
    "mixture-short-sampler": Case(
        cut(partial(mixture, lengths=[11, 3, 7], num_samples=42)),
        {0: [3, 1, 1], 29: [0, 1, 0], 35: [1, 1, 1]},
    ),
    "weighted": Case(cut(weighted), BY_RECORD),
    "weighted-drop": Case(cut(weighted, last_batch="drop"), {**BY_RECORD, 13: np.arange(30)}),
    "weighted-no-replacement": Case(cut(once), BY_RECORD),
    "weighted-no-replacement-short": Case(cut(once, batches_per_epoch=5), BY_RECORD),
    "random": Case(cut(shuffle), EXCLUDED),
    "random-drop": Case(cut(shuffle, last_batch="drop"), EXCLUDED),
    "random-pad": Case(cut(shuffle, last_batch="pad"), EXCLUDED),
    "random-short-epochs": Case(cut(shuffle, batches_per_epoch=5), EXCLUDED),
    "shards": Case(cut(shuffle_blocks), EXCLUDED),
    "shards-drop": Case(cut(shuffle_blocks, last_batch="drop"), EXCLUDED),
    "views": Case(cut(views), EXCLUDED),
    "pk-exclude": Case(exclude_from_classes, EXCLUDED),
    "pk-exclude-k": Case(partial(exclude_from_classes, k={0: 2, 14: 3, 40: 4}), EXCLUDED),
    "pk-exclude-super": Case(
        partial(exclude_from_classes, super_labels=LABELS % 2, order_within="stored"), EXCLUDED
    ),
    "pk-exclude-repeat": Case(
        partial(exclude_from_classes, k=12, small="repeat", min_class_size=2), EXCLUDED
    ),
    "p": Case(
        lambda p: PKBatchSampler(LABELS, p=p, k=2, seed=0, batches_per_epoch=8),
        {0: 4, 9: 2, 33: 3},
    ),
    "k": Case(
        lambda k: PKBatchSampler(LABELS, p=4, k=k, seed=0, batches_per_epoch=8),
        {0: 2, 9: 1, 33: 3},
    ),
}


def drawn(stream: BatchStream, stop: int = STEPS) -> list[list[int]]:
    """Return the batches of the first training steps."""
    return [stream.batch(*divmod(step, len(stream))).tolist() for step in range(stop)]


@pytest.mark.parametrize("name", CASES)
def test_change_keeps_all_earlier_steps(name: str) -> None:
    """The ids of a run that is changed are those of the final schedule, from step 0 on."""
    make, changes = CASES[name]
    final = make(changes)
    batches = drawn(final)
    *steps, last = sorted(changes)
    for step, next_step in zip(steps, [*steps[1:], last], strict=True):
        part = make({change: value for change, value in changes.items() if change <= step})
        assert drawn(part, next_step) == batches[:next_step]
        assert drawn(part)[next_step:] != batches[next_step:]
        for saved, loaded in ((part, final), (final, part)):
            for at in (0, step, next_step):
                state = json.loads(json.dumps(saved.state_at(*divmod(at, len(saved)))))
                assert loaded.position_of(state) == divmod(at, len(saved))
            state = saved.state_at(*divmod(next_step + 1, len(saved)))
            with pytest.raises(StateMismatchError, match=f"from step {next_step}: the state has"):
                loaded.position_of(state)


@pytest.mark.parametrize("name", CASES)
def test_batches_across_changes_equal_single_steps_and_ranks(name: str) -> None:
    """Steps across changes at once, one by one, over ranks and resumed at every fifth."""
    make, changes = CASES[name]
    stream = make(changes)
    batches, size = drawn(stream), len(stream)
    for epoch in range(STEPS // size):
        expected = batches[epoch * size : (epoch + 1) * size]
        assert [ids.tolist() for ids in stream.batches(epoch, 0, size)] == expected
        for step in range(0, size, 5):
            resumed = make(changes)
            resumed.load_state_dict(stream.state_at(epoch, step))
            assert [ids.tolist() for _, _, ids in resumed.passes()] == expected[step:]
    if name != "p":
        ranks = [stream.shard(rank, 2) for rank in range(2)]
        parts = zip(*(drawn(rank) for rank in ranks), strict=True)
        assert [[*first, *second] for first, second in parts] == batches


def samplers() -> dict[str, Sampler]:
    """Return a sampler for each kind of schedule."""
    return {
        "mixture": mixture(WEIGHTS),
        "weighted": weighted(BY_RECORD),
        "random": shuffle(EXCLUDED),
        "shards": shuffle_blocks(EXCLUDED),
        "views": views(EXCLUDED),
        "subset": SubsetSampler(range(22), of=22, order=mixture(WEIGHTS)),
    }


@pytest.mark.parametrize("name", samplers())
def test_sampler_with_schedule_is_refused_without_steps(name: str) -> None:
    """A position says nothing of the training step: no id is drawn without one."""
    sampler = samplers()[name]
    for call in (
        iter,
        lambda sampler: iter(sampler.shard(0, 1)),
        lambda sampler: IdSequence(sampler, epochs=2),
        lambda sampler: sampler.ids(0, [0]),
        lambda sampler: copy.copy(sampler).ids(0, [0]),
    ):
        with pytest.raises(TypeError, match=r"changes at training steps, .*: take BatchSampler"):
            call(sampler)
    with pytest.raises(ValueError, match="each of orders must not change at training steps"):
        MixtureSampler([sampler], weights=[1], num_samples=9, seed=0)


def counts(batches: list[list[int]], lengths: list[int]) -> np.ndarray:
    """Return how many ids of each sampler of a mixture come in some batches."""
    ids = np.array([id_ for batch in batches for id_ in batch], np.int64)
    bounds = np.cumsum(lengths)
    return np.bincount(np.searchsorted(bounds, ids, side="right"), minlength=len(lengths))


def test_schedule_may_come_from_json() -> None:
    """Its steps are strings there, and a range of K is a list."""
    for k in ({0: 2, 5: 1}, (1, 3)):
        read, given = (
            PKBatchSampler(LABELS, p=2, k=schedule, seed=0, batches_per_epoch=9)
            for schedule in (json.loads(json.dumps(k)), k)
        )
        assert read.fingerprint == given.fingerprint


def test_mixture_is_exact_between_changes_and_its_samplers_continue() -> None:
    """Counts are the sums of exact counts, and each sampler gives its records epoch after epoch."""
    weights = {0: [3, 1, 0], 7: [1, 1, 2], 20: [0, 1, 0], 31: [5, 2, 1]}
    stream = BatchSampler(mixture(weights, num_samples=4000), batch_size=8)
    batches = drawn(stream)
    for (step, parts), next_step in zip(weights.items(), [7, 20, 31, STEPS], strict=True):
        periods = (next_step - step) * 8 // sum(parts)
        whole = [id_ for batch in batches[step:next_step] for id_ in batch][: periods * sum(parts)]
        assert counts([whole], LENGTHS).tolist() == [periods * part for part in parts]
    bounds = [0, *np.cumsum(LENGTHS).tolist()]
    for low, high in pairwise(bounds):
        own = [id_ for batch in batches for id_ in batch if low <= id_ < high]
        for first in range(0, len(own) - (high - low), high - low):
            assert sorted(own[first : first + high - low]) == list(range(low, high))


def test_sampler_joining_mixture_keeps_ids_and_states() -> None:
    """Whoever did not know of it drew the same, and saved states that load."""
    before = BatchSampler(mixture({0: [3, 1], 5: [1, 1]}, LENGTHS[:2]), batch_size=4)
    joined = {0: [3, 1, 0], 5: [1, 1, 0], 20: [1, 1, 2]}
    after = BatchSampler(mixture(joined), batch_size=4)
    assert drawn(before, 20) == drawn(after, 20)
    for step in (0, 5, 20):
        position = divmod(step, len(before))
        assert after.position_of(before.state_at(*position)) == position
        assert before.position_of(after.state_at(*position)) == position
    with pytest.raises(StateMismatchError, match=r"orders from step 20\.0\.seed: the state has"):
        after.position_of(before.state_at(1, 10))


def test_mixture_of_many_changes_stays_small() -> None:
    """A state does not grow with the changes; a table is made for the weights in use alone."""
    changes = {step: [step % 7 + 1, 1000, 1] for step in range(0, 5000, 5)}
    stream = BatchSampler(mixture(changes, num_samples=4000), batch_size=4)
    assert len(json.dumps(stream.state_at(4, 500))) < 4096
    later = BatchSampler(mixture({**changes, 9000: [1, 1, 1]}, num_samples=4000), batch_size=4)
    assert later.position_of(stream.state_at(4, 500)) == (4, 500)
    tables = stream._inner_sampler._interleave._cache._results
    assert len(tables) <= 4


def test_records_are_drawn_by_weights_of_their_step() -> None:
    """Frequencies between the changes, and weight 0 from a step on is never again."""
    weights = {0: [1, 1, 0, 2], 100: [1, 0, 3, 0]}
    stream = BatchSampler(WeightedSampler(weights, seed=0, num_samples=4000), batch_size=40)
    counts = {range(100): [1000, 1000, 0, 2000], range(100, 200): [1000, 0, 3000, 0]}
    for steps, expected in counts.items():
        ids = np.concatenate([stream.batch(*divmod(step, 100)) for step in steps])
        found = np.bincount(ids, minlength=4)
        assert (found[np.array(expected) == 0] == 0).all()
        assert (abs(found - expected) < 100).all()


@pytest.mark.parametrize("last_batch", ["smaller", "drop", "pad"])
@pytest.mark.parametrize("options", [{}, {"block": 8, "window": 16}])
def test_excluded_records_are_replaced_and_nothing_else_changes(
    options: dict[str, Any], last_batch: Any
) -> None:
    """A tenth is left out, at three steps: what comes instead differs, and is of other batches."""
    n, epochs = 500, 4
    exclude = {7: range(20, 40), 30: [3, 30, 4], 40: range(100, 128)}
    changed, plain = (
        BatchSampler(shuffle(changes, n, **options), batch_size=24, last_batch=last_batch)
        for changes in (exclude, None)
    )
    assert changed.traits.repeats
    for epoch in range(epochs):
        replacements: list[int] = []
        for step in range(len(plain)):
            global_step = epoch * len(plain) + step
            ids, old_ids = changed.batch(epoch, step), plain.batch(epoch, step)
            out = [id_ for first, ids_ in exclude.items() if first <= global_step for id_ in ids_]
            assert np.array_equal(ids != old_ids, np.isin(old_ids, out))
            assert not np.isin(ids, out).any()
            real = ids[ids >= 0]
            assert len(np.unique(real)) == len(real)
            replacements += ids[ids != old_ids].tolist()
        assert len(set(replacements)) == len(replacements) > 5


def test_replacements_come_from_all_remaining_records() -> None:
    """Each record that is left comes in the place of one excluded record, epoch after epoch."""
    stream = BatchSampler(shuffle({0: [7]}, 20), batch_size=4)
    plain = BatchSampler(shuffle(None, 20), batch_size=4)
    found = {
        int(stream.batch(epoch, step)[plain.batch(epoch, step) == 7][0])
        for epoch in range(300)
        for step in range(5)
        if 7 in plain.batch(epoch, step)
    }
    assert found == set(range(20)) - {7}


def test_steps_of_exclude_may_repeat_ids() -> None:
    """There are more entries than records, and half of the records are left in the end."""
    exclude = {1: [0, 1], 2: [0], 3: [0, 1], 4: [0], 5: [0, 1, 2]}
    sampler = BatchSampler(RandomSampler(6, seed=0, exclude=exclude), batch_size=2)
    ids = np.concatenate(sampler.batches(2, 0, 3))
    assert set(ids.tolist()) <= {3, 4, 5}


def test_evaluation_with_exclude_is_refused() -> None:
    """Every record once is every record."""

    class Evaluation(BatchSampler):
        evaluation = True

    with pytest.raises(ValueError, match="an evaluation must not change at training steps"):
        Evaluation(shuffle(EXCLUDED), batch_size=4)
    with pytest.raises(TypeError, match="takes no exclude="):
        ExactOnceBatchSampler(9, batch_size=4, exclude={0: [1]})  # type: ignore[call-arg]


@pytest.mark.parametrize("options", [{}, {"order_within": "stored"}, {"k": 3}, {"p": 9}])
def test_class_continues_without_excluded_records(options: dict[str, Any]) -> None:
    """They are out from its next traversal on; the others come equally often; no class changes."""
    exclude = {5: [0, 9, 18], 11: [27, 1, 5], 12: range(2, 50, 9), 90: [90]}
    changed, plain = exclude_from_classes(exclude, **options), exclude_from_classes(None, **options)
    batches, plain_batches = (
        [ids.tolist() for epoch in range(30) for ids in stream.batches(epoch, 0, 8)]
        for stream in (changed, plain)
    )
    for ids, old_ids in zip(batches, plain_batches, strict=True):
        assert LABELS[ids].tolist() == LABELS[old_ids].tolist()
        of_others = LABELS[ids] > 5
        assert np.array_equal(np.array(ids)[of_others], np.array(old_ids)[of_others])
        assert len(set(ids)) == len(ids)
    out = {id_: step for step, ids in exclude.items() for id_ in ids}
    for id_, first in out.items():
        after = [step for step, ids in enumerate(batches) if step >= first and id_ in ids]
        assert len(after) <= 1
        before = batches[first : after[0]] if after else []
        assert sum((LABELS[ids] == LABELS[id_]).sum() for ids in before) <= 11
    counts = np.bincount(np.concatenate(batches[100:]), minlength=99)
    for label in range(9):
        others = [counts[id_] for id_ in np.flatnonzero(label == LABELS) if id_ not in out]
        assert max(others) - min(others) <= 2  # of the steps before 100, too


def test_excluding_records_needs_records_in_choose() -> None:
    """A pipeline of each class gives any of its records: it needs to know that some are out."""
    assert exclude_from_classes({3: [1]}).traits.needs_records == "exclude="
    assert exclude_from_classes(None).traits.needs_records is None
