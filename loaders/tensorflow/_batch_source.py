"""`BatchSource`: the batches of feeds, which a graph reads by calls into Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from math import inf, prod
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from twinfeed.loaders.batches.batcher import Batcher
from twinfeed.loaders.batches.feed import Feed, recipe_of
from twinfeed.loaders.feed.collate import dtype_of, is_string, mode_of, smallest_shape
from twinfeed.loaders.index import Index
from twinfeed.loaders.loop.feed_loader import FeedLoader, default_threads, in_order
from twinfeed.loaders.loop.run import PassStart
from twinfeed.loaders.reading.prefetch.schedule import Request
from twinfeed.loaders.support import system
from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.tensorflow._callbacks import generator_dataset
from twinfeed.loaders.tensorflow._layout import Layout
from twinfeed.loaders.tensorflow._pipeline import PASS_START_SPEC, GraphSource
from twinfeed.samplers.stream import growing_ranges

# One call from the graph into Python reads at most 16 batches (a power of two), of about 6 MiB.
_MAX_BATCHES_PER_CALL, _MAX_CALL_BYTES = 16, 6 << 20

# Records of at least this many bytes are read faster by two threads than by one.
_LONG_RECORD = 1 << 15


class BatchSource(GraphSource):
    """The batches of one feed, or of the feeds of several ranks in turn.

    Each pass (an iteration of the dataset) opens its own batchers, and closes them at its end.
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
        self._reader, self._readahead = loader.reader, loader.readahead
        self.feed, self._feeds = feeds[0], feeds
        self._schedules = [loader.schedules.of(feed.sampler) for feed in feeds]
        sizes = {feed.sampler.fixed_size for feed in feeds}  # the batches of ranks may differ
        self.layout = Layout(self.feed, sizes.pop() if len(sizes) == 1 else None, self._reader)
        # A cache of decoded images needs its batches in order. So all threads decode one batch.
        reuses_images = self.feed.sampler.traits.max_cached is not None
        one_by_one = reuses_images or (threads is None and not _threads_help(self.feed))
        threads = default_threads() if threads is None else threads
        self._decode_threads = threads if reuses_images else 0
        self._batch_threads = 0 if one_by_one else threads
        self.batches_per_call = self._max_batches_per_call() if prefetch else 1

    def _max_batches_per_call(self) -> int:
        """Return how many batches one call from the graph into Python reads: 1, 2, 4, 8 or 16.

        A call takes as long as reading many short records. So if nothing is decoded, a call reads
        several batches, which are the rows of one array for each field. All fields must be stacked.
        """
        feed = self.feed
        if not self.steps or feed.has_functions or self._decode_threads or self.ranks > 1:
            return 1
        array_fields = [name for name, field in feed.spec.items() if field.shape]
        all_stacked = all(mode_of(feed.collate, name) == "stack" for name in array_fields)
        # TensorFlow crashes when it unbatches arrays that have a dimension of 0.
        if not all_stacked or any(0 in spec.shape for spec in self.layout.flat_specs):
            return 1
        batch_bytes = max(1, _bytes_per_record(feed) * feed.sampler.batch_size)
        limit = max(1, min(_MAX_BATCHES_PER_CALL, int(_MAX_CALL_BYTES / batch_bytes)))
        return 1 << (limit.bit_length() - 1)  # the largest power of two up to the limit: 4 for 6

    def elements(self) -> tf.data.Dataset:
        number, specs = tf.TensorSpec([], tf.int64), self.layout.flat_specs
        if self.batches_per_call > 1:
            sized = [tf.TensorSpec([self.layout.batch_size, *s.shape[1:]], s.dtype) for s in specs]
            rows = (PASS_START_SPEC, number, number, *sized)
            chunk = tuple(tf.TensorSpec([None, *row.shape], row.dtype) for row in rows)
            return generator_dataset(self.read_pass, chunk)
        step_spec = (PASS_START_SPEC, number, *(specs * self.ranks))
        return generator_dataset(self.read_pass, step_spec)

    def batches_in(
        self, pass_start: tf.Tensor, step: tf.Tensor, *arrays: tf.Tensor
    ) -> tuple[Any, ...]:
        first, flat, count = step * self.ranks, iter(arrays), len(self.layout.flat_specs)
        return tuple(
            (pass_start, first + rank, self.layout.restore([*islice(flat, count)]))
            for rank in range(self.ranks)
        )

    def batch_of(
        self, pass_start: tf.Tensor, step: tf.Tensor, size: tf.Tensor, *arrays: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, Any]:
        if self.layout.batch_size is None:  # shorter batches were padded: cut the padding off
            arrays = tuple(array[:size] for array in arrays)
        return pass_start, step, self.layout.restore(arrays)

    def read_pass(self) -> Iterator[tuple[Any, ...]]:
        """Start a pass, and yield the arrays of its batches for `elements`, in order."""
        pass_start = self.start_pass()
        with ExitStack() as stack:
            batchers = []
            for feed, schedule in zip(self._feeds, self._schedules, strict=True):
                batcher = Batcher(
                    recipe_of(feed),
                    reader=self._reader,
                    threads=self._decode_threads,
                    meter=self.meter,
                )
                batchers.append(stack.enter_context(batcher))
                batcher.start_pass(schedule, *pass_start[:2], readahead=self._readahead)
            system.keep_freed_memory()  # new batches reuse the memory of earlier ones
            read = partial(self._read, batchers, pass_start)
            ranges = growing_ranges(pass_start.step, self.steps, self.batches_per_call)
            elements = in_order(read, ranges, threads=self._batch_threads)
            for several in stack.enter_context(closing(elements)):
                yield from several

    def _read(
        self, batchers: Sequence[Batcher], pass_start: PassStart, steps: tuple[int, int]
    ) -> Iterable[tuple[Any, ...]]:
        """Return the arrays of the batches of the steps [first, stop).

        If they cannot be read together, they are read one by one when they are needed, so that the
        batches before the one that fails come first.
        """
        first, stop = steps
        if self.batches_per_call == 1:
            return [self._read_step(batchers, pass_start, first)]
        try:
            return [self._read_rows(batchers[0], pass_start, first, stop)]
        except Exception:
            if stop - first == 1:
                raise
        return (self._read_rows(batchers[0], pass_start, n, n + 1) for n in range(first, stop))

    def _read_step(
        self, batchers: Sequence[Batcher], pass_start: PassStart, step: int
    ) -> tuple[Any, ...]:
        """Return the pass start, the step, and the arrays of its batches, rank after rank."""
        arrays: list[Array] = []
        for schedule, batcher in zip(self._schedules, batchers, strict=True):
            (ids,) = schedule.batches(pass_start.epoch, step, step + 1)
            drawn = schedule.sampler, pass_start.epoch, step, ids
            arrays += self.layout.flatten(batcher(Request.of(*drawn, seeds=self.feed.seeded)))
        return pass_start, step, *arrays

    def _read_rows(
        self, batcher: Batcher, pass_start: PassStart, first: int, stop: int
    ) -> tuple[Any, ...]:
        """Return arrays with a row for each batch of the steps [first, stop), read as one batch.

        They are the pass start, the step, the size of the batch, and each field: 2 batches of 3
        images [8, 8] become an array [2, 3, 8, 8]. If batches differ in size, the shorter ones are
        padded.
        """
        batches = self._schedules[0].batches(pass_start.epoch, first, stop)
        sizes = np.array([len(ids) for ids in batches])
        # Only the user's functions need seeds, and a feed with functions never gets here.
        ids = np.concatenate(batches)
        request = Request.of(self.feed.sampler, pass_start.epoch, first, ids, seeds=False)
        arrays = self.layout.flatten(batcher(request))
        max_size = max(1, sizes.max())  # TensorFlow crashes when it unbatches arrays of width 0
        is_sample = np.arange(max_size) < sizes[:, None]  # bool[batches, max_size]
        rows = [_pad_rows(array, is_sample) for array in arrays]
        return np.tile(pass_start, (len(sizes), 1)), np.arange(first, stop), sizes, *rows


