"""Random transforms: their seeds, and those that draw without them."""

import random
import time
from typing import Any

import numpy as np
import pytest
from support.batches import made
from support.feeds import batch_of, request_of

from twinfeed.loaders import (
    Feed,
    FieldSpec,
    Index,
    Seeded,
)
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    RandomSampler,
)

# What repeats itself


class OwnGenerator:
    """Draw from a generator of its own, as albumentations does."""

    def __init__(self) -> None:
        self.set_random_seed(0)

    def set_random_seed(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": self.generator.random()}


DRAWS: dict[str, Any] = {
    "random": lambda _: {"x": random.random()},
    "numpy": lambda _: {"x": np.random.random()},
    "sometimes": lambda _: {"x": 1.0 if random.random() < 0.5 else 0.0},
    "a generator of its own": OwnGenerator(),
}


def seldom(_: object) -> dict[str, Any]:
    """Differ only once in the sixteen calls of the trial."""
    return {"x": 1.0 if random.random() > 0.96 else 0.0}


@pytest.mark.usefixtures("readahead")
@pytest.mark.parametrize("draw", [*DRAWS.values(), seldom], ids=[*DRAWS, "seldom"])
def test_unseeded_random_transform_is_refused(
    index: Index, sampler: ExactOnceBatchSampler, draw: Any
) -> None:
    message = (
        r"transform returned different results for one sample and one seed.*Seeded\(transform\)"
    )
    with pytest.raises(ValueError, match=message):
        next(made(Feed(index, sampler, transform=draw)))
    spec = {"x": FieldSpec((), np.dtype(float))}
    with pytest.raises(ValueError, match=message):
        next(made(Feed(index, sampler, transform=draw, spec=spec)))


def states() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist()]


def test_trial_of_transform_keeps_global_random_states(
    index: Index, sampler: ExactOnceBatchSampler
) -> None:
    before = states()
    feed = Feed(index, sampler, transform=lambda sample: {"x": sample["seed"]})
    assert feed.spec
    assert states() == before


@pytest.mark.usefixtures("readahead")
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_seeded_transform_is_repeatable(
    index: Index, sampler: ExactOnceBatchSampler, draw: Any
) -> None:
    also = [draw] if isinstance(draw, OwnGenerator) else []
    feed = Feed(index, sampler, transform=Seeded(draw, also=also))
    first = [batch["x"].tolist() for batch in made(feed)]
    before = states()
    assert [batch["x"].tolist() for batch in made(feed)] == first
    assert states() == before
    assert len({value for batch in first for value in batch}) > 1


def test_threads_call_a_seeded_transform_one_at_a_time(
    index: Index, sampler: ExactOnceBatchSampler
) -> None:
    """Another call in between would set the global states anew."""

    def slow(_: object) -> dict[str, Any]:
        first = random.random()
        time.sleep(0.002)
        return {"x": [first, random.random()]}

    feed = Feed(index, sampler, transform=Seeded(slow))
    request = request_of(*range(6))
    alone, shared = (batch_of(feed, request, threads)["x"].tolist() for threads in (0, 4))
    assert shared == alone


def test_seeds_have_64_and_32_bits(index: Index) -> None:
    seeds = []

    def note(sample: dict[str, Any]) -> dict[str, Any]:
        seeds.append((sample["seed"], sample["seed32"]))
        np.random.default_rng(sample["seed32"])
        return {"x": 1}

    feed = Feed(index, BatchSampler(RandomSampler(6, seed=0), batch_size=6), transform=note)
    feed[0, 0]
    assert all(seed % 2**32 == seed32 for seed, seed32 in seeds)
    assert any(seed >= 2**32 for seed, _ in seeds)
