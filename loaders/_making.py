"""The batches of a pass in this process: made in order, on threads, ahead of the loop."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import TypeVar

from twinfeed.loaders import _checks, _system
from twinfeed.loaders._batcher import Batch, Batcher
from twinfeed.loaders._meter import Meter
from twinfeed.loaders._prefetch import in_order
from twinfeed.loaders.collate import Empty, aligned
from twinfeed.loaders.feed import Feed
from twinfeed.loaders.reading.reader import Reader

T = TypeVar("T")


def most_threads() -> int:
    """Return how many threads make batches where nobody says how many."""
    return min(8, _system.processors())


def ahead(feed: Feed, prefetch: int, threads: int | None) -> tuple[int, int]:
    """Return how many batches are kept ready, and how many threads make them."""
    prefetch = _checks.count("prefetch", prefetch, minimum=0)
    if threads is None:
        decoding = feed.decode is not None or feed.transform is not None
        threads = most_threads() if prefetch and decoding else 0
    threads = _checks.count("threads", threads, minimum=0)
    # A transform that sets global states leaves all to the calling thread.
    return (0, 0) if feed.alone else (prefetch, threads)


def making(
    feed: Feed,
    reader: Reader,
    epoch: int,
    start: int,
    /,
    *,
    threads: int,
    meter: Meter,
    then: Callable[[Batch], T],
    empty: Empty = aligned,
) -> Generator[T, None, None]:
    """Yield `then(batch)` of each batch of the rest of an epoch, in order."""
    # Each thread makes whole batches, unless these come in turn from a cache of decoded images.
    shared, whole = (0, threads) if feed.sampler.live is None else (threads, 0)
    with Batcher(feed, reader=reader, threads=shared, meter=meter, empty=empty) as batcher:
        batcher.look_ahead(feed, epoch, start)
        coming = feed.requests(epoch, start)
        with closing(in_order(lambda one: then(batcher(one)), coming, threads=whole)) as made:
            yield from made
