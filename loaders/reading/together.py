"""Read several records in one call, or one by one after an error, to tell which of them fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, TypeVar

from twinfeed.loaders.errors import LoaderError

T = TypeVar("T")


def read_together(
    read: Callable[[Any], Iterable[T]],
    items: Any,
    failed: Callable[[Any, Exception], T],
    errors: tuple[type[Exception], ...] = (LoaderError, OSError),
) -> Iterable[T]:
    """Return `read(items)`. After an error, read each item by itself, when its result is needed,
    and take `failed(item, error)`, which may raise, as the result of one that fails again.

    `items` is a sequence or an array.

    >>> def read(numbers):
    ...     return [6 // number for number in numbers]
    >>> list(read_together(read, [3, 0, 2], lambda item, error: -1, (ZeroDivisionError,)))
    [2, -1, 3]
    """
    try:
        return read(items)
    except errors as error:
        if len(items) == 1:
            return [failed(items[0], error)]
    parts = (items[n : n + 1] for n in range(len(items)))
    return chain.from_iterable(read_together(read, part, failed, errors) for part in parts)
