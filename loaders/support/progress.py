"""A progress bar, if tqdm is installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def progress_bar(
    items: Iterable[T], description: str, unit: str, /, shown: bool, total: int | None = None
) -> Iterator[T]:
    """Iterate over `items`, with a bar on standard error if `shown` and tqdm is installed."""
    if shown:
        with suppress(ImportError):
            from tqdm import tqdm

            items = tqdm(items, desc=description, unit=unit, total=total)
    return iter(items)
