"""The batches of a pass in this process: made in order, on threads, ahead of the loop."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import TypeVar

from twinfeed.loaders.ahead.planner import Plans
from twinfeed.loaders.feed.collate import Empty, aligned
from twinfeed.loaders.feed.definition import Batch, Definition
from twinfeed.loaders.feed.request import requests
from twinfeed.loaders.making.batcher import Batcher
from twinfeed.loaders.making.meter import Meter
from twinfeed.loaders.making.prefetch import in_order
from twinfeed.loaders.reading.source import Reads
from twinfeed.loaders.support import checks, system

T = TypeVar("T")

PREFETCH = 2


def most_threads() -> int:
    """Return how many threads make batches where nobody says how many."""
    return min(8, system.processors())


def batches_ahead(feed: Definition, prefetch: int | None, threads: int | None) -> tuple[int, int]:
    """Return how many batches are kept ready, and how many threads make them."""
    if prefetch is None:  # to hand a batch over to another thread may take longer than to make it
        prefetch = 0 if getattr(feed.index, "in_memory", False) and not feed._calls else PREFETCH
    prefetch = checks.count("prefetch", prefetch, minimum=0)
    if threads is None:
        threads = most_threads() if prefetch and feed._calls else 0
    threads = checks.count("threads", threads, minimum=0)
    # A transform that sets global states leaves all to the calling thread.
    return (0, 0) if feed._alone else (prefetch, threads)


def making(
    feed: Definition,
    reader: Reads,
    epoch: int,
    start: int,
    /,
    *,
    threads: int,
    meter: Meter,
    plans: Plans,
    then: Callable[[Batch], T],
    empty: Empty = aligned,
) -> Generator[T, None, None]:
    """Yield `then(batch)` of each batch of the rest of an epoch, in order."""
    # Each thread makes whole batches, unless these come in turn from a cache of decoded images.
    shared, whole = (0, threads) if feed.sampler.live is None else (threads, 0)
    with Batcher(feed, reader=reader, threads=shared, meter=meter, empty=empty) as batcher:
        batcher.look_ahead(feed, epoch, start, plans=plans)
        coming = requests(plans.schedule(feed.sampler), epoch, start, seeds=feed._seeded)
        with closing(in_order(lambda one: then(batcher(one)), coming, threads=whole)) as made:
            yield from made
