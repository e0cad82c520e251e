"""From (epoch, step) to arrays for the graph, for all engines."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from twinfeed.loaders import _system
from twinfeed.loaders._batcher import Batcher
from twinfeed.loaders._checks import Array, Int64s
from twinfeed.loaders._making import most_threads
from twinfeed.loaders.collate import mode_of
from twinfeed.loaders.errors import REBUILD, DataCorruptionError
from twinfeed.loaders.feed import Feed
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.request import Request
from twinfeed.loaders.tensorflow._calls import called
from twinfeed.loaders.tensorflow._layout import Layout
from twinfeed.samplers import BatchStream

if TYPE_CHECKING:
    from twinfeed.loaders.tensorflow.loader import TensorFlowLoader

# Steps that are drawn in one call, and how many of these chunks are kept. Each thread may be in
# another chunk.
_CHUNK, _KEPT = 32, 8

# The most batches of one call, a power of two, and about the most bytes of one call.
_MOST_TOGETHER, _TOGETHER = 16, 6 << 20

# From this number of bytes per record on, two calls at once read faster than one.
_LONG = 1 << 15


class Drawn:
    """Keep the steps drawn last. Many are drawn together, which costs hardly more than one."""

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


class Server:
    """Serve the batches of one feed, or of several ranks in turn.

    A *place* is the number of a batch in its epoch: `step * ranks + rank`. Each pass has a number,
    and batchers of its own. The batchers end with the pass.
    """

    def __init__(self, loader: TensorFlowLoader, feeds: Sequence[Feed], reader: Reader) -> None:
        self.loader = loader
        self.feeds = feeds
        self.feed = feeds[0]
        self.reader = reader
        self.ranks = [Drawn(feed.sampler) for feed in feeds]
        self.steps = len(self.feed)
        self.places = self.steps * len(feeds)
        sizes = {feed.sampler.constant_size for feed in feeds}
        self.layout = Layout(self.feed, sizes.pop() if len(sizes) == 1 else None, reader)
        self.threads = loader.threads if loader.threads is not None else most_threads()
        # A cache of decoded images takes batches in their order. So threads share each batch.
        self._shared = 0 if self.feed.sampler.live is None else self.threads
        alone = self._shared or (loader.threads is None and not _worth_threads(self.feed))
        self.parallel = 1 if alone else max(1, self.threads)
        self.together = self._batches_a_call()
        self._passes: dict[int, list[Batcher]] = {}
        self._failed: dict[int, dict[int, Exception]] = {}  # of passes, by step
        self._numbers = count()

    def _batches_a_call(self) -> int:
        """Return the most batches that one call into Python gives: several if records are short.

        The batches of a call must fit into rows of one array for each field.
        """
        feed = self.feed
        if not self.loader.prefetch or feed.decode or feed.transform or self._shared:
            return 1
        shaped = [name for name, field in feed.spec.items() if field.shape]
        stacked = all(mode_of(feed.collate, name) == "stack" for name in shaped)
        if len(self.ranks) > 1 or not stacked or any(0 in one.shape for one in self.layout.flat):
            return 1
        fits = int(_TOGETHER / max(1, _stored(feed) * feed.sampler.batch_size))
        return 1 << max(1, min(_MOST_TOGETHER, fits)).bit_length() - 1

    def passes(self) -> Iterator[Int64s]:
        """Begin a pass, and yield int64[5]: its number, epoch, first step, turn, number of calls.

        The calls are those of `read_together`. TensorFlow closes the generator when the iterator of
        the pass has ended or is given up. This ends the pass.
        """
        epoch, start, turn = self.loader._pass_begins()
        number, meter = next(self._numbers), self.loader._meter
        batchers = [
            Batcher(one, reader=self.reader, threads=self._shared, meter=meter)
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
            # An error that stayed here would hold a loop's variables, and the pass with them.
            raise self._failed[int(begun[0])].pop(-1 - int(place))
        self.loader._pass_delivered(int(begun[1]), int(begun[3]))
        return True

    @staticmethod
    def mapped(
        dataset: tf.data.Dataset, function: Callable[..., Any], parallel: int
    ) -> tf.data.Dataset:
        """Map in order, `parallel` elements at once; with 1, no element is made ahead."""
        if parallel < 2:
            return dataset.map(function)
        return dataset.map(function, num_parallel_calls=parallel, deterministic=True)

    def whole(self, taken: tf.Tensor) -> tf.Tensor:
        """Return what `choose_from_datasets` gave for a step; raise where a source has ended."""
        ended = tf.equal(tf.size(taken), 0)
        fine = tf.cond(ended, lambda: called(self.ended_early, [], tf.bool), lambda: True)
        with tf.control_dependencies([fine]):
            return tf.identity(taken)

    def ended_early(self) -> None:
        """Raise: a source of `choose_from_datasets` has fewer records than were chosen."""
        raise DataCorruptionError(
            "a shard ended before the records that the index says it holds",
            advice=f"copy the shard again, or {REBUILD}",
        )

    def fetch(self, begun: tf.Tensor, place: tf.Tensor, ids: tf.Tensor | None = None) -> Any:
        """Give the batch at a place of a pass, in the graph; `ids`, if they are drawn already."""
        inputs = [begun, place] if ids is None else [begun, place, ids]
        return self.layout.restore(called(self.read, inputs, self.layout.dtypes))

    def read(self, begun: Int64s, place: np.int64, ids: Int64s | None = None) -> list[Array]:
        """Read the batch of a place."""
        request = self.request(begun, int(place), ids)
        return self.layout.flatten(self.batcher(begun, int(place))(request))

    def batcher(self, begun: Int64s, place: int) -> Batcher:
        """Return the batcher of a place's rank."""
        return self._passes[int(begun[0])][place % len(self.ranks)]

    def request(self, begun: Int64s, place: int, ids: Int64s | None = None) -> Request:
        """Make the request of a place."""
        step, rank = divmod(place, len(self.ranks))
        drawn, epoch = self.ranks[rank], int(begun[1])
        ids = drawn.batch(epoch, step) if ids is None else ids
        return Request.of(drawn.sampler, epoch, step, ids, seeds=self.feed.seeded)

    def calls(self, batches: int) -> int:
        """Return how many calls give this number of batches."""
        if batches < self.together:
            return batches.bit_length()
        return self.together.bit_length() - 1 + batches // self.together

    def _before(self, call: int) -> int:
        """Return the batches before a call. Calls give 1, 2, 4, … and then `together` each."""
        growing = self.together.bit_length() - 1
        return (1 << min(call, growing)) - 1 + max(0, call - growing) * self.together

    def read_together(self, begun: Int64s, call: np.int64) -> list[Array]:
        """Read the batches of one call: `begun`, place, size and arrays, each [batches, …].

        Where a batch cannot be read, the batches before it are given, and after them a row with the
        place -1 - step, for which `delivered` raises.
        """
        start = int(begun[2])
        first = start + self._before(int(call))
        stop = min(start + self._before(int(call) + 1), self.places)
        drawn = [self.ranks[0].batch(int(begun[1]), step) for step in range(first, stop)]
        places = np.arange(first, stop)
        try:
            arrays = self._rows(begun, first, drawn)
        except Exception:
            good = self._readable(begun, first, drawn)
            if good == len(drawn):
                raise
            drawn, places = [*drawn[:good], drawn[0]], np.append(places[:good], -1 - first - good)
            arrays = self._rows(begun, first, drawn)  # raises where the first cannot be read
        sizes = np.array([len(ids) for ids in drawn])
        return [np.tile(begun, (len(places), 1)), places, sizes, *arrays]

    def _rows(self, begun: Int64s, first: int, drawn: list[Int64s]) -> list[Array]:
        """Read batches by one request, and lay each out in a row."""
        sampler, ids = self.feed.sampler, np.concatenate(drawn)
        records, views = sampler.records(ids), sampler.views(ids)
        request = Request(int(begun[1]), first, ids, records, views, None)
        flat = self.layout.flatten(self.batcher(begun, first)(request))
        sizes = np.array([len(one) for one in drawn])
        if self.layout.batch is not None:
            return [part.reshape(len(sizes), sizes[0], *part.shape[1:]) for part in flat]
        width = max(1, sizes.max())  # TensorFlow crashes when it cuts rows of width 0
        held = np.arange(width) < sizes[:, None]
        return [spread(part, held) for part in flat]

    def _readable(self, begun: Int64s, first: int, drawn: list[Int64s]) -> int:
        """Return how many batches can be read, and keep the error of the next one."""
        good = 0
        try:
            for good, ids in enumerate(drawn):
                self._rows(begun, first + good, [ids])
        except Exception as error:
            self._failed.setdefault(int(begun[0]), {})[first + good] = error
            return good
        return len(drawn)


def spread(part: Array, held: npt.NDArray[np.bool_]) -> Array:
    """Lay rows out step by step, with zeros or empty strings where a step has fewer rows."""
    nothing = b"" if part.dtype == object else 0
    out = np.full((*held.shape, *part.shape[1:]), nothing, part.dtype)
    out[held] = part
    return out


def _stored(feed: Feed) -> float:
    """Return the bytes that a record takes in the shards."""
    return int(feed.index.shards["bytes"].sum()) / max(1, len(feed.index))


def _worth_threads(feed: Feed) -> bool:
    """Whether making a batch takes longer than handing the interpreter lock over."""
    if feed.decode is not None or feed.transform is not None:
        return True
    return feed.index.container == "files" or _stored(feed) >= _LONG
