"""The laws of samplers that are iterated themselves, dealt to ranks, and taken as a sequence."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sampler_cases import CASES

from twinfeed.samplers import (
    BatchSampler,
    IdSequence,
    MixtureSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StateMismatchError,
    SubsetSampler,
    ViewSampler,
)

# The samplers that batches are cut from, one of each case that needs no training steps.
SAMPLERS = {
    name: make
    for name, make in CASES
    if name.split("-")[0] not in ("pk", "bucket") and not name.endswith(("-schedule", "-replaced"))
}
PLAIN = [
    # The order of many windows is long.
    pytest.param(name, marks=[pytest.mark.long] * name.endswith("-windows"))
    for name in SAMPLERS
    if not name.startswith(("views", "reuse", "mixture")) and "feistel" not in name
]
REFUSED = [name for name in SAMPLERS if name.startswith(("views", "reuse", "mixture"))]
EPOCHS = 3


def sampler_of(name: str) -> Sampler:
    """Return a new sampler of a case."""
    batches = SAMPLERS[name]()
    assert isinstance(batches, BatchSampler)
    return batches._inner_sampler


def epochs_of(sampler: Sampler, first: int = 0) -> list[list[int]]:
    """Return the ids of epochs, as `ids` gives them."""
    positions = np.arange(len(sampler))
    return [sampler.ids(epoch, positions).tolist() for epoch in range(first, first + EPOCHS)]


def position(sampler: Sampler) -> tuple[int, int]:
    """Return the epoch and the position in it."""
    state = sampler.state_dict()
    return state["epoch"], state["step"]


def iterating_gives_consecutive_epochs(sampler: Sampler) -> None:
    expected = epochs_of(sampler)
    for epoch, ids in enumerate(expected):
        found = list(sampler)
        assert found == ids
        assert all(type(id_) is int for id_ in found)
        assert position(sampler) == ((epoch + 1, 0) if ids else (0, 0))
        assert sampler.epoch == position(sampler)[0]
    sampler.set_epoch(1)
    assert list(sampler) == expected[1]


def state_at_every_position_resumes(sampler: Sampler) -> None:
    """Of the sampler, of its iterator, and of copies; in one fresh sampler, or in its iterator.

    The first id is checked at every position, and all that follow at every seventh and the last.
    """
    expected, running = epochs_of(sampler), iter(sampler)
    for drawn in range(len(sampler) + 1):
        state = json.loads(json.dumps(sampler.state_dict()))
        assert state == running.state_dict() == sampler.state_at(0, drawn)  # type: ignore[attr-defined]
        rest = expected[0][drawn:] or expected[1]
        assert next(iter(loaded(sampler, state)), None) == next(iter(rest), None)
        if drawn % 7 and drawn < len(sampler):
            assert next(running) == expected[0][drawn]
            continue
        fresh = copy.copy(sampler)
        assert fresh.state_dict() == state
        for load in (fresh.load_state_dict, iter(fresh).load_state_dict):  # type: ignore[attr-defined]
            load(state)
            assert fresh.state_dict() == state
            assert list(fresh) == rest
        both = pickle.loads(pickle.dumps(sampler))
        both.load_state_dict(state)  # torchdata loads both
        resumed = iter(both)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert list(resumed) == rest
        assert list(both) == expected[1 + (drawn == len(sampler) > 0)][: len(both)]
        assert next(running, None) == ([*expected[0], None][drawn])
    if len(sampler):
        assert position(sampler) == (1, 0)


def ranks_take_positions_in_turn(sampler: Sampler) -> None:
    """Step s of W ranks has the positions from sWb to (s + 1)Wb, and a state is of all ranks."""
    length = len(sampler)
    expected = epochs_of(sampler)
    for world in (1, 2, 3, 5):
        for uneven in ("drop", "keep"):
            if uneven == "drop" and 0 < length < world:  # leaves out all, which is refused
                continue
            ranks = [sampler.shard(rank, world, uneven=uneven) for rank in range(world)]
            stop = length - length % world if uneven == "drop" else length
            for ids in expected:
                found = [list(rank) for rank in ranks]
                assert found == [ids[:stop][rank::world] for rank in range(world)]
                assert [len(part) for part in found] == [len(rank) for rank in ranks]
        if length % world:
            with pytest.raises(ValueError, match=f"{world} ranks must divide the {length:,} ids"):
                sampler.shard(0, world)
        else:
            assert [len(sampler.shard(rank, world)) for rank in range(world)] == (
                [length // world] * world
            )


def any_ranks_resume_from_state_of_any_ranks(sampler: Sampler) -> None:
    """1, then 3, then 2 ranks, and the state is the same on every rank."""
    expected = epochs_of(sampler)[0]
    for steps in range(0, len(sampler) // 5, 3):
        start, state = 0, sampler.state_dict()
        for world in (1, 3, 2):
            ranks = [sampler.shard(rank, world, uneven="keep") for rank in range(world)]
            for rank in ranks:
                rank.load_state_dict(state)
            parts = [list(islice(rank, steps)) for rank in ranks]
            assert sorted(chain(*parts)) == sorted(expected[start : start + steps * world])
            states = [rank.state_dict() for rank in ranks]
            assert states[0] == ranks[-1].state_at(0, min(start + steps * world, len(sampler)))
            assert all(other == states[0] for other in states)
            start, state = start + steps * world, states[0]
        assert list(loaded(sampler, state)) == (expected[start:] or epochs_of(sampler)[1])


def id_sequence_has_all_epochs(sampler: Sampler) -> None:
    expected = list(chain(*epochs_of(sampler)))
    ids = IdSequence(sampler, epochs=EPOCHS)
    assert len(ids) == len(expected)
    assert list(ids) == [ids[index] for index in range(len(ids))] == expected
    assert list(reversed(ids)) == expected[::-1]
    assert np.asarray(ids).tolist() == ids[np.arange(len(ids))].tolist() == expected
    assert list(pickle.loads(pickle.dumps(ids))[::2]) == expected[::2]


LAWS = (
    iterating_gives_consecutive_epochs,
    state_at_every_position_resumes,
    ranks_take_positions_in_turn,
    any_ranks_resume_from_state_of_any_ranks,
    id_sequence_has_all_epochs,
)


def loaded(sampler: Sampler, state: dict[str, Any]) -> Sampler:
    """Return a copy that a state was loaded into."""
    clone = copy.copy(sampler)
    clone.load_state_dict(state)
    return clone


@pytest.mark.parametrize("name", PLAIN)
def test_iteration_satisfies_every_law(name: str) -> None:
    for law in LAWS:
        law(sampler_of(name))


@pytest.mark.parametrize("name", REFUSED)
def test_iterating_view_ids_is_refused(name: str) -> None:
    """A mixture of views has view ids; the padding of a batch is none of its sampler."""
    sampler = sampler_of(name)
    for call in (iter, lambda sampler: IdSequence(sampler, epochs=1)):
        with pytest.raises(
            TypeError, match=r"are not record ids, .*\n.*records\(ids\) of sampler\.ids"
        ):
            call(sampler)


@dataclass(frozen=True)
class Stored(Sampler):
    """A sampler of a user's own: it cannot be written to, and has no `__init__` of ours."""

    num_records: int
    draws: list[int] = field(default_factory=list)

    @property
    def parameters(self) -> dict[str, Any]:  # type: ignore[override]
        return {"n": self.num_records}

    def draw(self, epoch: int, positions: Any) -> Any:
        self.draws.append(len(positions))
        if len(self.draws) == 2:
            raise OSError("once")
        return (positions + epoch) % self.num_records


