"""A cache of decoded images for a sampler that reuses images, decoded ahead of their batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from threading import Lock
from typing import Any

import numpy as np

from twinfeed.loaders.feed.request import Request
from twinfeed.loaders.support.array_types import Int64s

Decoded = Mapping[str, Any]
Decode = Callable[[Int64s], Sequence[Decoded]]

# For each batch, at most so many coming requests are searched for images that are not cached.
_MAX_SEARCHED = 64


class DecodedCache:
    """Decode each image once, cache it for its `reuse` uses, and drop it after the last use.

    The view of a sample is the number of the use, from 0. Batches are requested in order. A request
    out of order empties the cache, since the last use of its images may never come. `decodes` is
    the number of decoded images, and `peak` the largest number of images in the cache.
    """

    def __init__(self, reuse: int, decode: Decode, /) -> None:
        self.decodes = 0
        self.peak = 0
        self._decode = decode
        self._last_use = reuse - 1
        self._images: dict[int, Decoded] = {}
        self._next_position: tuple[int, int] | None = None
        self._lock = Lock()
        # The threads that decode ahead. A task of the pool is the new images of one request.
        self._pool: ThreadPoolExecutor | None = None
        self._threads = 0
        self._unsearched_requests: Iterator[Request] = iter(
            ()
        )  # that were not searched for new images yet
        self._future_records: set[int] = set()  # what the cache has after the searched requests
        self._pending: deque[tuple[list[int], Future[Sequence[Decoded]]]] = deque()

    def __len__(self) -> int:
        return len(self._images)

    def __reduce__(self) -> tuple[type[DecodedCache], tuple[int, Decode]]:
        """Pickle without the images and the threads."""
        return DecodedCache, (self._last_use + 1, self._decode)

    def look_ahead(self, requests: Iterator[Request], /, *, threads: int) -> None:
        """Start threads that decode the images of the coming `requests` before `get` is called.

        The first request is that of the next batch. At least `threads` images are kept pending.
        """
        self._unsearched_requests, self._threads = requests, threads
        self._pool = ThreadPoolExecutor(threads, "twinfeed-ahead")
        self._submit_new_images(self._pool)

    def get(self, request: Request, /) -> list[Decoded]:
        """Return the decoded image of each record of a request, from the cache or decoded now.

        The request has no padding. Images whose last use this is are dropped from the cache.
        """
        with self._lock:
            if (
                request.epoch,
                request.step,
            ) != self._next_position:  # out of order
                self._images.clear()
            self._next_position = (request.epoch, request.step + 1)
            records = request.records.tolist()
            new = [record for record in records if record not in self._images]
            images: Sequence[Decoded] = ()
            if new and self._pool is not None:  # a thread is decoding them, or has done so
                submitted, future = self._pending.popleft()
                assert submitted == new
                images = future.result()
            elif new:
                images = self._decode(np.array(new))
            self._images.update(zip(new, images, strict=True))
            self.decodes += len(new)
            pending = 0 if self._pool is None else self._submit_new_images(self._pool)
            self.peak = max(self.peak, len(self._images) + pending)
            batch = [self._images[record] for record in records]
            for record in self._records_of_last_use(request):
                del self._images[record]
            return batch

    def _submit_new_images(self, pool: ThreadPoolExecutor) -> int:
        """Submit the images that coming requests will add to the cache, until enough are pending.

        Returns:
            The number of images that are pending: submitted, and not yet taken by `get`.
        """
        pending = sum(len(records) for records, _ in self._pending)
        if pending >= self._threads:
            return pending
        for request in islice(self._unsearched_requests, _MAX_SEARCHED):
            real = request.where(request.ids >= 0)
            new = [record for record in real.records.tolist() if record not in self._future_records]
            self._future_records.update(new)
            self._future_records.difference_update(self._records_of_last_use(real))
            if new:
                self._pending.append((new, pool.submit(self._decode, np.array(new))))
                pending += len(new)
                if pending >= self._threads:
                    break
        return pending

    def _records_of_last_use(self, request: Request) -> list[int]:
        """Return the records whose image is used for the last time by this request."""
        return request.records[request.views == self._last_use].tolist()  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the threads, after the images that they are decoding, and drop all images."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        with self._lock:
            self._images.clear()
            self._next_position = None
