"""`BatchSource`: the batches of feeds, which a graph reads by calls into Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from twinfeed.loaders.feed.collate import dtype_of, is_string, mode_of, smallest_shape
from twinfeed.loaders.feed.request import Request
from twinfeed.loaders.index import Index
from twinfeed.loaders.loop.feed_loader import FeedLoader
from twinfeed.loaders.making.batcher import Batcher
from twinfeed.loaders.making.concurrency import default_threads
from twinfeed.loaders.making.feed import Feed, compile_feed
from twinfeed.loaders.support import system
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.loaders.tensorflow._callbacks import numpy_function_of
from twinfeed.loaders.tensorflow._graph_source import GraphSource, PassState
from twinfeed.loaders.tensorflow._layout import Layout
from twinfeed.samplers.drawing.chunks import growing_ranges

# One call of Python reads at most so many batches, a power of two, and about so many bytes.
_MAX_BATCHES, _MAX_CALL_BYTES = 16, 6 << 20

# From this number of bytes per record on, two calls at once read faster than one call.
_LONG_RECORD = 1 << 15


class _OpenPass(NamedTuple):
    """A running pass: a batcher for each rank, and (first step, stop step) of each chunk."""

    batchers: list[Batcher]
    chunks: list[tuple[int, int]]


class BatchSource(GraphSource):
    """The batches of one feed, or of the feeds of several ranks in turn.

    Each pass has batchers of its own. The batchers are closed with the pass.
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
        self.schedules = [loader.schedules.of(feed.sampler) for feed in feeds]
        sizes = {feed.sampler.fixed_size for feed in feeds}
        self.layout = Layout(self.feed, sizes.pop() if len(sizes) == 1 else None, self.reader)
        # A cache of decoded images takes batches in their order. So threads share each batch.
        resolved = default_threads() if threads is None else threads
        self._decode_threads = 0 if self.feed.sampler.traits.max_cached is None else resolved
        one_by_one = self._decode_threads or (threads is None and not _threads_help(self.feed))
        # Options of `Dataset.map`. Without them, no element is made ahead.
        self.map_options: dict[str, Any] = {}
        if resolved > 1 and not one_by_one:
            self.map_options = {"num_parallel_calls": resolved, "deterministic": True}
        self.batches_per_call = self._max_batches_per_call()
        self._passes: dict[int, _OpenPass] = {}  # by number
        self._errors: dict[int, dict[int, Exception]] = {}  # by pass and step

    def _max_batches_per_call(self) -> int:
        """Return the largest number of batches that one call of Python reads, a power of two.

        It is above 1 if records are short, nothing is decoded, and all fields are stacked: then the
        batches of a chunk can be rows of one array for each field.
        """
        feed = self.feed
        if not self.prefetch or feed.has_functions or self._decode_threads:
            return 1
        shaped = [name for name, field in feed.spec.items() if field.shape]
        all_stacked = all(mode_of(feed.collate, name) == "stack" for name in shaped)
        if self.ranks > 1 or not all_stacked or any(0 in spec.shape for spec in self.layout.flat):
            return 1
        batch_bytes = max(1, _bytes_per_record(feed) * feed.sampler.batch_size)
        limit = max(1, min(_MAX_BATCHES, int(_MAX_CALL_BYTES / batch_bytes)))
        return 1 << limit.bit_length() - 1  # the largest power of two up to the limit

    def end_pass(self, pass_state: Int64s, batch_number: np.int64) -> bool:
        """Set the position after the last batch of a pass, or raise the error of a failed batch.

        A batch that could not be read has the number -1 - step: see `read_chunk`.
        """
        if batch_number < 0:
            # Removed, since an error keeps the loop's variables, and with them the pass, alive.
            raise self._errors[PassState.unpack(pass_state).number].pop(-1 - int(batch_number))
        return super().end_pass(pass_state, batch_number)

    @contextmanager
    def _open_pass(self, number: int, epoch: int, start: int) -> Iterator[int]:
        """Open the batchers of a pass for the `with` block, and yield its number of chunks."""
        for ended_pass in self._errors.keys() - self._passes.keys():  # errors that nobody has seen
            del self._errors[ended_pass]
        batchers = [
            Batcher(
                compile_feed(feed),
                reader=self.reader,
                threads=self._decode_threads,
                meter=self.meter,
            )
            for feed in self.feeds
        ]
        chunks = self.chunks(start)
        self._passes[number] = _OpenPass(batchers, chunks)
        try:
            for schedule, batcher in zip(self.schedules, batchers, strict=True):
                batcher.start_pass(schedule, epoch, start, readahead=self._readahead)
            system.keep_freed_memory()
            yield len(chunks)
        except GeneratorExit:  # the iterator was destroyed: the errors will not be raised
            self._errors.pop(number, None)
            raise
        finally:
            del self._passes[number]
            for batcher in batchers:
                batcher.close()

    def batches_of(self, pass_state: tf.Tensor) -> tf.data.Dataset:
        """Return the dataset of (batch number, batch) of a pass, one call of Python for each."""
        first = PassState.unpack(pass_state).start * self.ranks
        batch_numbers = tf.data.Dataset.range(first, self.num_batches)
        types = [spec.dtype for spec in self.layout.flat]

        def fetch(batch_number: tf.Tensor) -> tuple[tf.Tensor, Any]:
            flat = numpy_function_of(self.read_batch, [pass_state, batch_number], types)
            return batch_number, self.layout.restore(flat)

        return batch_numbers.map(fetch, **self.map_options)

    def read_batch(self, pass_state: Int64s, batch_number: np.int64) -> list[Array]:
        """Return the arrays of the batch with this number, in the order of `Layout.flatten`."""
        state, (step, rank) = PassState.unpack(pass_state), divmod(int(batch_number), self.ranks)
        schedule, batcher = self.schedules[rank], self._passes[state.number].batchers[rank]
        sampler = schedule.commit(state.epoch * self.steps + step)
        (ids,) = schedule.batches(state.epoch, step, step + 1)
        request = Request.of(sampler, state.epoch, step, ids, seeds=self.feed.seeded)
        return self.layout.flatten(batcher(request))

    def chunks(self, start: int) -> list[tuple[int, int]]:
        """Return (first step, stop step) of each chunk of a pass that starts at step `start`.

        The chunks have 1, 2, 4, … and then `batches_per_call` batches. The list is empty if each
        call reads a single batch.
        """
        if self.batches_per_call == 1:
            return []
        return [*growing_ranges(start, self.steps, self.batches_per_call)]

    def read_chunk(self, pass_state: Int64s, chunk: np.int64) -> list[Array]:
        """Return the batches of a chunk as arrays [batches, …]: each batch is a row of each array.

        The arrays are: `pass_state`, the number and the size of each batch, and those of the
        layout. If batch n cannot be read, the n batches before it are returned, and a sentinel row
        with the number -1 - step. When the graph delivers this row, `delivered` raises the error.
        """
        state = PassState.unpack(pass_state)
        first, stop = self._passes[state.number].chunks[int(chunk)]
        self.schedules[0].commit(state.epoch * self.steps + stop - 1)
        batches = self.schedules[0].batches(state.epoch, first, stop)
        batch_numbers = np.arange(first, stop)
        try:
            arrays = self._read_batches(state, first, batches)
        except Exception:
            readable = self._store_first_error(state, first, batches)
            if readable == len(batches):
                raise
            batches = [*batches[:readable], batches[0]]
            batch_numbers = np.append(batch_numbers[:readable], -1 - first - readable)
            arrays = self._read_batches(state, first, batches)  # raises if the first cannot be read
        sizes = np.array([len(ids) for ids in batches])
        return [np.tile(pass_state, (len(batch_numbers), 1)), batch_numbers, sizes, *arrays]

    def _read_batches(self, state: PassState, first: int, batches: list[Int64s]) -> list[Array]:
        """Read several batches of ids by a single request; return arrays [batches, samples, …].

        `first` is the step of the first batch. If batches differ in size, the shorter ones are
        padded.
        """
        sampler, ids = self.feed.sampler, np.concatenate(batches)
        records, views = sampler.records(ids), sampler.views(ids)
        (batcher,) = self._passes[state.number].batchers
        batch = batcher(Request(state.epoch, first, ids, records, views, None))
        flat = self.layout.flatten(batch)
        sizes = np.array([len(ids) for ids in batches])
        if self.layout.batch is not None:
            return [part.reshape(len(sizes), sizes[0], *part.shape[1:]) for part in flat]
        width = max(1, sizes.max())  # TensorFlow crashes when it cuts rows of width 0
        return [_pad_rows(part, np.arange(width) < sizes[:, None]) for part in flat]

    def _store_first_error(self, state: PassState, first: int, batches: list[Int64s]) -> int:
        """Return the number of batches before the first that cannot be read; store its error.

        `first` is the step of the first batch.
        """
        for number, ids in enumerate(batches):
            try:
                self._read_batches(state, first + number, [ids])
            except Exception as error:
                self._errors.setdefault(state.number, {})[first + number] = error
                return number
        return len(batches)