def test_own_sampler_iterates_in_growing_chunks() -> None:
    """In chunks that grow, and a chunk that failed is drawn again."""
    sampler = Stored(40_000)
    running = iter(sampler)
    assert not sampler.draws
    assert next(running) == 0
    with pytest.raises(OSError, match="once"):
        next(running)
    assert position(sampler) == (0, 1)
    assert list(running) == [*range(1, 40_000)]
    assert sampler.draws == [1, 2, *(1 << power for power in range(1, 15)), 40_000 - (1 << 15) + 1]
    assert list(islice(sampler, 3)) == [1, 2, 3]
    assert position(copy.deepcopy(sampler)) == position(copy.copy(sampler)) == (1, 3)


def test_latest_iterator_has_the_position() -> None:
    """A pass that is broken off begins its epoch again; a running pass never changes."""
    sampler = RandomSampler(10, seed=0)
    expected = epochs_of(sampler)
    first, second = iter(sampler), iter(sampler)
    assert [next(first), next(first)] == [next(second), next(second)] == expected[0][:2]
    assert next(first) == expected[0][2]
    assert position(sampler) == (0, 2)
    sampler.set_epoch(0)
    assert position(sampler) == (0, 2)
    sampler.set_epoch(2)
    assert position(sampler) == (2, 0)
    for running, rest in (second, 2), (first, 3):
        with pytest.warns(UserWarning, match="an iteration over epoch 0 goes on"):
            assert list(running) == expected[0][rest:]
    assert position(sampler) == (2, 0)
    assert list(sampler) == expected[2]
    state = {**sampler.state_dict(), "epoch": 1, "step": 4}
    sampler.load_state_dict(state)
    sampler.set_epoch(1)
    assert list(sampler) == expected[1][4:]
    sampler.load_state_dict(state)
    sampler.set_epoch(2)
    with pytest.warns(UserWarning, match="the last batches of epoch 1 are skipped"):
        assert list(sampler) == expected[2]


