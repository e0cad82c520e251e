"""From (epoch, step) to a batch of tensors: what both engines do at their end."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from twinfeed.loaders.feed import Feed
from twinfeed.loaders.request import Request, request_of
from twinfeed.loaders.tensorflow.errors import remembered
from twinfeed.loaders.tensorflow.layout import Layout
from twinfeed.samplers import BatchStream

Int64s = npt.NDArray[np.int64]

# Steps drawn in one vectorised call, and such chunks kept: every parallel call may be in another.
_CHUNK, _KEPT = 32, 8

# Bytes of a record from which on two calls at once read faster than one.
_LONG = 1 << 15


class Drawn:
    """Remember the steps of a sampler drawn last: many at once cost hardly more than one.

    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> Drawn(ExactOnceBatchSampler(5, batch_size=4)).batch(0, 1)
    array([4])
    """

    def __init__(self, sampler: BatchStream, /) -> None:
        self.sampler = sampler
        self._chunks: OrderedDict[tuple[int, int], list[Int64s]] = OrderedDict()
        self._lock = threading.Lock()

    def batch(self, epoch: int, step: int) -> Int64s:
        """Return what the sampler's `batch` does."""
        number, place = divmod(step, _CHUNK)
        with self._lock:
            chunk = self._chunks.get((epoch, number))
            if chunk is None:
                first = number * _CHUNK
                last = min(first + _CHUNK, len(self.sampler))
                chunk = self._chunks[epoch, number] = self.sampler.batches(epoch, first, last)
                if len(self._chunks) > _KEPT:
                    self._chunks.popitem(last=False)
        return chunk[place]


def _long(feed: Feed) -> bool:
    """Whether reading a record takes longer than handing the interpreter lock from call to call."""
    index = feed.index
    stored = int(index.shards["bytes"].sum())
    return index.container == "files" or stored >= _LONG * len(index)


class Server:
    """Serve the batches of one sampler, or of several ranks in turn, as tensors.

    A *place* is the number of a batch in its epoch, ranks counted: `step * ranks + rank`.
    """

    def __init__(self, feed: Feed, ranks: Sequence[BatchStream], threads: int) -> None:
        self.feed = feed
        self.ranks = [Drawn(rank) for rank in ranks]
        self.steps = len(ranks[0])
        sizes = {rank.constant_size for rank in ranks}
        self.layout = Layout(feed, sizes.pop() if len(sizes) == 1 else None)
        # A reuse sampler's cache takes the batches in their order: the threads share each one.
        cached = feed.cache is not None
        feed.calls.threads, whole = (threads, 1) if cached else (0, threads)
        self.threads = threads
        self.parallel = whole if feed.decode or feed.transform or _long(feed) else 1

    @property
    def places(self) -> int:
        """The number of places of an epoch."""
        return self.steps * len(self.ranks)

    def fetch(
        self, epoch: tf.Tensor, place: tf.Tensor, ids: tf.Tensor | None = None
    ) -> dict[str, Any]:
        """Give the batch at a place of an epoch, in the graph; `ids`, where they were drawn."""
        inputs = [epoch, place] if ids is None else [epoch, place, ids]
        return self.layout.restore(tf.numpy_function(self._read, inputs, self.layout.dtypes))

    def request(self, epoch: int, place: int, ids: Int64s | None = None) -> Request:
        """Make the request of a place."""
        step, rank = divmod(place, len(self.ranks))
        drawn = self.ranks[rank]
        ids = drawn.batch(epoch, step) if ids is None else ids
        return request_of(drawn.sampler, ids, epoch=epoch, step=step)

    @remembered
    def _read(
        self, epoch: np.int64, place: np.int64, ids: Int64s | None = None
    ) -> list[npt.NDArray[Any]]:
        return self.layout.flatten(self.feed(self.request(int(epoch), int(place), ids)))
