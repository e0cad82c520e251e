"""Recent results of a function, for the neighbouring steps that use them too."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Keep the last `size` results made; a copy in another process begins empty."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: dict[Hashable, T] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of this key, which is made where none is kept."""
        kept = self._kept  # replaced, never changed: safe to read from several threads
        if key not in kept:
            newest = list(kept.items())[max(0, len(kept) - self._size + 1) :]
            kept = self._kept = {**dict(newest), key: make()}
        return kept[key]

    def __reduce__(self) -> tuple[type[Recent[T]], tuple[int]]:
        """Pickle without the results."""
        return type(self), (self._size,)