def test_loading_state_into_iterator_sets_epoch() -> None:
    """In the middle of another pass too."""
    sampler = RandomSampler(10, seed=0)
    sampler.set_epoch(1)
    list(islice(sampler, 4))
    state = sampler.state_dict()
    fresh = RandomSampler(10, seed=0)
    running = iter(fresh)
    list(islice(running, 7))
    running.load_state_dict(state)  # type: ignore[attr-defined]
    fresh.set_epoch(1)  # as trainers do
    assert list(running) == epochs_of(fresh)[1][4:]
    assert position(fresh) == (2, 0)
    with pytest.raises(StateMismatchError, match="n: the state has 10, this sampler has 11"):
        RandomSampler(11, seed=0).load_state_dict(state)


def test_state_at_refuses_what_is_no_position_and_ids_that_depend_on_steps() -> None:
    sampler = RandomSampler(10, seed=0)
    assert sampler.shard(1, 2).state_at(2, 10) == sampler.state_at(3, 0)
    for epoch, at in ((0, 11), (0, -1), (-1, 0), (1 << 62, 0)):
        with pytest.raises(IndexError):
            sampler.state_at(epoch, at)
    with pytest.raises(TypeError, match="step must be an integer"):
        sampler.state_at(0, 1.5)  # type: ignore[arg-type]
    weights = {0: [1, 2], 5: [2, 1]}
    changing = MixtureSampler([sampler, sampler], weights=weights, num_samples=9, seed=0)
    with pytest.raises(TypeError, match="changes at training steps"):
        changing.state_at(0, 0)


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("load_first", [False, True])
def test_naming_the_epoch_that_a_state_has_ended_warns(batches: bool, load_first: bool) -> None:
    """A loop that counts epochs does so; one that loads after `set_epoch`, as torchdata."""

    def sampler() -> Any:
        order = RandomSampler(6, seed=0)
        return BatchSampler(order, batch_size=2) if batches else order

    ended = sampler()
    list(ended)
    state, resumed = ended.state_dict(), sampler()

    def resume() -> None:
        if load_first:
            resumed.load_state_dict(state)
            resumed.set_epoch(0)
        else:
            resumed.set_epoch(0)
            resumed.load_state_dict(state)
            list(resumed)
            resumed.set_epoch(1)
        list(resumed)

    with pytest.warns(UserWarning, match=r"set_epoch\([01]\) was called, .*count epochs from"):
        resume()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ended.set_epoch(1)
        list(ended)
        ended.load_state_dict(ended.state_dict())  # a pass has started since
        list(ended)


