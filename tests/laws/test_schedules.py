"""The laws of schedules: what changes at a training step leaves all before it as it was."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest

from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
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
    replaced,
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


def replace_ids(make: Callable[[], BatchStream]) -> Callable[[Any], BatchStream]:
    """Return a factory of batches with other ids in the place of some."""
    return lambda schedule: replaced(make(), schedule)


def shuffle(n: int = 45, **options: Any) -> BatchStream:
    """Return batches of a shuffle."""
    return BatchSampler(RandomSampler(n, seed=3), **{"batch_size": 4, **options})


def shuffle_blocks(n: int = 45, **options: Any) -> BatchStream:
    """Return batches of a shuffle by blocks, in two sections."""
    order = ShardShuffleSampler([n // 2, n - n // 2], seed=3, block=5, window=4, sections=2)
    return BatchSampler(order, **{"batch_size": 4, **options})


def views() -> BatchStream:
    """Return batches of a view of each record of a shuffle."""
    order = ViewSampler(RandomSampler(45, seed=3), [3] * 45, per_epoch="one", seed=0)
    return BatchSampler(order, batch_size=4)


def classes(**options: Any) -> BatchStream:
    """Return P x K batches of nine classes of eleven records."""
    options = {"p": 4, "k": 2, "seed": 0, "batches_per_epoch": 8, **options}
    return PKBatchSampler(LABELS, **options)


REPLACED = {
    0: {40: 3},
    5: {1: [4, 5], 2: 6},
    17: {30: 7, 44: [8, 41, 42], 2: 39},
    43: {bad: range(17, 25) for bad in range(9, 17)},
}
# Of the same class: record n is of class n % 9.
OF_CLASSES = {
    0: {40: 94},
    5: {1: [55, 64], 2: 56},
    17: {30: 84, 44: [98, 53], 2: 65},
    43: {bad: [bad + 36, bad + 54] for bad in range(9, 17)},
}
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
    "random": Case(replace_ids(shuffle), REPLACED),
    "random-drop": Case(replace_ids(partial(shuffle, last_batch="drop")), REPLACED),
    "random-pad": Case(replace_ids(partial(shuffle, last_batch="pad")), REPLACED),
    "random-short-epochs": Case(replace_ids(partial(shuffle, batches_per_epoch=5)), REPLACED),
    "shards": Case(replace_ids(shuffle_blocks), REPLACED),
    "views": Case(replace_ids(views), {0: {7: 8}, 5: {9: 11, 12: [13, 14]}, 17: {30: [31, 32]}}),
    "pk-replaced": Case(replace_ids(classes), OF_CLASSES),
    "pk-replaced-k": Case(replace_ids(partial(classes, k={0: 2, 14: 3, 40: 4})), OF_CLASSES),
    "pk-replaced-super": Case(
        replace_ids(partial(classes, super_labels=LABELS % 2, order_within="stored")), OF_CLASSES
    ),
    "pk-replaced-all": Case(
        replace_ids(lambda: PKBatchSampler(LABELS, p=4, k=2, seed=0, coverage="all")), OF_CLASSES
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


@pytest.mark.parametrize("make", [shuffle, shuffle_blocks, classes])
def test_bad_ids_are_replaced_and_nothing_else_changes(make: Callable[[], BatchStream]) -> None:
    """By the first good id that is not in the batch, or the first of all; of the same class."""
    schedule = OF_CLASSES if make is classes else REPLACED
    plain, changed = make(), replaced(make(), schedule)
    assert changed.traits.repeats
    assert (len(changed), changed.fixed_size) == (len(plain), plain.fixed_size)
    for step, (old, ids) in enumerate(zip(drawn(plain), drawn(changed), strict=True)):
        goods_of: dict[int, Any] = {}
        for start in (start for start in schedule if start <= step):
            goods_of |= schedule[start]
        expected = list(old)
        for place, id_ in enumerate(old):
            goods = np.atleast_1d(goods_of.get(id_, id_)).tolist()
            left = [good for good in goods if good not in expected]
            expected[place] = (left or goods)[0]
        assert ids == expected
        assert changed.seeds(*divmod(step, 8)).tolist() == plain.seeds(*divmod(step, 8)).tolist()
        assert make is not classes or LABELS[ids].tolist() == LABELS[old].tolist()


def test_replacement_that_is_forgotten_is_refused_and_may_come_from_json() -> None:
    schedule = {5: {1: [55, 64]}, 17: {2: 56}}
    stream, read = (replaced(classes(), s) for s in (schedule, json.loads(json.dumps(schedule))))
    assert stream.fingerprint == read.fingerprint
    for at, forgotten in ((5, True), (6, False), (17, False)):
        state = stream.state_at(*divmod(at, 8))
        read.load_state_dict(state)
        if forgotten:
            classes().load_state_dict(state)
            continue
        with pytest.raises(
            StateMismatchError, match=r"replaced from step 5: the state has \[\[1, 55"
        ):
            classes().load_state_dict(state)
        replaced(classes(), {5: {1: [55, 64]}}).load_state_dict(state)


def test_steps_of_a_sampler_of_ids_are_positions() -> None:
    plain, schedule = RandomSampler(6, seed=0), {9: {3: [1, 2], 0: 4}, 14: {3: 5}}
    changed = replaced(plain, schedule)
    assert changed.traits.repeats
    old = [id_ for _ in range(3) for id_ in plain]
    goods = [{}] * 9 + [{3: 1, 0: 4}] * 5 + [{3: 5, 0: 4}] * 4
    ids = [good.get(id_, id_) for good, id_ in zip(goods, old, strict=True)]
    assert list(IdSequence(changed, epochs=3)) == ids
    assert [id_ for _ in range(3) for id_ in changed] == ids
    ranks = [changed.shard(rank, 2) for rank in range(2)]
    for epoch in range(3):
        of_epoch = ids[6 * epoch : 6 * epoch + 6]
        assert [list(rank) for rank in ranks] == [of_epoch[0::2], of_epoch[1::2]]
        assert changed.ids(epoch, [[4, 5], [0, 1]]).tolist() == [of_epoch[4:], of_epoch[:2]]
    for position in (9, 10):  # before the first change, and after it
        state = plain.state_at(*divmod(position, 6))
        again = replaced(plain, schedule).shard(0, 1)
        if position == 9:
            again.load_state_dict(state)
            assert list(again) == ids[9:12]
            plain.load_state_dict(changed.state_at(1, 3))
            continue
        with pytest.raises(StateMismatchError, match="replaced from step 9: the state has 'nothi"):
            again.load_state_dict(state)
        with pytest.raises(StateMismatchError, match=r"replaced from step 9: the state has \[\[0,"):
            plain.load_state_dict(changed.state_at(1, 4))


@dataclass(frozen=True)
class Stored(Sampler):
    """A sampler of a user's own, whose parameters are computed."""

    num_records: int

    @property
    def parameters(self) -> dict[str, Any]:  # type: ignore[override]
        return {"n": self.num_records}

    def draw(self, epoch: int, positions: Any) -> Any:
        return (positions + epoch) % self.num_records


