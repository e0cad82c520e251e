"""A cache of decoded images for a sampler that reuses images, decoded ahead of their batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from threading import Lock
from typing import Any

import numpy as np

from twinfeed.loaders.reading.prefetch.schedule import Request
from twinfeed.loaders.support.array_types import Int64s

Fields = Mapping[str, Any]
"""The fields of a sample by name."""

Decode = Callable[[Int64s], Sequence[Fields]]
"""A function from record ids to their decoded samples."""

# The largest number of coming requests that one call of `get` takes from its iterator.
_MAX_SEARCHED = 64


class DecodedCache:
    """Decode each image once, cache it for its `reuse` uses, and drop it after the last use.

    The view of a sample is the number of its use: 0 is the first use, `reuse` - 1 the last. Batches
    are requested in order. A request out of order empties the cache, since the last use of its
    images may never come. `decodes` is the number of decoded images, and `peak` the largest number
    of images in the cache.
    """

    def __init__(self, reuse: int, decode: Decode, /) -> None:
        self.decodes = 0
        self.peak = 0
        self._decode = decode
        self._last_use = reuse - 1
        self._images: dict[int, Fields] = {}  # by record id
        self._next_position: tuple[int, int] | None = None  # (epoch, step) of the next batch
        self._lock = Lock()
        # After `start_decoding`, a pool of threads decodes images of coming requests. The images
        # that a request will add to the cache are one task of the pool.
        self._pool: ThreadPoolExecutor | None = None
        self._min_pending = 0
        self._coming_requests: Iterator[Request] = iter(())
        # The record ids that will be in the cache after the last request that was taken from
        # `_coming_requests`.
        self._future_records: set[int] = set()
        # The record ids of each task and its result, until `get` takes the images.
        self._pending: deque[tuple[list[int], Future[Sequence[Fields]]]] = deque()

    def __len__(self) -> int:
        return len(self._images)

    def __reduce__(self) -> tuple[type[DecodedCache], tuple[int, Decode]]:
        """Pickle without the images and the threads."""
        return DecodedCache, (self._last_use + 1, self._decode)

    def start_decoding(self, requests: Iterator[Request], /, *, threads: int) -> None:
        """Decode the images of coming requests on threads, before `get` is called for them."""
        self._coming_requests, self._min_pending = requests, threads
        self._pool = ThreadPoolExecutor(threads, "twinfeed-ahead")
        self._submit_new_images(self._pool)

    def get(self, request: Request, /) -> list[Fields]:
        """Return the decoded image of each record of a request."""
        with self._lock:
            # After a request out of order, the last use of the cached images may never come. (If
            # images are decoded ahead, all requests are in order, so none of those is lost.)
            if (request.epoch, request.step) != self._next_position:
                self._images.clear()
            self._next_position = (request.epoch, request.step + 1)
            records = request.records.tolist()
            new = [record for record in records if record not in self._images]
            images: Sequence[Fields] = ()
            if new and self._pool is not None:
                # `_submit_new_images` has found the same new images, and submitted them as a task.
                submitted, future = self._pending.popleft()
                assert submitted == new
                images = future.result()
            elif new:
                images = self._decode(np.array(new))
            self._images.update(zip(new, images, strict=True))
            self.decodes += len(new)
            # Images that threads decode ahead take memory too, so they count for the peak.
            num_pending = 0 if self._pool is None else self._submit_new_images(self._pool)
            self.peak = max(self.peak, len(self._images) + num_pending)
            batch = [self._images[record] for record in records]
            for record in self._records_of_last_use(request):
                del self._images[record]
            return batch

    def _submit_new_images(self, pool: ThreadPoolExecutor) -> int:
        """Have `pool` decode the images that coming requests will add to the cache, which
        `_future_records` predicts, until `_min_pending` images are pending; return how many are. An
        image is decoded once.
        """
        num_pending = sum(len(records) for records, _ in self._pending)
        if num_pending >= self._min_pending:
            return num_pending
        for request in islice(self._coming_requests, _MAX_SEARCHED):
            if not request.step:  # the cache is empty at the start of an epoch
                self._future_records.clear()
            records = request.records.tolist()
            new = [record for record in records if record not in self._future_records]
            # Change the predicted cache as `get` will change the cache at this request.
            self._future_records.update(new)
            self._future_records.difference_update(self._records_of_last_use(request))
            if new:
                self._pending.append((new, pool.submit(self._decode, np.array(new))))
                num_pending += len(new)
                if num_pending >= self._min_pending:
                    break
        return num_pending

    def _records_of_last_use(self, request: Request) -> list[int]:
        """Return the record ids whose image is used for the last time by this request."""
        return request.records[request.views == self._last_use].tolist()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Finish the images that threads are decoding, end the threads, and drop all images."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        with self._lock:
            self._images.clear()
