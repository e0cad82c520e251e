"""A cache of the last results of a function, for neighbouring steps, which use the same tables."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class FifoCache(Generic[T]):
    """Cache of the last `size` results; the oldest is evicted first. Thread-safe.

    A copy in another process starts empty.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._results: dict[Hashable, T] = {}

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the cached result of this key, or compute and cache it."""
        # Thread-safe without a lock, since the dict is replaced by a new one, and never changed.
        results = self._results
        if key not in results:
            newest = list(results.items())[max(0, len(results) - self._size + 1) :]
            results = self._results = {**dict(newest), key: compute()}
        return results[key]

    def __reduce__(self) -> tuple[type[FifoCache[T]], tuple[int]]:
        """Pickle without the results."""
        return type(self), (self._size,)
