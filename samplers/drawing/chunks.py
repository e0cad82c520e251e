"""How much of a stream is drawn in one call: little at first, and much later on."""

from __future__ import annotations

from collections.abc import Iterator

IDS = 1 << 15
"""The most ids that are drawn in one call."""


def growing(start: int, stop: int, most: int, /) -> Iterator[tuple[int, int]]:
    """Cut steps into ranges that grow up to `most`, so that a look at one batch costs little.

    >>> list(growing(0, 10, 4))
    [(0, 1), (1, 3), (3, 7), (7, 10)]
    """
    size = 1
    while start < stop:
        yield start, min(start + size, stop)
        start, size = start + size, min(2 * size, most)
