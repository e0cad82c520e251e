"""Where a pass begins, what moves on, and what a state says of it: cursors and bare iteration."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from contextlib import nullcontext
from itertools import islice
from typing import Any

import numpy as np
import pytest

from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    MixtureSampler,
    RandomSampler,
    ReuseSampler,
    SequentialSampler,
    SubsetSampler,
    WeightedSampler,
    state,
)
from twinfeed.samplers.stream import Cursor


def training() -> BatchStream:
    """Return a stream of five steps."""
    return BatchSampler(RandomSampler(10, seed=0), batch_size=2)


def evaluation() -> BatchStream:
    """Return an evaluation of five steps."""
    return ExactOnceBatchSampler(10, batch_size=2)


def loaded(stream: BatchStream, epoch: int, step: int) -> Cursor:
    """Return a cursor that a state was loaded into."""
    cursor = Cursor(stream)
    cursor.load_state_dict(stream.state_at(epoch, step))
    return cursor


def where(place: Cursor | BatchStream) -> tuple[int, int]:
    """Return the epoch and the step."""
    return place.epoch, place.step


def start_of_pass(stream: BatchStream) -> tuple[int, int]:
    """Begin a pass, break it off, and return where it began."""
    epoch, step, _ = next(stream.passes())
    return epoch, step


# Cursor


def test_cursor_advances_through_epochs() -> None:
    """After the last batch its position is the next epoch; nothing else moves it."""
    cursor = Cursor(training())
    places = []
    for _ in range(11):
        places.append(where(cursor))
        cursor.received()
    assert places == [(epoch, step) for epoch in range(3) for step in range(5)][:11]
    assert cursor.start_pass() == (2, 1)
    cursor.end()
    assert cursor.start_pass() == (2, 1)
    assert cursor.start_pass(from_start=True) == (2, 0)


def test_evaluation_cursor_starts_every_pass_at_step_0() -> None:
    """Each pass is whole and of the same epoch, except the first pass after a state."""
    cursor = Cursor(evaluation())
    for _ in range(3):
        assert cursor.start_pass() == (0, 0)
        cursor.received()
        assert where(cursor) == (0, 1)
    cursor.end()
    assert where(cursor) == (0, 0)
    for _ in range(5):
        cursor.received()
    assert where(cursor) == (0, 0)
    cursor = loaded(evaluation(), 0, 3)
    assert cursor.start_pass() == (0, 3)
    assert cursor.start_pass() == (0, 0)


def test_set_epoch_to_loaded_epoch_keeps_the_loaded_step() -> None:
    """Trainers name the epoch after they load a state; Lightning names epoch 0 before."""
    cursor = loaded(training(), 1, 3)
    cursor.set_epoch(0)
    assert where(cursor) == (0, 0)
    cursor.set_epoch(1)
    assert where(cursor) == (1, 3)
    assert cursor.start_pass(from_start=True) == (1, 3)
    cursor.set_epoch(1)
    assert where(cursor) == (1, 3)
    cursor.received()
    cursor.set_epoch(1)
    assert where(cursor) == (1, 0)


def test_seek_discards_the_loaded_position() -> None:
    """The end of an epoch is the beginning of the next epoch."""
    cursor = loaded(training(), 1, 3)
    cursor.seek(2, 5)
    assert where(cursor) == (3, 0)
    cursor.set_epoch(1)
    assert where(cursor) == (1, 0)
    once = Cursor(evaluation())
    once.seek(2, 5)
    assert where(once) == (2, 0)
    for place in ((0, 6), (0, -1), (-1, 0)):
        with pytest.raises(IndexError):
            cursor.seek(*place)


def test_cursor_resumes_from_state() -> None:
    """Its states are those of the stream."""
    stream = training()
    cursor = Cursor(stream)
    cursor.received()
    assert cursor.state_dict() == stream.state_at(0, 1)
    other = Cursor(stream.shard(0, 2))
    other.load_state_dict(cursor.state_dict())
    assert where(other) == (0, 1)


def test_evaluation_without_batches_stays_in_its_epoch() -> None:
    stream = ExactOnceBatchSampler(0, batch_size=2)
    cursor = Cursor(stream)
    for _ in range(3):
        assert where(cursor) == where(stream) == (0, 0)
        assert cursor.start_pass() == where(cursor)
        cursor.end()
        assert list(stream) == []


# Bare iteration


def test_last_batch_of_a_pass_moves_to_the_next_epoch() -> None:
    """Loops that take exactly len() batches, and ask for no other, get every epoch."""
    stream = training()
    for epoch in range(3):
        drawn = list(islice(stream, len(stream)))
        assert drawn == [ids.tolist() for ids in stream.batches(epoch, 0, 5)]
    with_zip = [ids for _, ids in zip(range(len(stream)), stream, strict=False)]
    assert with_zip == [ids.tolist() for ids in stream.batches(3, 0, 5)]
    assert where(stream) == (4, 0)


def test_interrupted_pass_begins_again() -> None:
    """A look at the first batch takes nothing away; the state in between counts what was drawn."""
    stream = training()
    assert start_of_pass(stream) == (0, 0)
    assert where(stream) == (0, 1)
    assert [step for _, step, _ in stream.passes()] == [0, 1, 2, 3, 4]
    assert where(stream) == (1, 0)


def test_evaluation_is_whole_in_every_pass() -> None:
    """A look, a sanity check of two batches and two validations: all the records, in epoch 0."""
    stream = ExactOnceBatchSampler(761, batch_size=64)
    next(iter(stream))
    assert stream.step == 0
    list(islice(stream, 2))
    for _ in range(2):
        epochs, _, ids = zip(*stream.passes(), strict=True)
        assert set(epochs) == {0}
        assert np.array_equal(np.concatenate(ids), np.arange(761))
    stream.set_epoch(3)
    assert {epoch for epoch, _, _ in stream.passes()} == {3}
    assert where(stream) == (3, 0)


def test_ranks_of_an_evaluation_agree_on_the_epoch() -> None:
    """Slices rotate over epochs: a rank that took an extra batch would lose records."""
    ranks = [ExactOnceBatchSampler(761, batch_size=64).shard(rank, 2) for rank in range(2)]
    next(iter(ranks[0]))
    list(ranks[0])
    received = np.concatenate([ids for rank in ranks for ids in rank])
    assert sorted(received) == list(range(761))


def test_iterator_draws_nothing_before_its_first_next() -> None:
    """Lightning makes the iterator, and names the epoch then."""
    stream = training()
    early = iter(stream)
    stream.set_epoch(4)
    assert next(early) == stream.batch(4, 0).tolist()
    thrown_away = iter(stream)
    stream.load_state_dict(stream.state_at(2, 3))
    del thrown_away
    assert [step for _, step, _ in stream.passes()] == [3, 4]
    assert start_of_pass(stream) == (3, 0)


@pytest.mark.parametrize("make", [training, evaluation])
def test_only_the_first_pass_after_a_state_is_partial(make: Any) -> None:
    """The pass after that is whole, whether the remainder was finished or not."""
    stream = make()
    stream.load_state_dict(stream.state_at(2, 3))
    assert [(epoch, step) for epoch, step, _ in stream.passes()] == [(2, 3), (2, 4)]
    assert start_of_pass(stream) == (2 if stream.evaluation else 3, 0)
    stream.load_state_dict(stream.state_at(2, 3))
    assert start_of_pass(stream) == (2, 3)
    assert start_of_pass(stream) == (2, 0)


@pytest.mark.parametrize("make", [training, evaluation])
@pytest.mark.parametrize(
    ("named", "following"),
    [((7,), (7, 0)), ((2, 7), (7, 0)), ((4, 7), (7, 0)), ((0, 2), None), ((2,), None)],
)
def test_set_epoch_during_a_pass_does_not_change_the_pass(
    make: Any, named: tuple[int, ...], following: tuple[int, int] | None
) -> None:
    """It says where the next pass begins; the running pass's own epoch changes nothing.

    Another epoch of a training is a warning: a host may have begun this pass before it set the
    epoch.
    """
    stream = make()
    stream.set_epoch(2)
    drawn = []
    is_other = following and not stream.evaluation
    with pytest.warns(UserWarning, match="over epoch 2 goes on") if is_other else nullcontext():
        for place in stream.passes():
            drawn.append(place[:2])
            if place[1] == 1:
                for epoch in named:
                    stream.set_epoch(epoch)
    assert drawn == [(2, step) for step in range(5)]
    following = following or (2 if stream.evaluation else 3, 0)
    assert where(stream) == following
    assert start_of_pass(stream) == following


def test_older_pass_continues_without_moving_the_cursor() -> None:
    """The later pass alone moves the cursor, and the end of the earlier pass leaves it."""
    stream = training()
    early = stream.passes()
    next(early)
    late = stream.passes()
    assert [next(late)[1] for _ in range(3)] == [0, 1, 2]
    assert [step for _, step, _ in early] == [1, 2, 3, 4]
    assert where(stream) == (0, 3)
    stream.load_state_dict(stream.state_at(4, 1))
    with pytest.warns(UserWarning, match="over epoch 0 goes on, and the position is in epoch 4"):
        assert [step for _, step, _ in late] == [3, 4]
    assert where(stream) == (4, 1)
    assert start_of_pass(stream) == (4, 1)


def test_state_within_a_pass_counts_drawn_batches() -> None:
    """It is restored to the batch that comes next."""
    stream = training()
    for _, step, _ in stream.passes():
        fresh = training()
        fresh.load_state_dict(stream.state_dict())
        assert start_of_pass(fresh) == divmod(step + 1, 5)


def test_copies_and_pickles_keep_position_and_move_independently() -> None:
    """The running pass stays with the stream that it was started on."""
    stream = training()
    stream.load_state_dict(stream.state_at(1, 2))
    running = stream.passes()
    next(running)
    pickled = pickle.loads(pickle.dumps(stream))
    for other in (copy.copy(stream), copy.deepcopy(stream), pickled, stream.shard(0, 2)):
        assert where(other) == (1, 3)
        other.set_epoch(6)
        assert start_of_pass(other) == (6, 0)
    assert [step for _, step, _ in running] == [3, 4]
    assert where(stream) == (2, 0)


def test_copy_of_loaded_stream_resumes_at_its_state() -> None:
    """A state at which no pass has started yet is copied too."""
    stream = training()
    stream.load_state_dict(stream.state_at(1, 2))
    for other in (stream.shard(1, 2), copy.copy(stream), stream):
        assert start_of_pass(other) == (1, 2)


def test_stream_is_freed_without_the_garbage_collector() -> None:
    """Its tables may be large: no cycle keeps them."""
    stream = training()
    list(stream)
    gone = weakref.ref(stream)
    gc.disable()
    try:
        del stream
        assert gone() is None
    finally:
        gc.enable()


# The warning


def start_passes(stream: BatchStream, times: int) -> None:
    """Begin so many passes."""
    for _ in range(times):
        start_of_pass(stream)


def test_third_start_of_an_epoch_warns_with_advice() -> None:
    """Keras and sanity checks begin twice, which is no mistake."""
    stream = training()
    start_passes(stream, 2)
    with pytest.warns(UserWarning, match=r"epoch 0 .* third time.*set_epoch.*twinfeed\.loaders"):
        start_passes(stream, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start_passes(stream, 3)


def test_intended_restarts_do_not_warn() -> None:
    """Epochs that were finished, named or loaded, and evaluations."""
    stream, once = training(), evaluation()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            list(stream)
        for _ in range(5):
            stream.set_epoch(2)
            start_of_pass(stream)
        for _ in range(5):
            stream.load_state_dict(stream.state_at(2, 1))
            start_of_pass(stream)
        start_passes(once, 5)


# Chunks, sizes and costs


@pytest.mark.parametrize("batch", [(1 << 15) - 1, 1 << 15, (1 << 15) + 1, 1 << 16])
def test_batches_larger_than_a_chunk_are_whole(batch: int) -> None:
    """Batches come whole, whatever is drawn at once."""
    stream = BatchSampler(SequentialSampler(3 * batch), batch_size=batch)
    assert [len(ids) for ids in islice(stream, 5)] == [batch] * 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: WeightedSampler(np.ones(1000), seed=0),
        lambda: SubsetSampler(np.arange(1000), of=1000),
        lambda: MixtureSampler(
            [SubsetSampler([4, 2], of=5)] * 2, weights=[1, 2], num_samples=9, seed=0
        ),
    ],
)
def test_data_are_hashed_once_for_stream_ranks_and_copies(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are taken at every step."""
    stream = BatchSampler(make(), batch_size=3)
    others = [stream.shard(0, 2), copy.copy(stream)]
    stream.state_dict()
    monkeypatch.setattr(state.hashlib, "blake2b", None)
    for one in (stream, *others, stream.shard(1, 2), pickle.loads(pickle.dumps(stream))):
        one.load_state_dict(one.state_dict())
        assert where(one) == (0, 0)


