"""A copy of a feed is the feed made anew: it keeps nothing that was found for another sampler."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.batches import Noted, noted
from support.cases import mark_long
from support.sampler_cases import FED

from twinfeed import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    Feed,
    LoaderError,
    RandomSampler,
)


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    """A row whose length depends on the record, so that the spec depends on the first record."""
    return {"x": sample["x"], "row": np.full(1 + sample["x"] % 3, 7)}


def seeded_pairs(batch: dict[str, Any], seed: int) -> dict[str, Any]:
    """A batch function whose values depend on the seed, and whose shapes on the size of a batch."""
    x = batch["x"]
    return {"x": x, "pairs": x[:, None] * x[None], "seed": np.full(len(x), seed % 2**31)}


def feed_of(sampler: BatchStream) -> Feed:
    records = {"x": np.arange(sampler.num_records)}
    options: dict[str, Any] = {"decode": decode, "batch_transform": seeded_pairs}
    return Feed(records, sampler, collate={"row": "pad"}, **options)


def seen(feed: Feed) -> tuple[Any, list[Noted | str]]:
    """The spec, and the first and the last batch of an epoch, or its error if its size differs."""
    return dict(feed.spec), [_batch_or_error(feed, step) for step in (0, len(feed) - 1)]


def _batch_or_error(feed: Feed, step: int) -> Noted | str:
    try:
        return noted(feed[0, step])
    except LoaderError as error:
        return str(error)


@pytest.mark.parametrize(
    "make", mark_long([make for _, make in FED], but_every=7), ids=[name for name, _ in FED]
)
def test_copy_of_used_feed_is_feed_made_anew(make: Callable[[], BatchStream]) -> None:
    other = BatchSampler(RandomSampler(make().num_records, seed=99), batch_size=1)
    used = feed_of(other)
    assert used[0, 0]["pairs"].shape == (1, 1)
    copied = used.with_sampler(make())
    assert seen(copied) == seen(feed_of(make()))
    try:
        slices = [make().shard(rank, 2) for rank in range(2)]
    except ValueError:  # two ranks cannot divide its batches
        return
    for rank, sampler in enumerate(slices):
        assert seen(copied.shard(rank, 2)) == seen(feed_of(sampler))


def test_copy_of_used_feed_refuses_what_padding_adds() -> None:
    plain = BatchSampler(RandomSampler(5, seed=0), batch_size=2)
    padding = ExactOnceBatchSampler(5, batch_size=2, last_batch="pad")
    feed = Feed({"x": np.arange(5)}, plain, decode=lambda sample: {"mask": sample["x"]})
    assert feed[0, 0]["mask"].dtype == np.int64
    with pytest.raises(ValueError, match="field 'mask' has a name that the loader itself gives"):
        print(feed.with_sampler(padding)[0, 0])
