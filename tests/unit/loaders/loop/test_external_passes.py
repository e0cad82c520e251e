"""Passes of frameworks that do not say what they received: where they begin, and what they move."""

from twinfeed.loaders.loop.external_passes import ExternalPasses
from twinfeed.samplers import BatchSampler, ExactOnceBatchSampler, SequentialSampler
from twinfeed.samplers.cursor import Cursor


def passes(*, evaluation: bool = False) -> tuple[ExternalPasses, Cursor]:
    """The passes of epochs of four batches, and the position."""
    order = BatchSampler(SequentialSampler(8), batch_size=2)
    sampler = ExactOnceBatchSampler(8, batch_size=2) if evaluation else order
    cursor = Cursor(sampler)
    return ExternalPasses(cursor, advice="count"), cursor


def test_tracked_passes_advance_epoch_by_epoch() -> None:
    """Also where the framework draws ahead of what is trained."""
    one, cursor = passes()
    one.track_from(0, 0)
    for epoch in range(3):
        start = one.start()
        assert start[:2] == (epoch, 0)
        assert one.started_at(epoch, 0)
        one.finish(start)
    assert (cursor.epoch, cursor.step) == (0, 0)


def test_finishing_pass_of_another_epoch_moves_nothing() -> None:
    one, cursor = passes()
    one.track_from(3, 0)
    old = one.start()
    one.track_from(1, 0)
    one.finish(old)
    assert one.start()[:2] == (1, 0)
    one.stop_tracking()
    old = one.start()
    cursor.set_epoch(5)
    one.finish(old)
    assert (cursor.epoch, cursor.step) == (5, 0)


def test_finishing_pass_started_before_tracking_moves_nothing() -> None:
    one, _ = passes()
    old = one.start()
    one.track_from(0, 0)
    one.finish(old)
    assert one.start()[:2] == (0, 0)


def test_restarted_pass_continues_after_last_trained_step() -> None:
    one, _ = passes()
    one.track_from(0, 0)
    one.start()
    one.advance_to(0, 3)
    rest = one.start()
    assert rest[:2] == (0, 3)
    one.finish(rest)
    assert one.start()[:2] == (1, 0)


def test_tracked_evaluation_stays_in_its_epoch() -> None:
    one, cursor = passes(evaluation=True)
    one.track_from(0, 0)
    for _ in range(3):
        start = one.start()
        assert start[:2] == (0, 0)
        one.finish(start)
    assert (cursor.epoch, cursor.step) == (0, 0)


def test_tracked_evaluation_starts_whole_after_any_step() -> None:
    one, cursor = passes(evaluation=True)
    one.track_from(0, 0)
    one.start()
    one.advance_to(0, 3)
    assert one.start()[:2] == (0, 0)
    assert (cursor.epoch, cursor.step) == (0, 3)


def test_peeking_pass_is_whole_and_moves_nothing() -> None:
    one, cursor = passes()
    cursor.seek(1, 0)
    one.track_from(1, 2)
    one.peeking = True
    start = one.start()
    assert start[:2] == (1, 0)
    one.finish(start)
    one.peeking = False
    assert one.start()[:2] == (1, 2)
    assert (cursor.epoch, cursor.step) == (1, 0)
    one.peeking = True
    one.stop_tracking()
    assert not one.peeking
