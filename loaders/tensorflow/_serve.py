"""From (epoch, step) to arrays for the graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from twinfeed.loaders.feed.collate import mode_of
from twinfeed.loaders.feed.request import Request
from twinfeed.loaders.index import Index
from twinfeed.loaders.loop.feed_loader import FeedLoader
from twinfeed.loaders.making.batcher import Batcher
from twinfeed.loaders.making.concurrency import default_threads
from twinfeed.loaders.making.feed import Feed, compile_feed
from twinfeed.loaders.support import system
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.loaders.tensorflow._callbacks import called
from twinfeed.loaders.tensorflow._layout import Layout
from twinfeed.loaders.tensorflow._passes import START, PassServer, PassState
from twinfeed.samplers.drawing.chunks import growing_ranges

# The most batches of one call, a power of two, and about the most bytes of one call.
_MOST_TOGETHER, _TOGETHER = 16, 6 << 20

# From this number of bytes per record on, two calls at once read faster than one call.
_LONG = 1 << 15


class Server(PassServer):
    """Serve the batches of one feed, or of several ranks in turn.

    Each pass has batchers of its own. The batchers end with the pass.
    """

    def __init__(
        self,
        loader: FeedLoader[Any],
        feeds: Sequence[Feed],
        *,
        prefetch: int,
        threads: int | None,
        by_rank: bool = False,
    ) -> None:
        super().__init__(loader, feeds[0].sampler, ranks=len(feeds), by_rank=by_rank)
        self.prefetch, self._readahead = prefetch, loader.readahead
        self.feed, self.feeds, self.reader = feeds[0], feeds, loader.reader
        self.schedules = [loader.schedules[feed.sampler] for feed in feeds]
        sizes = {feed.sampler.fixed_size for feed in feeds}
        self.layout = Layout(self.feed, sizes.pop() if len(sizes) == 1 else None, self.reader)
        self.threads = threads if threads is not None else default_threads()
        # A cache of decoded images takes batches in their order. So threads share each batch.
        self._shared = 0 if self.feed.sampler.traits.max_cached is None else self.threads
        alone = self._shared or (threads is None and not _worth_threads(self.feed))
        self.parallel = 1 if alone else max(1, self.threads)
        self.together = self._batches_a_call()
        # Of each pass, its batchers, and the steps of each call of `read_together`.
        self._passes: dict[int, tuple[list[Batcher], list[tuple[int, int]]]] = {}
        self._failed: dict[int, dict[int, Exception]] = {}  # errors by pass and step

    def _batches_a_call(self) -> int:
        """Return the most batches that one call into Python gives: several if records are short.

        The batches of a call must fit into rows of one array for each field.
        """
        feed = self.feed
        if not self.prefetch or feed.has_functions or self._shared:
            return 1
        shaped = [name for name, field in feed.spec.items() if field.shape]
        stacked = all(mode_of(feed.collate, name) == "stack" for name in shaped)
        if self.ranks > 1 or not stacked or any(0 in one.shape for one in self.layout.flat):
            return 1
        fits = int(_TOGETHER / max(1, _stored(feed) * feed.sampler.batch_size))
        return 1 << max(1, min(_MOST_TOGETHER, fits)).bit_length() - 1

    def delivered(self, pass_state: Int64s, place: np.int64) -> bool:
        """Note that the last batch of a pass was delivered, or raise the error of the pipeline."""
        if place < 0:
            # An error that stayed here would hold a loop's variables, and the pass with them.
            raise self._failed[PassState.of(pass_state).number].pop(-1 - int(place))
        return super().delivered(pass_state, place)

    @contextmanager
    def _serving(self, number: int, epoch: int, start: int) -> Iterator[int]:
        """Make the batchers of a pass; yield the number of calls of `read_together`."""
        batchers = [
            Batcher(compile_feed(one), reader=self.reader, threads=self._shared, meter=self.meter)
            for one in self.feeds
        ]
        self._passes[number] = batchers, (calls := self.calls(start))
        try:
            for schedule, batcher in zip(self.schedules, batchers, strict=True):
                batcher.start_pass(schedule, epoch, start, readahead=self._readahead)
            system.keep_freed_memory()
            yield len(calls)
        finally:
            del self._passes[number]
            self._failed.pop(number, None)
            for batcher in batchers:
                batcher.close()

    def epoch(self, pass_state: tf.Tensor) -> tf.data.Dataset:
        """Make the dataset of (place, batch) of a pass; `parallel` batches are read at once."""
        places = tf.data.Dataset.range(pass_state[START] * self.ranks, self.places)

        def fetch(place: tf.Tensor) -> tuple[tf.Tensor, Any]:
            flat = called(self.read, [pass_state, place], self.layout.dtypes)
            return place, self.layout.restore(flat)

        return self.mapped(places, fetch, self.parallel)

    def read(self, pass_state: Int64s, place: np.int64) -> list[Array]:
        """Read the batch of a place."""
        request = self.request(pass_state, int(place))
        return self.layout.flatten(self.batcher(pass_state, int(place))(request))

    def batcher(self, pass_state: Int64s, place: int) -> Batcher:
        """Return the batcher of a place's rank."""
        return self._passes[PassState.of(pass_state).number][0][place % self.ranks]

    def request(self, pass_state: Int64s, place: int) -> Request:
        """Make the request of a place."""
        step, rank = divmod(place, self.ranks)
        drawn, epoch = self.schedules[rank], PassState.of(pass_state).epoch
        (ids,) = drawn.batches(epoch, step, step + 1)
        return Request.of(drawn.sampler, epoch, step, ids, seeds=self.feed.seeded)

    def calls(self, start: int) -> list[tuple[int, int]]:
        """Return the batches of each call from a step on: 1, 2, 4, … and then `together`."""
        return [*growing_ranges(start, self.steps, self.together)] if self.together > 1 else []

    def read_together(self, pass_state: Int64s, call: np.int64) -> list[Array]:
        """Read the batches of one call: `pass_state`, place, size and arrays, each [batches, …].

        Where a batch cannot be read, the batches before it are given, and after them a row with the
        place -1 - step, for which `delivered` raises.
        """
        state = PassState.of(pass_state)
        first, stop = self._passes[state.number][1][int(call)]
        drawn = self.schedules[0].batches(state.epoch, first, stop)
        places = np.arange(first, stop)
        try:
            arrays = self._rows(pass_state, first, drawn)
        except Exception:
            good = self._readable(pass_state, first, drawn)
            if good == len(drawn):
                raise
            drawn, places = [*drawn[:good], drawn[0]], np.append(places[:good], -1 - first - good)
            # Raises if the first batch cannot be read.
            arrays = self._rows(pass_state, first, drawn)
        sizes = np.array([len(ids) for ids in drawn])
        return [np.tile(pass_state, (len(places), 1)), places, sizes, *arrays]

    def _rows(self, pass_state: Int64s, first: int, drawn: list[Int64s]) -> list[Array]:
        """Read batches by one request, and lay each out in a row."""
        sampler, ids = self.feed.sampler, np.concatenate(drawn)
        records, views = sampler.records(ids), sampler.views(ids)
        request = Request(PassState.of(pass_state).epoch, first, ids, records, views, None)
        flat = self.layout.flatten(self.batcher(pass_state, first)(request))
        sizes = np.array([len(one) for one in drawn])
        if self.layout.batch is not None:
            return [part.reshape(len(sizes), sizes[0], *part.shape[1:]) for part in flat]
        width = max(1, sizes.max())  # TensorFlow crashes when it cuts rows of width 0
        held = np.arange(width) < sizes[:, None]
        return [_spread(part, held) for part in flat]

    def _readable(self, pass_state: Int64s, first: int, drawn: list[Int64s]) -> int:
        """Return how many batches can be read, and keep the error of the next batch."""
        good = 0
        try:
            for good, ids in enumerate(drawn):
                self._rows(pass_state, first + good, [ids])
        except Exception as error:
            self._failed.setdefault(PassState.of(pass_state).number, {})[first + good] = error
            return good
        return len(drawn)


def _spread(part: Array, held: npt.NDArray[np.bool_]) -> Array:
    """Lay rows out step by step, with zeros or empty strings where a step has fewer rows."""
    nothing = b"" if part.dtype == object else 0
    out = np.full((*held.shape, *part.shape[1:]), nothing, part.dtype)
    out[held] = part
    return out


def _stored(feed: Feed) -> float:
    """Return the bytes that a record takes in the shards; without shards they may be many."""
    index = feed.index
    if not isinstance(index, Index):
        return math.inf
    return int(index.shards["bytes"].sum()) / max(1, len(index))


def _worth_threads(feed: Feed) -> bool:
    """Whether making a batch takes longer than a switch of the interpreter lock."""
    if feed.has_functions:
        return True
    index = feed.index
    return (isinstance(index, Index) and index.container == "files") or _stored(feed) >= _LONG
