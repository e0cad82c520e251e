"""`BatchSource`: the batches of feeds, which a graph reads by calls into Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from twinfeed.loaders.batches.batcher import Batcher
from twinfeed.loaders.batches.feed import Feed, recipe_of
from twinfeed.loaders.feed.collate import dtype_of, is_string, mode_of, smallest_shape
from twinfeed.loaders.index import Index
from twinfeed.loaders.loop.feed_loader import FeedLoader, default_threads
from twinfeed.loaders.reading.prefetch.schedule import Request
from twinfeed.loaders.support import system
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.loaders.tensorflow._callbacks import numpy_function_of
from twinfeed.loaders.tensorflow._graph_source import GraphSource, PassState
from twinfeed.loaders.tensorflow._layout import Layout
from twinfeed.samplers.stream import growing_ranges

# One call from the graph into Python reads at most 16 batches (a power of two), of about 6 MiB.
_MAX_BATCHES_PER_CALL, _MAX_CALL_BYTES = 16, 6 << 20

# Records of at least this many bytes are read faster by two threads than by one.
_LONG_RECORD = 1 << 15


class _OpenPass(NamedTuple):
    """A running pass: a batcher for each rank, and (first step, stop step) of each chunk."""

    batchers: list[Batcher]
    chunks: list[tuple[int, int]]


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
        self.prefetch, self._readahead = prefetch, loader.readahead
        self.feed, self.feeds, self.reader = feeds[0], feeds, loader.reader
        self.schedules = [loader.schedules.of(feed.sampler) for feed in feeds]
        sizes = {feed.sampler.fixed_size for feed in feeds}  # the batches of ranks may differ
        batch_size = sizes.pop() if len(sizes) == 1 else None
        self.layout = Layout(self.feed, batch_size, self.reader)
        # A cache of decoded images needs its batches in order. So all threads decode one batch.
        resolved = default_threads() if threads is None else threads
        self._decode_threads = 0 if self.feed.sampler.traits.max_cached is None else resolved
        one_by_one = self._decode_threads or (threads is None and not _threads_help(self.feed))
        # Options of `Dataset.map` by which several threads read batches ahead.
        self.map_options: dict[str, Any] = {}
        if resolved > 1 and not one_by_one:
            self.map_options = {"num_parallel_calls": resolved, "deterministic": True}
        self.batches_per_call = self._max_batches_per_call()
        self._open_passes: dict[int, _OpenPass] = {}  # by pass_id
        # Errors of batches that could not be read, by pass_id and step. They stay when the pass is
        # closed: all batches may be read ahead before the loop gets to the failed batch.
        self._errors_by_pass: dict[int, dict[int, Exception]] = {}

    def _max_batches_per_call(self) -> int:
        """Return how many batches one call from the graph into Python reads: 1, 2, 4, 8 or 16.

        A call takes as long as reading many short records. So if nothing is decoded, a call reads
        several batches, which are the rows of one array for each field. All fields must be stacked.
        """
        feed = self.feed
        if not self.prefetch or feed.has_functions or self._decode_threads or self.ranks > 1:
            return 1
        if not self.steps:
            return 1
        array_fields = [name for name, field in feed.spec.items() if field.shape]
        all_stacked = all(mode_of(feed.collate, name) == "stack" for name in array_fields)
        # TensorFlow crashes when it unbatches arrays that have a dimension of 0.
        if not all_stacked or any(0 in spec.shape for spec in self.layout.flat_specs):
            return 1
        batch_bytes = max(1, _bytes_per_record(feed) * feed.sampler.batch_size)
        limit = max(1, min(_MAX_BATCHES_PER_CALL, int(_MAX_CALL_BYTES / batch_bytes)))
        return 1 << (limit.bit_length() - 1)  # the largest power of two up to the limit: 4 for 6

    def end_pass(self, pass_state: Int64s, batch_number: np.int64) -> bool:
        """End a pass (an iteration of the dataset), or raise the error of a batch that failed.

        The graph calls this when the last batch of the pass leaves the pipeline: then the loader's
        position moves to the next epoch. The graph also calls it for a batch that `read_chunk`
        could not read. `read_chunk` has stored the error, and has given this batch the negative
        number -1 - step: -7 for step 6.
        """
        if batch_number < 0:
            failed_step = -1 - int(batch_number)
            errors = self._errors_by_pass[PassState.unpack(pass_state).pass_id]
            # `pop`, or the traceback of the stored error would keep the pass alive.
            raise errors.pop(failed_step)
        return super().end_pass(pass_state, batch_number)

    @contextmanager
    def _open_pass(self, pass_id: int, epoch: int, start: int) -> Iterator[int]:
        """Start the batchers of a pass, and close them after the `with` block.

        A pass is one iteration of the dataset, from step `start` to the end of the epoch. A batcher
        reads and decodes the batches of one rank.

        Yields how many calls into Python the graph must make to get the batches of the pass, if
        each call reads a chunk of several batches: 3 if the steps 0 to 6 are read in chunks of 1, 2
        and 4 batches. If each call reads a single batch, 0 is yielded.
        """
        # Delete the errors that closed passes have left. The loops over these passes have stopped
        # before the batch that failed, so nobody will ask for the errors.
        for closed_pass in self._errors_by_pass.keys() - self._open_passes.keys():
            del self._errors_by_pass[closed_pass]
        options: Any = {"reader": self.reader, "threads": self._decode_threads, "meter": self.meter}
        batchers = [Batcher(recipe_of(feed), **options) for feed in self.feeds]
        chunks = self.chunks(start)
        self._open_passes[pass_id] = _OpenPass(batchers, chunks)
        try:
            for schedule, batcher in zip(self.schedules, batchers, strict=True):
                batcher.start_pass(schedule, epoch, start, readahead=self._readahead)
            system.keep_freed_memory()  # new batches reuse the memory of earlier ones
            yield len(chunks)
        except GeneratorExit:  # the loop has dropped the iterator, and will see no error
            self._errors_by_pass.pop(pass_id, None)
            raise
        finally:
            del self._open_passes[pass_id]
            for batcher in batchers:
                batcher.close()

    def batches_of(self, pass_state: tf.Tensor) -> tf.data.Dataset:
        """Return the dataset of (batch number, batch) of a pass. Each batch is a call into Python.

        The batch number is step * ranks + rank.
        """
        first_number = PassState.unpack(pass_state).start * self.ranks
        batch_numbers = tf.data.Dataset.range(first_number, self.num_batches)
        types = [spec.dtype for spec in self.layout.flat_specs]

        def fetch(batch_number: tf.Tensor) -> tuple[tf.Tensor, Any]:
            arrays = numpy_function_of(self.read_batch, [pass_state, batch_number], types)
            return batch_number, self.layout.restore(arrays)

        return batch_numbers.map(fetch, **self.map_options)

    def read_batch(self, pass_state: Int64s, batch_number: np.int64) -> list[Array]:
        """Read and decode one batch; return its arrays as the flat list of `Layout.flatten`.

        The graph calls this for each batch of a pass, which is one iteration of the dataset.

        Args:
            pass_state: a `PassState` as an array. It has the id and the epoch of the pass.
            batch_number: step * ranks + rank. With 2 ranks, number 7 is rank 1 of step 3.
        """
        state = PassState.unpack(pass_state)
        step, rank = divmod(int(batch_number), self.ranks)  # 3, 1 for number 7 and 2 ranks
        # The schedule has the ids of each batch. The batcher, which `_open_pass` has started for
        # this pass, reads and decodes the records with these ids.
        schedule, batcher = self.schedules[rank], self._open_passes[state.pass_id].batchers[rank]
        (ids,) = schedule.batches(state.epoch, step, step + 1)
        request = Request.of(schedule.sampler, state.epoch, step, ids, seeds=self.feed.seeded)
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
        """Read several batches of consecutive steps, which are called a chunk, at once.

        Returns arrays with a row for each batch: `pass_state` in each row; the step, which is also
        the batch number; the size of the batch; then an array for each field. For a chunk of the
        steps 4 to 7, the array of steps is [4, 5, 6, 7].

        A batch that cannot be read must not stop the loop before the batches in front of it were
        used. So if step 6 fails, the good batches 4 and 5 are returned, and a third row, a
        sentinel, marks the failure. In place of a step, this row has a negative number, -1 - 6 =
        -7: the array of steps is [4, 5, -7]. The error is stored. When the loop gets to the third
        row, the graph calls `end_pass`, which raises the stored error.

        Args:
            pass_state: a `PassState` as an array. It has the id and the epoch of the pass.
            chunk: the index in the list of the chunks of this pass, which `_open_pass` has stored.
        """
        state = PassState.unpack(pass_state)
        first, stop = self._open_passes[state.pass_id].chunks[int(chunk)]  # 4, 8
        (schedule,) = self.schedules  # chunks are for a single rank
        batches = schedule.batches(state.epoch, first, stop)  # the sample ids of each batch
        batch_numbers = np.arange(first, stop)  # [4, 5, 6, 7]
        try:
            arrays = self._read_batches(state, first, batches)
        except Exception:
            num_readable = self._store_first_error(state, first, batches)  # 2: steps 4 and 5
            if num_readable == len(batches):  # each can be read by itself: raise the error now
                raise
            failed_step = first + num_readable  # 6
            batch_numbers = np.append(batch_numbers[:num_readable], -1 - failed_step)  # [4, 5, -7]
            # The row that marks the failure must have a value in the array of each field. The loop
            # never sees these values, so they are read from the first batch again.
            batches = [*batches[:num_readable], batches[0]]
            arrays = self._read_batches(state, first, batches)  # raises if the first batch failed
        sizes = np.array([len(ids) for ids in batches])
        return [np.tile(pass_state, (len(batch_numbers), 1)), batch_numbers, sizes, *arrays]

    def _read_batches(self, state: PassState, first: int, batches: list[Int64s]) -> list[Array]:
        """Read several batches at once; return an array [batches, samples, …] for each field.

        `batches` has the sample ids of each batch, and `first` is the step of the first batch. All
        are read as if they were one large batch. Each array is then divided into the batches: 2
        batches of 3 images [8, 8] become an array [2, 3, 8, 8]. If batches differ in size, the
        shorter ones are padded.
        """
        ids = np.concatenate(batches)
        # Only the user's functions need seeds, and a feed with functions never gets here.
        request = Request.of(self.feed.sampler, state.epoch, first, ids, seeds=False)
        (batcher,) = self._open_passes[state.pass_id].batchers  # only a single rank gets here
        arrays = self.layout.flatten(batcher(request))
        sizes = np.array([len(ids) for ids in batches])
        if self.layout.batch_size is not None:  # all batches have the same size
            return [array.reshape(len(sizes), sizes[0], *array.shape[1:]) for array in arrays]
        max_size = max(1, sizes.max())  # TensorFlow crashes when it unbatches arrays of width 0
        is_sample = np.arange(max_size) < sizes[:, None]  # bool[batches, max_size]
        return [_pad_rows(array, is_sample) for array in arrays]

    def _store_first_error(self, state: PassState, first: int, batches: list[Int64s]) -> int:
        """Read batches one by one until one fails, store its error, and return how many succeeded.

        `first` is the step of the first batch. The error goes into `_errors_by_pass`.
        """
        for index, ids in enumerate(batches):
            try:
                self._read_batches(state, first + index, [ids])  # only to see whether it fails
            except Exception as error:
                self._errors_by_pass.setdefault(state.pass_id, {})[first + index] = error
                return index
        return len(batches)


def _pad_rows(samples: Array, mask: npt.NDArray[np.bool_]) -> Array:
    """Return an array [batches, max_size, …]: the samples where the mask is True, else padding.

    The mask is bool[batches, max_size], and `samples` has as many items as the mask has True.
    Padding is zeros or empty strings: samples 5 6 7 become the rows 5 6 and 7 0.
    """
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
