"""Sizes of the parts in which a stream is drawn: small at first, and large later on."""

from __future__ import annotations

from collections.abc import Iterator

MAX_IDS = 1 << 15
"""The most ids that are drawn in one call."""


def steps_per_draw(batch_size: int, /) -> int:
    """Return how many steps are drawn in one call: as many as have `MAX_IDS` ids, at least one.

    >>> steps_per_draw(256)
    128
    """
    return max(1, MAX_IDS // max(1, batch_size))


def growing_ranges(start: int, stop: int, max_size: int, /) -> Iterator[tuple[int, int]]:
    """Yield ranges of steps that grow up to `max_size` steps, so that the first batch comes soon.

    >>> list(growing_ranges(0, 10, 4))
    [(0, 1), (1, 3), (3, 7), (7, 10)]
    """
    size = 1
    while start < stop:
        yield start, min(start + size, stop)
        start, size = start + size, min(2 * size, max_size)