def test_changing_a_fingerprint_dict_does_not_change_the_stream() -> None:
    """Callers get a dict of their own."""
    stream = training()
    stream.fingerprint.clear()
    stream.state_dict()["fingerprint"].pop("seed")
    assert stream.fingerprint["seed"] == 0


# What trainers read


def test_batch_size_is_that_of_the_rank() -> None:
    """The largest that it gets."""
    stream = BatchSampler(SequentialSampler(20), batch_size=7)
    for world in (1, 2, 3, 7, 8):
        for rank in range(world):
            one = stream.shard(rank, world)
            sizes = [len(ids) for epoch in range(8) for ids in one.batches(epoch, 0, 3)]
            assert one.batch_size == max(sizes)


def test_drop_last_is_true_where_a_smaller_batch_is_dropped() -> None:
    """Trainers that divide batches among processes read this attribute, under torch's name."""
    mixture = MixtureSampler([SequentialSampler(3)], weights=[1], num_samples=7, seed=0)
    for last_batch, length in (("smaller", 3), ("pad", 3), ("drop", 2)):
        stream = BatchSampler(mixture, batch_size=3, last_batch=last_batch)  # type: ignore[arg-type]
        assert len(stream) == length
        if last_batch == "smaller":
            with pytest.raises(TypeError, match="last_batch='drop'"):
                _ = stream.drop_last
        else:
            assert stream.drop_last is True
        assert stream.traits.padded is (last_batch == "pad")


