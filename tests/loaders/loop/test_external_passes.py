"""Passes of frameworks that do not say what they received: where they begin, and what they move."""

from twinfeed.loaders.loop.external_passes import UncountedPasses
from twinfeed.samplers import BatchSampler, ExactOnceBatchSampler, SequentialSampler
from twinfeed.samplers.cursor import Cursor


def passes(*, evaluation: bool = False) -> tuple[UncountedPasses, Cursor]:
    """The passes of epochs of four batches, and the position."""
    order = BatchSampler(SequentialSampler(8), batch_size=2)
    sampler = ExactOnceBatchSampler(8, batch_size=2) if evaluation else order
    cursor = Cursor(sampler)
    return UncountedPasses(sampler, cursor, advice="count"), cursor


def test_while_somebody_counts_one_epoch_follows_the_other() -> None:
    """Also where the framework draws ahead of what is trained."""
    one, cursor = passes()
    one.count_from(0, 0)
    for epoch in range(3):
        begun = one.begin()
        assert begun[:2] == (epoch, 0)
        assert one.began_at(epoch, 0)
        one.delivered(begun)
    assert (cursor.epoch, cursor.step) == (0, 0)


def test_a_pass_of_another_epoch_ends_no_epoch() -> None:
    one, cursor = passes()
    one.count_from(3, 0)
    old = one.begin()
    one.count_from(1, 0)
    one.delivered(old)
    assert one.begin()[:2] == (1, 0)
    one.stop_counting()
    old = one.begin()
    cursor.set_epoch(5)
    one.delivered(old)
    assert (cursor.epoch, cursor.step) == (5, 0)


def test_a_pass_from_before_the_counting_ends_no_epoch() -> None:
    one, _ = passes()
    old = one.begin()
    one.count_from(0, 0)
    one.delivered(old)
    assert one.begin()[:2] == (0, 0)


def test_after_a_killed_training_passes_follow_what_was_trained() -> None:
    one, _ = passes()
    one.count_from(0, 0)
    one.begin()
    one.trained(0, 3)
    rest = one.begin()
    assert rest[:2] == (0, 3)
    one.delivered(rest)
    assert one.begin()[:2] == (1, 0)


def test_an_evaluation_that_is_counted_stays_in_its_epoch() -> None:
    one, cursor = passes(evaluation=True)
    one.count_from(0, 0)
    for _ in range(3):
        begun = one.begin()
        assert begun[:2] == (0, 0)
        one.delivered(begun)
    assert (cursor.epoch, cursor.step) == (0, 0)


def test_an_evaluation_is_whole_wherever_its_count_has_come_to() -> None:
    one, cursor = passes(evaluation=True)
    one.count_from(0, 0)
    one.begin()
    one.trained(0, 3)
    assert one.begin()[:2] == (0, 0)
    assert (cursor.epoch, cursor.step) == (0, 3)


def test_a_look_is_whole_and_moves_nothing() -> None:
    one, cursor = passes()
    cursor.seek(1, 0)
    one.count_from(1, 2)
    one.looking = True
    begun = one.begin()
    assert begun[:2] == (1, 0)
    one.delivered(begun)
    one.looking = False
    assert one.begin()[:2] == (1, 2)
    assert (cursor.epoch, cursor.step) == (1, 0)
    one.looking = True
    one.stop_counting()
    assert not one.looking
