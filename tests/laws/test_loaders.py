"""Seekable, honest about its length, and twin to a plain loop: every sampler through the loader."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from support.batches import Noted, expected, noted, received
from support.cases import mark_long
from support.sampler_cases import FED
from support.torch_feeds import OPTIONS, pack_words

from twinfeed.loaders import Feed, Index
from twinfeed.loaders.torch import TorchLoader
from twinfeed.samplers import BatchStream

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

WORKERS = (0, 1, 2, 4)


@cache
def index_of(records: int) -> Index:
    return pack_words(Path(mkdtemp()), records)


def options_of(number: int, sampler: BatchStream) -> dict[str, Any]:
    """Other workers, another depth and another reading ahead for each case in turn."""
    workers = 0 if sampler.traits.max_cached is not None else WORKERS[number % len(WORKERS)]
    if len(sampler) > 100:
        workers = min(workers, 1)  # a long epoch
    ahead = 3000 * (number // len(WORKERS) % 2)
    return {
        "num_workers": workers,
        "prefetch": 1 + number % 3,
        "threads": number % 4,
        "readahead": ahead,
    }


@pytest.mark.parametrize(
    ("number", "make"),
    mark_long([(n, make) for n, (_, make) in enumerate(FED)], but_every=9),
    ids=[c[0] for c in FED],
)
def test_sampler_laws_hold_through_loader(number: int, make: Callable[[], BatchStream]) -> None:
    """Resumed at the start, in the middle, before the last step, and at the end."""
    index, steps = index_of(make().num_records), len(make())
    whole = expected(index, make(), epochs=(0, 1), **OPTIONS)
    feed = Feed(index, make(), **OPTIONS)
    options = options_of(number, feed.sampler)
    states, got = _followed(TorchLoader(feed, **options), steps)
    assert len(got) == steps
    assert got == whole[:steps]
    for step in sorted({0, steps // 2, steps - 1, steps}):
        fresh = TorchLoader(feed, threads=step % 4, readahead=options["readahead"])
        fresh.load_state_dict(states[step])
        rest = whole[steps:] if step == steps else whole[step:steps]
        if step == steps and feed.sampler.evaluation:  # each pass of which is whole
            rest = whole[:steps]
        assert received(fresh) == rest
        fresh.close()


def _followed(loader: TorchLoader, steps: int) -> tuple[list[dict[str, Any]], list[Noted]]:
    """The state before and after each batch of an epoch, and the batches."""
    states, got = [loader.state_dict()], []
    for batch in loader:
        got.append(noted(batch))
        states.append(loader.state_dict())
    assert len(loader) == steps
    loader.close()
    return states, got