def test_a_rank_cannot_be_sharded_again() -> None:
    """Neither by shard, nor by a trainer, which asks for drop_last; shard(0, 1) is said freely."""
    stream = BatchSampler(SequentialSampler(8), batch_size=4)
    assert not stream.sharded
    meant = stream.shard(0, 1)
    assert meant.sharded
    assert meant.drop_last
    rank = meant.shard(0, 2)
    assert rank.sharded
    with pytest.raises(ValueError, match="already rank 0 of 2"):
        rank.shard(0, 1)
    with pytest.raises(TypeError, match=r"already is rank 0 of 2.*without shard"):
        _ = rank.drop_last


# Padding


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_any_order_is_padded_with_minus_one(world: int) -> None:
    """Padding is the end of the last global batch, and no record, view or use."""
    stream = BatchSampler(ReuseSampler(6, reuse=3, live=4, seed=0), batch_size=4, last_batch="pad")
    ranks = [stream.shard(rank, world).batch(0, 4) for rank in range(world)]
    ids = np.concatenate(ranks)
    assert (ids < 0).tolist() == [False, False, True, True]
    assert np.array_equal(stream.records(ids)[2:], [-1, -1])
    assert np.array_equal(stream.views(ids)[2:], [0, 0])
    assert stream.traits.padded
    assert stream.fixed_size == 4


