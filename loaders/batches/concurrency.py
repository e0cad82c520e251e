"""The number of batches that are made ahead of the loop, and of threads that make them."""

from __future__ import annotations

from twinfeed.loaders.batches.feed import Feed
from twinfeed.loaders.support import system
from twinfeed.samplers import validate

PREFETCH = 2
_MAX_DEFAULT_THREADS = 8


def default_threads() -> int:
    """Return the default number of threads that make batches."""
    return min(_MAX_DEFAULT_THREADS, system.processors())


def resolve_prefetch(feed: Feed, prefetch: int | None, threads: int | None) -> tuple[int, int]:
    """Return the number of batches that are kept ready, and the number of threads that make them.

    `prefetch` and `threads` are the user's arguments, where None is the default.
    """
    in_memory = getattr(feed.index, "in_memory", False)
    if prefetch is None:  # to hand a batch to another thread takes longer than to slice arrays
        prefetch = 0 if in_memory and not feed.has_functions else PREFETCH
    prefetch = validate.integer("prefetch", prefetch, minimum=0)
    if threads is None:
        threads = default_threads() if prefetch and feed.has_functions else 0
    threads = validate.integer("threads", threads, minimum=0)
    # With a transform that sets global states, everything runs in the calling thread.
    return (0, 0) if feed.sets_global_state else (prefetch, threads)
