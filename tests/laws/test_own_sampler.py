"""Samplers of a user's own: what they give and declare is checked where they are used."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.own_source import RECORDS, Words

from twinfeed.loaders import Feed, NumpyLoader
from twinfeed.samplers import (
    BatchSampler,
    MixtureSampler,
    Sampler,
    SamplerTraits,
    SequentialSampler,
    StateMismatchError,
    SubsetSampler,
    ViewSampler,
)


class Own(Sampler):
    """Give what a function of the positions returns."""

    def __init__(self, drawn: Callable[[Any], Any], n: int = RECORDS, **parameters: Any) -> None:
        self.num_records = n
        self.drawn_by = drawn
        self.parameters = {"n": n, **parameters}

    def __repr__(self) -> str:
        return f"Own({self.num_records})"

    def draw(self, epoch: int, positions: Any) -> Any:
        return self.drawn_by(positions)


class Bare(Own):
    """Declare nothing."""

    def __init__(self) -> None:
        self.num_records = RECORDS


def test_sampler_without_draw_is_refused() -> None:
    with pytest.raises(TypeError, match=r"abstract method '?draw"):
        type("Idle", (Sampler,), {"num_records": 3, "parameters": {}})()


@pytest.mark.parametrize(
    ("drawn", "wrong", "step"),
    [
        (lambda at: at - 8 * (at == 7), "the id -1, where ids are in [0, 24)", 1),
        (lambda at: at + 20 * (at == 13), "the id 33, where ids are in [0, 24)", 2),
        (lambda at: at + 0.5, "float64 in place of integers", 0),
        (lambda at: at[1:], "the shape (4,) for 5 positions", 0),
        (lambda at: 0, "the shape () for 5 positions", 0),
        (lambda at: at[:, None], "the shape (5, 1) for 5 positions", 0),
        (lambda at: [None] * len(at), "object in place of integers", 0),
    ],
)
def test_wrong_ids_are_named_before_reading(
    drawn: Callable[[Any], Any], wrong: str, step: int
) -> None:
    """Never another row of the source; inside other samplers too."""
    loader = NumpyLoader(Feed(Words(), BatchSampler(Own(drawn), batch_size=5)), prefetch=0)
    with pytest.raises(ValueError, match="correct its draw") as caught:
        list(loader)
    assert f"Own(24) gave {wrong}, at epoch 0, step {step}" in str(caught.value)
    for outer in (
        SubsetSampler(np.arange(0, 48, 2), of=48, order=Own(drawn)),
        ViewSampler(Own(drawn), [2] * RECORDS, per_epoch="one", seed=0),
        MixtureSampler([SequentialSampler(3), Own(drawn)], weights=[1, 8], num_samples=50, seed=0),
    ):
        with pytest.raises(ValueError, match=r"Own\(24\) gave .*, at epoch 0, position \d+"):
            BatchSampler(outer, batch_size=25).batches(0, 0, 1)


def test_own_sampler_may_draw_integers_of_any_dtype() -> None:
    for drawn in (list, lambda at: at.astype(np.int32), lambda at: at.astype(np.uint8)):
        batches = BatchSampler(Own(drawn, 6), batch_size=4)
        assert list(batches) == [[0, 1, 2, 3], [4, 5]]
        assert batches.batch(0, 0).dtype == np.int64


def test_state_holds_values_of_parameters() -> None:
    """Whatever JSON can hold, at once or as a digest; an equal new sampler takes the state."""

    def made(**changed: Any) -> BatchSampler:
        parameters: dict[str, Any] = {
            "shift": np.int64(3),
            "ends": (0, 4),
            "by_class": {0: 1.5, 1: None},
            "weights": np.array([0.25, 0.5]),
            "inner": SequentialSampler(4),
        }
        return BatchSampler(Own(lambda at: at, **{**parameters, **changed}), batch_size=5)

    state = json.loads(json.dumps(made().state_at(0, 2)))
    assert made().position_of(state) == (0, 2)
    for name, value in {
        "shift": 4,
        "ends": (0, 5),
        "by_class": {0: 1.5, 1: 2.5},
        "weights": np.array([0.25, 0.75]),
        "inner": SequentialSampler(5),
    }.items():
        with pytest.raises(StateMismatchError, match=rf"order\.{name}"):
            made(**{name: value}).position_of(state)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (Own(lambda at: at, how=lambda: 0), "got <function"),
        (Own(lambda at: at, inner=[object()]), "got <object"),
        (Own(lambda at: at, names=np.array([None])), "got array"),
        (Bare(), "Bare.parameters must be a dict"),
    ],
)
def test_parameters_without_state_value_are_refused(own: Sampler, words: str) -> None:
    for make in (
        lambda: BatchSampler(own, batch_size=2),
        lambda: ViewSampler(own, [1] * RECORDS, per_epoch="one", seed=0),
        lambda: MixtureSampler([own], weights=[1], num_samples=4, seed=0),
    ):
        with pytest.raises(TypeError, match=words):
            make()


def test_groups_are_those_of_the_ids_at_each_position() -> None:
    own = Own(lambda at: at[::-1] % 6, 6)
    own.traits = SamplerTraits(num_groups=3)
    own.group_of = lambda ids: ids // 2  # type: ignore[method-assign]
    batches = BatchSampler(own, batch_size=4)
    groups = batches.group_sampler
    assert groups is not None
    assert groups.num_records == 3
    for ids, of_ids in zip(batches.batches(1, 0, 2), groups.batches(1, 0, 2), strict=True):
        assert of_ids.tolist() == (ids // 2).tolist()
    assert BatchSampler(own, batch_size=4, last_batch="pad").group_sampler is None
    assert BatchSampler(SequentialSampler(6), batch_size=4).group_sampler is None


def test_changed_copy_of_a_sampler_has_a_fingerprint_of_its_own() -> None:
    """`for_batches` may return a copy with other parameters."""

    class Shifted(Own):
        def for_batches(self, batch_size: int, num_steps: int) -> Sampler:
            shifted = copy.copy(self)
            shifted.parameters = {**self.parameters, "shift": batch_size}
            return shifted

    own = Shifted(lambda at: at)
    assert own.fingerprint["name"] == "Shifted"
    states = [BatchSampler(own, batch_size=size).state_dict() for size in (5, 6)]
    assert [state["fingerprint"]["order.shift"] for state in states] == [5, 6]
    assert "shift" not in own.fingerprint
