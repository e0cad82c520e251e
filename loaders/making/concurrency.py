"""How many batches are made ahead of the loop, and on how many threads."""

from __future__ import annotations

from twinfeed.loaders.feed.config import FeedConfig
from twinfeed.loaders.support import system
from twinfeed.samplers import validate

PREFETCH = 2


def default_threads() -> int:
    """Return how many threads make batches by default."""
    return min(8, system.processors())


def resolve_prefetch(
    feed: FeedConfig, prefetch: int | None, threads: int | None
) -> tuple[int, int]:
    """Return how many batches are kept ready, and how many threads make them."""
    in_memory = getattr(feed.index, "in_memory", False)
    if prefetch is None:  # to hand a batch over to another thread may take longer than to make it
        prefetch = 0 if in_memory and not feed.has_functions else PREFETCH
    prefetch = validate.integer("prefetch", prefetch, minimum=0)
    if threads is None:
        threads = default_threads() if prefetch and feed.has_functions else 0
    threads = validate.integer("threads", threads, minimum=0)
    # A transform that sets global states leaves all to the calling thread.
    return (0, 0) if feed.sets_global_state else (prefetch, threads)
