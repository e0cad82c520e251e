"""A progress bar if it is wanted and tqdm is installed; nothing otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def progress_bar(
    items: Iterable[T], doing: str, unit: str, /, shown: bool, total: int | None = None
) -> Iterator[T]:
    """Yield `items`, with a bar on standard error if `shown` and tqdm is there."""
    if shown:
        with suppress(ImportError):
            from tqdm import tqdm

            items = tqdm(items, desc=doing, unit=unit, total=total)
    return iter(items)