def test_skipping_the_rest_of_a_loaded_epoch_warns() -> None:
    """A trainer may name two epochs before the first batch; what counts is where that batch is."""
    given_up = loaded(training(), 1, 3)
    given_up.set_epoch(2)
    with pytest.warns(
        UserWarning, match="the last batches of epoch 1 are skipped: a state of its step 3"
    ):
        given_up.received()
    given_up.received()  # warns once
    kept = loaded(training(), 1, 3)
    for epoch in (2, 1):
        kept.set_epoch(epoch)
    at_an_end, whole = loaded(training(), 1, 0), loaded(evaluation(), 1, 3)
    for cursor in (at_an_end, whole):
        cursor.set_epoch(2)
    for cursor in (kept, at_an_end, whole):
        cursor.received()
    assert where(kept) == (1, 4)


@pytest.mark.parametrize("named", [0, 1, 2])
@pytest.mark.parametrize("of_batches", [False, True])
def test_epoch_of_a_resumed_state_named_again_warns_once(of_batches: bool, named: int) -> None:
    """A host that counts its passes from 0 does so, as Fabric; the next epoch is no mistake."""
    stream: Any = training() if of_batches else RandomSampler(10, seed=0)
    stream.load_state_dict({**stream.state_dict(), "epoch": 2, "step": 3})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream.set_epoch(2)
        list(stream)
        other = copy.copy(stream)
        other.set_epoch(3)
        other.set_epoch(0)  # on purpose
        list(other)
    with pytest.warns(UserWarning, match=rf"set_epoch\({named}\) was called, but a state of epo"):
        stream.set_epoch(named)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream.set_epoch(named)


def test_epoch_before_a_state_at_an_end_warns() -> None:
    for cursor in (at_an_end := loaded(training(), 3, 0), loaded(evaluation(), 3, 0)):
        cursor.set_epoch(0)
    with pytest.warns(UserWarning, match="a state of epoch 3 was loaded, so an epoch"):
        at_an_end.received()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cursor.received()


def test_stream_warns_once_when_rest_of_loaded_epoch_is_skipped() -> None:
    """Its running pass and its position both move on, and both agree."""
    stream = training()
    stream.load_state_dict(stream.state_at(1, 3))
    stream.set_epoch(2)
    with pytest.warns(UserWarning, match="the last batches of epoch 1 are skipped") as caught:
        list(stream)
    assert len(caught) == 1