@pytest.mark.parametrize("make", [Stored, lambda n: BatchSampler(Stored(n), batch_size=1)])
def test_replaced_ids_of_a_frozen_sampler_are_in_its_states(make: Any) -> None:
    plain, changed = make(3), replaced(make(3), {4: {0: 1}})
    assert [np.ravel(list(changed)).tolist() for _ in range(3)] == [[0, 1, 2], [1, 2, 1], [2, 1, 1]]
    changed.load_state_dict(plain.state_at(1, 1))
    with pytest.raises(StateMismatchError, match="replaced from step 4: the state has 'nothing'"):
        changed.load_state_dict(plain.state_at(1, 2))


@pytest.mark.parametrize("field", ["exclude from step 3", "changes so far"])
def test_state_of_older_exclusions_names_replaced(field: str) -> None:
    state = classes().state_at(0, 6)
    state["fingerprint"][field] = "199 values 0f"
    with pytest.raises(StateMismatchError, match=r"had exclude=, with replaced\(sampler, \{step"):
        classes().load_state_dict(state)


def test_other_names_with_exclude_in_them_are_no_older_exclusions() -> None:
    state = classes().state_at(0, 6)
    state["fingerprint"]["excluded_hours"] = 3
    with pytest.raises(StateMismatchError, match="or begin anew without the state"):
        classes().load_state_dict(state)


def test_replacing_draws_no_id_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, draw = [0], BatchSampler._draw

    def counted(self: BatchSampler, *steps: int) -> Any:
        ids = draw(self, *steps)
        counts[0] += len(ids)
        return ids

    monkeypatch.setattr(BatchSampler, "_draw", counted)
    assert sum(map(len, drawn(replaced(shuffle(), REPLACED)))) == counts[0]


def test_many_replacements_make_no_large_state() -> None:
    schedule = {step: {step: step + 5000} for step in range(1, 4000)}
    stream = replaced(BatchSampler(RandomSampler(10_000, seed=0), batch_size=10), schedule)
    assert len(json.dumps(stream.state_at(9, 0))) < 4000
    whole = replaced(shuffle(10_000), {1: {bad: bad + 5000 for bad in range(4000)}})
    assert len(json.dumps(whole.state_at(9, 0))) < 4000


def test_replacing_needs_records_in_choose() -> None:
    """A pipeline of each class gives any of its records: it needs to know which are replaced."""
    assert replaced(classes(), OF_CLASSES).traits.needs_records
    assert not classes().traits.needs_records