def test_third_iteration_of_one_epoch_warns() -> None:
    """As of any stream; an epoch that is named does not."""
    sampler = RandomSampler(10, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            sampler.set_epoch(0)
            next(iter(sampler))
        for _ in range(4):
            assert not list(SequentialSampler(0))
        next(iter(sampler))
    with pytest.warns(UserWarning, match="begin epoch 0 for the third time"):
        next(iter(sampler))


def test_ranks_that_do_not_divide_rest_are_refused_repeatedly() -> None:
    """And the loaded position stays."""
    rank, sampler = RandomSampler(10, seed=0).shard(0, 2), RandomSampler(10, seed=0)
    list(islice(sampler, 3))
    rank.load_state_dict(sampler.state_dict())
    for _ in range(2):
        with pytest.raises(ValueError, match="2 ranks must divide the 7 ids of an iteration"):
            next(iter(rank))
    assert position(rank) == (0, 3)


def test_rest_shorter_than_ranks_is_empty_without_warning() -> None:
    """A loaded position has fewer ids after it than ranks, which "drop" leaves out."""
    rank, sampler = RandomSampler(10, seed=0).shard(0, 3, uneven="drop"), RandomSampler(10, seed=0)
    list(islice(sampler, 8))
    rank.load_state_dict(sampler.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not list(rank)
        assert list(rank) == epochs_of(sampler)[1][:9:3]


def test_rank_of_sampler_is_refused_as_order_of_another() -> None:
    rank = RandomSampler(10, seed=0).shard(1, 2)
    assert repr(rank) == "rank 1 of 2 of RandomSampler(10 records, seed=0)"
    assert list(IdSequence(rank, epochs=2)) == list(rank) + list(rank)
    for wrap in (
        lambda: BatchSampler(rank, batch_size=2),
        lambda: SubsetSampler([1, 2, 3, 4, 5], of=9, order=rank),
        lambda: ViewSampler(rank, [1] * 5, per_epoch="one", seed=0),
    ):
        with pytest.raises(TypeError, match="r must be the sampler of all ranks, got rank 1"):
            wrap()
    with pytest.raises(ValueError, match="this sampler is already rank 1 of 2"):
        rank.shard(0, 2)


SIZED = RandomSampler(7, seed=0)
ALL = [id_ for epoch in range(40) for id_ in SIZED.ids(epoch, np.arange(7)).tolist()]
INDICES = st.integers(-len(ALL), len(ALL) - 1)


@given(st.slices(len(ALL)), st.slices(len(ALL)), st.lists(INDICES), INDICES)
def test_id_sequence_slices_and_indexes_like_list(
    first: slice, second: slice, indices: list[int], index: int
) -> None:
    ids = IdSequence(SIZED, epochs=40)
    assert list(ids[first][second]) == np.asarray(ids[first][second]).tolist() == ALL[first][second]
    assert ids[indices].tolist() == [ALL[index] for index in indices]
    assert ids[index] == ids[np.int64(index)] == ids[np.array(index)] == ALL[index]
    part = ids[first]
    for number in (0, len(part) // 2, len(part) - 1, -1, -len(part)) if len(part) else ():
        assert part[number] == ALL[first][number]
    assert part[list(range(len(part)))].tolist() == ALL[first]


@pytest.mark.parametrize(
    "index",
    [1.0, True, None, "1", [0.5], np.array([True]), [[1], [2, 3]], {}, 280, -281, [280]],
)
def test_id_sequence_refuses_bad_index(index: Any) -> None:
    ids = IdSequence(SIZED, epochs=40)
    assert ids[()].shape == ids[[]].shape == (0,)
    with pytest.raises((TypeError, IndexError, ValueError), match=r"280|integers|inhomogeneous"):
        ids[index]


@pytest.mark.parametrize("step", [10**29, -(10**29), 280, 2**63])
def test_id_sequence_takes_any_step(step: int) -> None:
    ids = IdSequence(SIZED, epochs=40)[3::step]
    assert list(ids) == ids[[0]].tolist() == np.asarray(ids).tolist() == ALL[3:4]
    assert len(ids[1:]) == len(IdSequence(SIZED, epochs=40)[3:3:step]) == 0


def test_id_sequence_of_many_epochs_takes_no_memory() -> None:
    ids = IdSequence(RandomSampler(10**12, seed=0), epochs=1_000_000)
    assert len(ids) == 10**18
    assert len(pickle.dumps(ids)) < 1000
    tail = ids[-(10**17) :: 10**9]
    assert len(tail) == 10**8
    assert tail[-1] == ids[10**18 - 10**9] == ids[[-(10**9)]][0]
    assert repr(ids).endswith("epochs=1000000)")
    assert repr(ids[::-1]).endswith("epochs=1000000)[range(999999999999999999, -1, -1)]")
