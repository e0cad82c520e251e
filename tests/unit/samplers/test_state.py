"""States: small, and refused where they are of another stream, with every difference named."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    MixtureSampler,
    PKBatchSampler,
    RandomSampler,
    SequentialSampler,
    StateMismatchError,
    SubsetSampler,
    ViewSampler,
)

LABELS = [0] * 5 + [1] * 3 + [2] * 5 + [3] * 1


def test_state_of_other_parameters_names_fields_and_both_values() -> None:
    """A diff, not an assertion."""
    state = PKBatchSampler(LABELS, p=2, k=1, seed=0).state_dict()
    with pytest.raises(StateMismatchError) as caught:
        PKBatchSampler(LABELS[:-1], p=3, k=1, seed=4).load_state_dict(state)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the state is of another stream:"
    fields = {line.split(":")[0].strip() for line in lines[1:-1]}
    assert lines[-1].startswith("  what to do: give the data, labels and sampler")
    assert fields == {"labels", "p", "seed", "steps"}
    assert "  p: the state has 2, this sampler has 3" in lines


def test_state_of_another_sampler_names_missing_fields() -> None:
    """Fields that only one of the two has are named too."""
    state = ExactOnceBatchSampler(8, batch_size=2).state_dict()
    with pytest.raises(StateMismatchError) as caught:
        PKBatchSampler([0, 0, 1, 1], p=2, k=2, seed=0).load_state_dict(state)
    assert "sampler: the state has 'ExactOnceBatchSampler'" in str(caught.value)
    assert "final: the state has 'smaller', this sampler has 'nothing'" in str(caught.value)
    assert "order.n: the state has 8, this sampler has 'nothing'" in str(caught.value)


def test_state_of_other_inner_orders_names_each_field_by_path() -> None:
    """An inner order's parameters do not hide those of the order around it, at any depth."""

    def subset(ids: list[int]) -> SubsetSampler:
        return SubsetSampler(ids, of=40, order=SubsetSampler([2, 0, 1], of=3))

    def plain(ids: list[int]) -> BatchSampler:
        return BatchSampler(subset(ids), batch_size=1)

    def mixed(ids: list[int]) -> BatchSampler:
        orders = [SequentialSampler(3), subset(ids)]
        mixture = MixtureSampler(orders, weights=[1, 2], num_samples=1, seed=0)
        return BatchSampler(mixture, batch_size=1)

    def viewed(ids: list[int]) -> BatchSampler:
        order = ViewSampler(subset(ids), [2] * 40, per_epoch="one", seed=0)
        return BatchSampler(order, batch_size=1)

    paths = ("order.records", "order.orders.1.records", "order.order.records")
    for make, path in zip((plain, mixed, viewed), paths, strict=True):
        with pytest.raises(StateMismatchError) as caught:
            make([11, 21, 31]).load_state_dict(make([10, 20, 30]).state_dict())
        _, line, _ = str(caught.value).splitlines()
        assert line.startswith(f"  {path}: the state has '3 values ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "the state has version 2, this library reads 1"),
        ({"step": 99}, "the state is at step 99, an epoch has 4"),
        ({"step": -1}, "step of the state must be at least 0"),
        ({"epoch": "0"}, "epoch of the state must be an integer"),
        ({"fingerprint": None}, "state must be what state_dict gave"),
    ],
)
def test_broken_and_newer_states_are_refused(change: dict[str, Any], words: str) -> None:
    """What was edited, cut off or written by a later version is not guessed at."""
    sampler = ExactOnceBatchSampler(8, batch_size=2)
    before = sampler.state_dict()
    with pytest.raises((StateMismatchError, ValueError, TypeError)) as caught:
        sampler.load_state_dict({**before, **change})
    assert words in str(caught.value)
    assert sampler.state_dict() == before


@pytest.mark.parametrize("changed", [ViewSampler, RandomSampler, BatchSampler])
def test_a_state_of_another_stream_version_is_refused(
    changed: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each class has a version of its own, also where an order is part of another order."""

    def sampler() -> BatchSampler:
        order = ViewSampler(RandomSampler(6, seed=0), [2] * 6, per_epoch="one", seed=0)
        return BatchSampler(order, batch_size=2)

    before = sampler().state_dict()
    monkeypatch.setattr(changed, "stream_version", 7)
    with pytest.raises(StateMismatchError, match=r"stream_version: the state has 1, .* has 7\n"):
        sampler().load_state_dict(before)


def test_malformed_state_is_refused() -> None:
    """Missing fields are named."""
    with pytest.raises(StateMismatchError, match="state must be what state_dict gave"):
        ExactOnceBatchSampler(8, batch_size=2).load_state_dict({"version": 1, "epoch": 0})
    checkpoint = {"model": np.zeros(9), "loader": {}}  # whose weights no message has
    with pytest.raises(StateMismatchError, match=r"as checkpoint\['loader'\], got .'model'"):
        ExactOnceBatchSampler(8, batch_size=2).load_state_dict(checkpoint)


def test_states_are_small_json_at_any_step() -> None:
    """The same few bytes at step 10^9 as at step 1, and the batch there at once."""
    sampler = BatchSampler(RandomSampler(10**12, seed=0), batch_size=100)
    state = json.loads(json.dumps(sampler.state_at(3, 10**9)))
    assert len(json.dumps(state)) < 400
    sampler.load_state_dict(state)
    assert np.array_equal(next(iter(sampler)), sampler.batch(3, 10**9))
    assert sampler.step == 10**9 + 1


def test_epochs_advance_without_set_epoch() -> None:
    """Each pass is the next epoch; setting the current epoch changes nothing."""
    sampler = BatchSampler(RandomSampler(20, seed=0), batch_size=10)
    passes = [np.concatenate(list(sampler)).tolist() for _ in range(3)]
    assert len({tuple(p) for p in passes}) == 3
    sampler.set_epoch(1)
    sampler.set_epoch(1)
    assert np.concatenate(list(sampler)).tolist() == passes[1]