def _pad_rows(part: Array, mask: npt.NDArray[np.bool_]) -> Array:
    """Return an array [batches, samples, …] that has the entries of `part` where the mask is True.

    Elsewhere it has zeros, or empty strings. The mask is bool[batches, samples].
    """
    empty = b"" if part.dtype == object else 0
    out = np.full((*mask.shape, *part.shape[1:]), empty, part.dtype)
    out[mask] = part
    return out


def _bytes_per_record(feed: Feed) -> float:
    """Return the mean size of a record in bytes; infinity if it is not known.

    It is known of an index, and of numbers in the memory of this process.
    """
    index, specs = feed.index, feed.spec.values()
    if isinstance(index, Index):
        return int(index.shards["bytes"].sum()) / max(1, len(index))
    if not getattr(index, "in_memory", False) or any(is_string(spec.dtype) for spec in specs):
        return inf
    return sum(prod(smallest_shape(spec.shape)) * dtype_of(spec).itemsize for spec in specs)


def _threads_help(feed: Feed) -> bool:
    """Return whether threads speed up the batches of a feed: decoding, files, long records."""
    if feed.has_functions:
        return True
    index = feed.index
    has_loose_files = isinstance(index, Index) and index.container == "files"
    return has_loose_files or _bytes_per_record(feed) >= _LONG_RECORD
