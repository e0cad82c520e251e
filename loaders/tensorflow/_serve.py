"""From (epoch, step) to a batch of tensors: what both engines do at their end."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from twinfeed.loaders import _system
from twinfeed.loaders._batcher import Batcher
from twinfeed.loaders._checks import Int64s
from twinfeed.loaders._making import most_threads
from twinfeed.loaders._meter import Meter
from twinfeed.loaders.collate import mode_of
from twinfeed.loaders.errors import REBUILD, DataCorruptionError
from twinfeed.loaders.feed import Feed
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.request import Request
from twinfeed.loaders.tensorflow._calls import called
from twinfeed.loaders.tensorflow._layout import Layout
from twinfeed.samplers import BatchStream

# Steps drawn in one vectorised call, and such chunks kept: every parallel call may be in another.
_CHUNK, _KEPT = 32, 8

# Batches that one call gives at most, a power of two, and about how many bytes.
_MOST_TOGETHER, _TOGETHER = 16, 6 << 20

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


class Place(Protocol):
    """Know where the passes over a dataset begin, and hear when one was delivered."""

    feed: Feed
    prefetch: int
    threads: int | None
    meter: Meter

    def pass_begins(self) -> tuple[int, int, int]:
        """Return the epoch and the step at which a pass begins, and the turn it belongs to."""

    def pass_delivered(self, epoch: int, turn: int, /) -> None:
        """Note that the last batch of an epoch has reached the consumer."""


class Server:
    """Serve the batches of one feed, or of several ranks in turn, as tensors.

    A *place* is the number of a batch in its epoch, ranks counted: `step * ranks + rank`. Each
    pass has a number, and batchers of its own, which end when the pass does.
    """

    def __init__(self, loader: Place, feeds: Sequence[Feed], reader: Reader) -> None:
        self.loader = loader
        self.feeds = feeds
        self.feed = feeds[0]
        self.reader = reader
        self.ranks = [Drawn(feed.sampler) for feed in feeds]
        self.steps = len(self.feed)
        sizes = {feed.sampler.constant_size for feed in feeds}
        self.layout = Layout(self.feed, sizes.pop() if len(sizes) == 1 else None, reader)
        self.threads = loader.threads if loader.threads is not None else most_threads()
        # A reuse sampler's cache takes the batches in their order: the threads share each one.
        self._shared = 0 if self.feed.sampler.live is None else self.threads
        alone = self._shared or (loader.threads is None and not _worth_threads(self.feed))
        self.parallel = 1 if alone else max(1, self.threads)
        self.together = self._batches_a_call()
        self._passes: dict[int, list[Batcher]] = {}
        self._failed: dict[int, Exception] = {}
        self._numbers = count()

    def _batches_a_call(self) -> int:
        """Return how many batches a call into Python may give: more than one where it pays."""
        feed, stored = self.feed, int(self.feed.index.shards["bytes"].sum())
        if not self.loader.prefetch or feed.decode or feed.transform or self._shared:
            return 1
        if len(self.ranks) > 1:
            return 1
        shaped = [name for name, field in feed.spec.items() if field.shape]
        stacked = all(mode_of(feed.collate, name) == "stack" for name in shaped)
        if not stacked or any(0 in spec.shape for spec in self.layout.flat):
            return 1
        batch = max(1, stored * feed.sampler.batch_size // len(feed.index))
        fits = min(_MOST_TOGETHER, max(1, _TOGETHER // batch))
        return 1 << fits.bit_length() - 1

    @property
    def places(self) -> int:
        """The number of places of an epoch."""
        return self.steps * len(self.ranks)

    def passes(self) -> Iterator[Int64s]:
        """Begin a pass: yield its number, epoch, first step, turn and calls; end the pass after.

        What is yielded is int64[5]; the calls are those of `read_together`.

        The generator is closed when the iterator of the pass has ended or is given up.
        """
        epoch, start, turn = self.loader.pass_begins()
        number = next(self._numbers)
        batchers = [
            Batcher(one, reader=self.reader, threads=self._shared, meter=self.loader.meter)
            for one in self.feeds
        ]
        self._passes[number] = batchers
        try:
            for one, batcher in zip(self.feeds, batchers, strict=True):
                batcher.look_ahead(one, epoch, start)
            _system.keep_freed_memory()
            yield np.array([number, epoch, start, turn, self.calls(self.steps - start)])
        finally:
            del self._passes[number]
            self._failed.pop(number, None)
            for batcher in batchers:
                batcher.close()

    def delivered(self, begun: Int64s, place: np.int64) -> bool:
        """Note that the last batch of a pass has left the pipeline, or raise what failed there."""
        if place < 0:
            raise self._failed[int(begun[0])]
        self.loader.pass_delivered(int(begun[1]), int(begun[3]))
        return True

    @staticmethod
    def mapped(
        dataset: tf.data.Dataset, function: Callable[..., Any], parallel: int
    ) -> tf.data.Dataset:
        """Map in order, at work on `parallel` elements at once; with one, on none ahead."""
        if parallel < 2:
            return dataset.map(function)
        return dataset.map(function, num_parallel_calls=parallel, deterministic=True)

    def whole(self, taken: tf.Tensor) -> tf.Tensor:
        """Return what `choose_from_datasets` gave for a step, where it did not end before."""
        ended = tf.equal(tf.size(taken), 0)
        fine = tf.cond(ended, lambda: called(self.ended_early, [], tf.bool), lambda: True)
        with tf.control_dependencies([fine]):
            return tf.identity(taken)

    def ended_early(self) -> None:
        """Raise, where a source of `choose_from_datasets` has fewer records than were chosen."""
        raise DataCorruptionError(
            "a shard ended before the records that the index says it holds",
            advice=f"copy the shard again, or {REBUILD}",
        )

    def fetch(self, begun: tf.Tensor, place: tf.Tensor, ids: tf.Tensor | None = None) -> Any:
        """Give the batch at a place of a pass, in the graph; `ids`, where they were drawn."""
        inputs = [begun, place] if ids is None else [begun, place, ids]
        return self.layout.restore(called(self.read, inputs, self.layout.dtypes))

    def batcher(self, begun: Int64s, place: int) -> Batcher:
        """Return the batcher of a place's rank."""
        return self._passes[int(begun[0])][place % len(self.ranks)]

    def request(self, begun: Int64s, place: int, ids: Int64s | None = None) -> Request:
        """Make the request of a place."""
        step, rank = divmod(place, len(self.ranks))
        drawn, epoch = self.ranks[rank], int(begun[1])
        ids = drawn.batch(epoch, step) if ids is None else ids
        return Request.of(drawn.sampler, epoch, step, ids, seeds=self.feed.seeded)

    def read(
        self, begun: Int64s, place: np.int64, ids: Int64s | None = None
    ) -> list[npt.NDArray[Any]]:
        """Read the batch of a place."""
        batcher = self.batcher(begun, int(place))
        return self.layout.flatten(batcher(self.request(begun, int(place), ids)))

    def calls(self, batches: int) -> int:
        """Return how many calls give this number of batches: 1, 2, 4, … and `together` each."""
        if batches < self.together:
            return batches.bit_length()
        return self.together.bit_length() + (batches - self.together) // self.together

    def read_together(self, begun: Int64s, call: np.int64) -> list[npt.NDArray[Any]]:
        """Read the batches of one call: of each `begun`, place, size, and its arrays: [batches, …].

        A place of -1 stands for a batch that cannot be read, and ends them.
        """
        most, number = self.together, int(call)
        growing = most.bit_length() - 1
        before = 2**number - 1 if number < growing else most - 1 + (number - growing) * most
        first = int(begun[2]) + before
        stop = min(first + (2**number if number < growing else most), self.places)
        drawn = [self.ranks[0].batch(int(begun[1]), step) for step in range(first, stop)]
        places = np.arange(first, stop)
        try:
            arrays = self._rows(begun, first, drawn)
        except Exception:
            if len(drawn) == 1:
                raise
            arrays, places = self._readable(begun, first, drawn)
        sizes = np.array([len(ids) for ids in drawn[: len(places)]])
        return [np.tile(begun, (len(places), 1)), places, sizes, *arrays]

    def _rows(self, begun: Int64s, first: int, drawn: list[Int64s]) -> list[npt.NDArray[Any]]:
        """Read batches by one request, and lay each out in a row."""
        sampler, epoch = self.feed.sampler, int(begun[1])
        ids = np.concatenate(drawn)
        request = Request(epoch, first, ids, sampler.records(ids), sampler.views(ids), None)
        flat = self.layout.flatten(self.batcher(begun, first)(request))
        sizes = np.array([len(one) for one in drawn])
        if self.layout.batch is not None:
            return [part.reshape(len(sizes), sizes[0], *part.shape[1:]) for part in flat]
        width = max(1, sizes.max())  # TensorFlow cannot cut rows of nothing: it crashes
        held = np.arange(width) < sizes[:, None]
        return [spread(part, held) for part in flat]

    def _readable(
        self, begun: Int64s, first: int, drawn: list[Int64s]
    ) -> tuple[list[npt.NDArray[Any]], Int64s]:
        """Read batches up to one that fails, and put the first again in the place of that one."""
        places = np.arange(first, first + len(drawn))
        arrays = self._rows(begun, first, drawn[:1])
        for good in range(1, len(drawn)):
            try:
                arrays = self._rows(begun, first, drawn[: good + 1])
            except Exception as error:
                self._failed.setdefault(int(begun[0]), error)
                arrays = [np.concatenate([part, part[:1]]) for part in arrays]
                return arrays, np.append(places[:good], -1)
        return arrays, places


def spread(part: npt.NDArray[Any], held: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """Lay rows out step by step, zeros or empty strings where a step has fewer."""
    nothing = b"" if part.dtype == object else 0
    out = np.full((*held.shape, *part.shape[1:]), nothing, part.dtype)
    out[held] = part
    return out


def _worth_threads(feed: Feed) -> bool:
    """Whether a batch takes longer than handing the interpreter lock from call to call."""
    if feed.decode is not None or feed.transform is not None:
        return True
    stored = int(feed.index.shards["bytes"].sum())
    return feed.index.container == "files" or stored >= _LONG * len(feed.index)
