"""The decoded images that a reuse sampler keeps live, and those that the coming batches need."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from threading import Lock
from typing import Any

from twinfeed.loaders.request import Request

Decoded = Mapping[str, Any]
Decode = Callable[[list[int]], Sequence[Decoded]]

# Requests that are looked at in one go: no batch waits until a far image is found.
_LOOKED_AT = 64


class DecodedCache:
    """Decode each image once for all its uses in a row, and drop the image after its last use.

    `reuse` is the number of uses of an image, numbered from 0 in the order they come. Batches are
    asked for in order. After a jump the cache starts afresh, so that the cache never holds an image
    that no later batch wants. `decodes` counts the images decoded, `peak` the most held at once.
    """

    def __init__(self, reuse: int, decode: Decode, /) -> None:
        self.decodes = 0
        self.peak = 0
        self._decode = decode
        self._last_use = reuse - 1
        self._held: dict[int, Decoded] = {}
        self._ahead: _Ahead | None = None
        self._next: tuple[int, int] | None = None
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._held)

    def __reduce__(self) -> tuple[type[DecodedCache], tuple[int, Decode]]:
        """Pickle without the images and the threads."""
        return DecodedCache, (self._last_use + 1, self._decode)

    def look_ahead(self, requests: Iterator[Request], /, *, threads: int) -> None:
        """Decode on threads what `requests` need; the first of these is that of the next batch.

        What is decoded ahead of its batch: `threads` images, or all that are new in one batch.
        """
        self._ahead = _Ahead(requests, self._decode, self._last_use, threads)

    def get(self, request: Request, /) -> list[Decoded]:
        """Give the decoded records of a request without padding, in order."""
        with self._lock:
            if (request.epoch, request.step) != self._next or request.step == 0:
                self._held.clear()
            self._next = (request.epoch, request.step + 1)
            records = request.records.tolist()
            wanted = [record for record in records if record not in self._held]
            made = self._decode(wanted) if self._ahead is None else self._ahead.take(wanted)
            self._held.update(zip(wanted, made, strict=True))
            self.decodes += len(wanted)
            waiting = 0 if self._ahead is None else self._ahead.look()
            self.peak = max(self.peak, len(self._held) + waiting)
            batch = [self._held[record] for record in records]
            for record, use in zip(records, request.views.tolist(), strict=True):
                if use == self._last_use:
                    del self._held[record]
            return batch

    def close(self) -> None:
        """End the threads and drop all images."""
        if self._ahead is not None:
            self._ahead.close()
        with self._lock:
            self._held.clear()
            self._next = None


class _Ahead:
    """Decode on threads the images that are new in each request, before they are taken."""

    def __init__(
        self, requests: Iterator[Request], decode: Decode, last_use: int, threads: int
    ) -> None:
        self._requests = requests
        self._decode = decode
        self._last_use = last_use
        self._threads = threads
        self._live: set[int] = set()  # after the requests that were looked at
        self._waiting: deque[tuple[list[int], Future[Sequence[Decoded]]]] = deque()
        self._pool = ThreadPoolExecutor(threads, "twinfeed-ahead")
        self.look()

    def look(self) -> int:
        """Have threads decode what comes next; return how many images wait to be taken."""
        waiting = sum(len(records) for records, _ in self._waiting)
        if waiting >= self._threads:
            return waiting
        for request in islice(self._requests, _LOOKED_AT):
            kept = request.where(request.ids >= 0)
            records, uses = kept.records.tolist(), kept.views.tolist()
            new = [record for record in records if record not in self._live]
            self._live.update(new)
            self._live.difference_update(
                record for record, use in zip(records, uses, strict=True) if use == self._last_use
            )
            if new:
                self._waiting.append((new, self._pool.submit(self._decode, new)))
                waiting += len(new)
                if waiting >= self._threads:
                    break
        return waiting

    def take(self, wanted: list[int]) -> Sequence[Decoded]:
        """Wait for the images that are new in the next request; an error of theirs is raised."""
        if not wanted:
            return ()
        records, decoded = self._waiting.popleft()
        assert records == wanted
        return decoded.result()

    def close(self) -> None:
        """End the threads, once they have finished what they are at."""
        self._pool.shutdown(cancel_futures=True)
