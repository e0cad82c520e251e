"""The decoded images that a reuse sampler keeps live."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

Decoded = Mapping[str, Any]


class DecodedCache:
    """Decode each image once for all its uses in a row, and drop the image after its last use.

    `reuse` is the number of uses of an image, numbered from 0 in the order they come. Batches are
    asked for in order. After a jump the cache starts afresh, so that it never holds an image that
    no later batch wants. `decodes` counts the images decoded, `peak` the most held at once.

    >>> cache = DecodedCache(2)
    >>> def decode(records): return [{"image": f"decoded {r}"} for r in records]
    >>> for step, (records, uses) in enumerate([([7, 8], [0, 0]), ([8, 7], [1, 1])]):
    ...     print(cache.get((0, step), records, uses, decode)[0])
    {'image': 'decoded 7'}
    {'image': 'decoded 8'}
    >>> cache.decodes, cache.peak, len(cache)
    (2, 2, 0)
    """

    def __init__(self, reuse: int, /) -> None:
        self.decodes = 0
        self.peak = 0
        self._last_use = reuse - 1
        self._held: dict[int, Decoded] = {}
        self._next: tuple[int, int] | None = None
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._held)

    def __reduce__(self) -> tuple[type[DecodedCache], tuple[int]]:
        """Pickle without the images."""
        return DecodedCache, (self._last_use + 1,)

    def get(
        self,
        position: tuple[int, int],
        records: Sequence[int],
        uses: Sequence[int],
        decode: Callable[[list[int]], Sequence[Decoded]],
    ) -> list[Decoded]:
        """Give the decoded `records` of the batch at `position` (epoch, step), in order."""
        with self._lock:
            if position != self._next or position[1] == 0:
                self._held.clear()
            self._next = (position[0], position[1] + 1)
            wanted = [record for record in records if record not in self._held]
            self._held.update(zip(wanted, decode(wanted), strict=True))
            self.decodes += len(wanted)
            self.peak = max(self.peak, len(self._held))
            batch = [self._held[record] for record in records]
            for record, use in zip(records, uses, strict=True):
                if use == self._last_use:
                    del self._held[record]
            return batch

    def clear(self) -> None:
        """Drop all images."""
        with self._lock:
            self._held.clear()
            self._next = None
