"""What torch may do in a transform: write where numpy forbids it, draw from its global state."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import made
from support.torch_feeds import lengths, pack_words

from twinfeed.loaders import Feed, Index, Seeded
from twinfeed.samplers import (
    BatchSampler,
    RandomSampler,
    ReuseSampler,
)
from twinfeed.testing import check_feed


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return pack_words(tmp_path_factory.mktemp("words"), 6)


def array(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.full(3, float(len(sample["word"])))}


def through_torch(sample: dict[str, Any]) -> dict[str, Any]:
    """Write to a cached array: torch does not know that numpy forbids it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {"x": torch.from_numpy(sample["x"]).add_(sample["record"] == 5)}


def writes_always(sample: dict[str, Any]) -> dict[str, Any]:
    return through_torch(sample | {"record": 5})


def test_transform_writing_through_torch_tensor_is_found(index: Index) -> None:
    sampler = BatchSampler(ReuseSampler(6, reuse=3, live=4, seed=0), batch_size=2)
    feed = Feed(index, sampler, decode=array, transform=through_torch)
    with pytest.raises(AssertionError, match=r"record 5 .*wrote to 'x'"):
        check_feed(feed)
    always = Feed(index, sampler, decode=array, transform=writes_always)
    with pytest.raises(ValueError, match="transform returned different results"):
        list(made(always))


def noisy(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": float(torch.rand(()))}


def test_transform_drawing_from_torch_state_is_refused_or_seeded(index: Index) -> None:
    sampler = BatchSampler(RandomSampler(6, seed=0), batch_size=2)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"transform returned different results.*Seeded"):
        next(made(Feed(index, sampler, decode=lengths, transform=noisy)))
    feed = Feed(index, sampler, decode=lengths, transform=Seeded(noisy))
    first, again = ([batch["x"].tolist() for batch in made(feed)] for _ in range(2))
    assert first == again
    assert len({value for batch in first for value in batch}) == 6
    assert torch.equal(torch.get_rng_state(), before)