def _pad_rows(samples: Array, mask: npt.NDArray[np.bool_]) -> Array:
    """Return an array [batches, max_size, …]: the samples where the mask is True, else padding.

    Padding is zeros or empty strings: samples 5 6 7 become the rows 5 6 and 7 0.
    """
    if mask.all():
        return samples.reshape(*mask.shape, *samples.shape[1:])
    padding = b"" if samples.dtype == object else 0
    out = np.full((*mask.shape, *samples.shape[1:]), padding, samples.dtype)
    out[mask] = samples
    return out


def _bytes_per_record(feed: Feed) -> float:
    """Return the mean size of a record in bytes; infinity if it is not known.

    It is known for the records of an `Index`, and for arrays of numbers in memory.
    """
    index, specs = feed.index, feed.spec.values()
    if isinstance(index, Index):
        return int(index.shards["bytes"].sum()) / max(1, len(index))
    if not getattr(index, "in_memory", False) or any(is_string(spec.dtype) for spec in specs):
        return inf
    return sum(prod(smallest_shape(spec.shape)) * dtype_of(spec).itemsize for spec in specs)


def _threads_help(feed: Feed) -> bool:
    """Return whether several threads make the batches of a feed faster than one.

    They do if samples are decoded or transformed, if each record is a file, or if records are long.
    """
    records_are_files = isinstance(feed.index, Index) and feed.index.container == "files"
    return feed.has_functions or records_are_files or _bytes_per_record(feed) >= _LONG_RECORD
