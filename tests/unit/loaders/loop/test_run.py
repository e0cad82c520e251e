"""The position of a run: what a loop received, and passes of frameworks that do not say it."""

import copy
import pickle

import pytest

from twinfeed.loaders.loop.run import Run
from twinfeed.samplers import BatchSampler, ExactOnceBatchSampler, SequentialSampler


def new_run(*, evaluation: bool = False) -> Run:
    """A run of epochs of four batches."""
    order = BatchSampler(SequentialSampler(8), batch_size=2)
    sampler = ExactOnceBatchSampler(8, batch_size=2) if evaluation else order
    return Run(sampler, advice="count")


def test_tracked_passes_advance_epoch_by_epoch() -> None:
    """Also where the framework draws ahead of what is trained."""
    run = new_run()
    run.track_from(0, 0)
    for epoch in range(3):
        start = run.start_external()
        assert start[:2] == (epoch, 0)
        assert run.started_at(epoch, 0)
        run.finish_external(start)
    assert (run.epoch, run.step) == (0, 0)


def test_finishing_pass_of_another_epoch_moves_nothing() -> None:
    run = new_run()
    run.track_from(3, 0)
    old = run.start_external()
    run.track_from(1, 0)
    run.finish_external(old)
    assert run.start_external()[:2] == (1, 0)
    run.stop_tracking()
    old = run.start_external()
    run.set_epoch(5)
    run.finish_external(old)
    assert (run.epoch, run.step) == (5, 0)


def test_finishing_pass_started_before_tracking_moves_nothing() -> None:
    run = new_run()
    old = run.start_external()
    run.track_from(0, 0)
    run.finish_external(old)
    assert run.start_external()[:2] == (0, 0)


def test_restarted_pass_continues_after_last_trained_step() -> None:
    run = new_run()
    run.track_from(0, 0)
    run.start_external()
    run.advance_to(0, 3)
    rest = run.start_external()
    assert rest[:2] == (0, 3)
    run.finish_external(rest)
    assert run.start_external()[:2] == (1, 0)


def test_tracked_evaluation_stays_in_its_epoch() -> None:
    run = new_run(evaluation=True)
    run.track_from(0, 0)
    for _ in range(3):
        start = run.start_external()
        assert start[:2] == (0, 0)
        run.finish_external(start)
    assert (run.epoch, run.step) == (0, 0)


def test_tracked_evaluation_starts_whole_after_any_step() -> None:
    run = new_run(evaluation=True)
    run.track_from(0, 0)
    run.start_external()
    run.advance_to(0, 3)
    assert run.start_external()[:2] == (0, 0)
    assert (run.epoch, run.step) == (0, 3)


def test_peeking_pass_is_whole_and_moves_nothing() -> None:
    run = new_run()
    run.seek(1, 0)
    run.track_from(1, 2)
    run.peeking = True
    start = run.start_external()
    assert start[:2] == (1, 0)
    run.finish_external(start)
    run.peeking = False
    assert run.start_external()[:2] == (1, 2)
    assert (run.epoch, run.step) == (1, 0)
    run.peeking = True
    run.stop_tracking()
    assert not run.peeking


def test_received_counts_batches_and_notes_epochs() -> None:
    run = new_run()
    assert run.start_pass() == (0, 0)
    assert [run.received() for _ in range(9)] == [False, False, False, True] * 2 + [False]
    assert (run.epoch, run.step, run.received_epochs) == (2, 1, {0, 1, 2})
    state = run.state_dict()
    restored = new_run()
    restored.load_state_dict(state)
    assert (restored.epoch, restored.step, restored.received_epochs) == (2, 1, set())
    assert restored.start_pass() == (2, 1)


def test_epoch_that_was_received_or_left_early_warns_once() -> None:
    run = new_run()
    run.received()
    with pytest.warns(UserWarning, match="3 of 4 batches of epoch 0 were skipped"):
        run.set_epoch(1)
    run.set_epoch(0)  # a second warning would be an error here
    again = new_run()
    again.received()
    with pytest.warns(UserWarning, match="set_epoch starts epoch 0 again"):
        again.set_epoch(0)
    evaluation = new_run(evaluation=True)
    evaluation.received()
    evaluation.set_epoch(0)


def test_copy_of_a_run_has_its_position_and_no_caller_that_tracks_it() -> None:
    run = new_run()
    run.received()
    run.track_from(2, 3)
    run.peeking = True
    for other in (copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        assert (other.epoch, other.step, other.peeking) == (0, 1, False)
        assert other.start_external()[:2] == (0, 1)
        other.received()
    assert (run.epoch, run.step) == (0, 1)
