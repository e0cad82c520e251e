"""`BatchSource`: the batches of feeds, which a graph reads by calls into Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain, starmap
from math import inf, prod
from typing import Any

import numpy as np
import tensorflow as tf

from twinfeed.loaders.batches.batcher import Batcher
from twinfeed.loaders.batches.feed import Feed, recipe_of
from twinfeed.loaders.feed.collate import dtype_of, is_string, smallest_shape
from twinfeed.loaders.index import Index
from twinfeed.loaders.loop.feed_loader import in_order
from twinfeed.loaders.loop.run import PassStart
from twinfeed.loaders.reading.prefetch.schedule import Request, Schedule
from twinfeed.loaders.support import system
from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.tensorflow._callbacks import generator_dataset
from twinfeed.loaders.tensorflow._layout import Layout
from twinfeed.loaders.tensorflow._pipeline import POSITION_SPEC, GraphSource, read_joined
from twinfeed.samplers.stream import growing_ranges

# A call from the graph into Python takes as long as reading many short records, so one call reads
# up to 16 batches, of about 6 MiB.
_MAX_BATCHES_PER_CALL, _MAX_CALL_BYTES = 16, 6 << 20


class BatchSource(GraphSource):
    """The batches of one feed, or of the feeds of several ranks in turn."""

    def __init__(self, loader: Any, feeds: Sequence[Feed], *, by_rank: bool = False) -> None:
        self.feed, self._feeds = feeds[0], feeds
        super().__init__(loader, self.feed.sampler, ranks=len(feeds), by_rank=by_rank)
        self._schedules = [Schedule(f.sampler) for f in feeds] if by_rank else [loader.schedule]
        sizes = {feed.sampler.fixed_size for feed in feeds}  # the batches of ranks may differ
        self.layout = Layout(self.feed, sizes.pop() if len(sizes) == 1 else None, loader.reader)
        # A cache of decoded images needs its batches in order. So all threads decode one batch.
        reuses_images = self.sampler.traits.max_cached is not None
        decode_threads = loader.threads if reuses_images else 0
        self._batch_threads = loader.threads - decode_threads
        self._readahead = loader.readahead
        self._batcher_of = partial(
            Batcher, reader=loader.reader, threads=decode_threads, meter=loader.meter
        )
        if loader.prefetch:
            self.batches_per_call = self._max_batches_per_call()

    def _max_batches_per_call(self) -> int:
        """Return how many batches one call from the graph into Python reads: 1 to 16."""
        feed, sampler = self.feed, self.sampler
        # TensorFlow crashes when it unbatches arrays that have a dimension of 0.
        has_fixed_shapes = all(s.shape[1:].num_elements() for s in self.layout.specs.values())
        may_be_empty = sampler.world_size > 1 and sampler.fixed_size is None
        if feed.has_functions or self.ranks > 1 or may_be_empty or not has_fixed_shapes:
            return 1
        batch_bytes = max(1, _bytes_per_record(feed) * sampler.batch_size)
        return max(1, min(_MAX_BATCHES_PER_CALL, int(_MAX_CALL_BYTES / batch_bytes)))

    def elements(self) -> tf.data.Dataset:
        """Return the dataset of the arrays of a step of all ranks, or of rows, one for a batch."""
        specs = self.layout.flat_specs
        if self.batches_per_call == 1:
            return generator_dataset(self.read_pass, (POSITION_SPEC, *(specs * self.ranks)))
        rows = POSITION_SPEC, *specs
        chunk = tuple(tf.TensorSpec([None, *row.shape], row.dtype) for row in rows)
        return generator_dataset(self.read_pass, chunk)

    def rows(self, position: tf.Tensor, *arrays: tf.Tensor) -> tuple[tf.Tensor, ...]:
        size = len(self.layout.flat_specs)  # of each rank
        batches = [self.layout.restore(arrays[n : n + size]) for n in range(0, len(arrays), size)]
        numbered = [
            (tf.add(position, (0, 0, 0, rank)), batch) for rank, batch in enumerate(batches)
        ]
        return self._wrapped(numbered)

    def batch(self, *row: tf.Tensor) -> Any:
        if self.batches_per_call == 1:
            return super().batch(*row)
        position, *arrays = row
        return position, self.layout.restore(arrays)

    def read_pass(self) -> Iterator[tuple[Any, ...]]:
        """Start a pass, and yield the arrays of its batches for `elements`, in order."""
        pass_start = self.start_pass()
        with ExitStack() as stack:
            batchers = [stack.enter_context(self._batcher_of(recipe_of(f))) for f in self._feeds]
            for batcher, schedule in zip(batchers, self._schedules, strict=True):
                batcher.start_pass(schedule, *pass_start[:2], readahead=self._readahead)
            system.keep_freed_memory()  # new batches reuse the memory of earlier ones
            read_any = self._read_step if self.batches_per_call == 1 else self._read_rows
            read: Callable[..., tuple[Any, ...]] = partial(read_any, batchers, pass_start)
            # The last batch comes alone: the call for it ends the pass.
            start, last = pass_start.step, self.steps - 1
            ranges = growing_ranges(start, last, self.batches_per_call)
            steps = starmap(range, chain(ranges, growing_ranges(max(start, last), self.steps, 1)))
            calls = in_order(partial(read_joined, read), steps, threads=self._batch_threads)
            for several in stack.enter_context(closing(calls)):
                yield from several

    def _read_step(
        self, batchers: Sequence[Batcher], pass_start: PassStart, step: int
    ) -> tuple[Any, ...]:
        """Return the position, and the arrays of a step's batches, rank after rank."""
        arrays: list[Array] = []
        for schedule, batcher in zip(self._schedules, batchers, strict=True):
            (ids,) = schedule.batches(pass_start.epoch, step, step + 1)
            drawn = schedule.sampler, pass_start.epoch, step, ids
            arrays += self.layout.flatten(batcher(Request.of(*drawn, seeds=self.feed.seeded)))
        return np.array([*pass_start, step * self.ranks]), *arrays

    def _read_rows(
        self, batchers: Sequence[Batcher], pass_start: PassStart, *steps: int
    ) -> tuple[Any, ...]:
        """Return the positions of steps, and arrays with a row for each batch, read as one batch.

        Two batches of 3 images [8, 8] become an array [2, 3, 8, 8]. Batches of several sizes are a
        ValueError: `read_joined` then has each read by itself.
        """
        batches = self._schedules[0].batches(pass_start.epoch, steps[0], steps[-1] + 1)
        (size,) = {len(ids) for ids in batches}
        # Only the user's functions need seeds, and a feed with functions never gets here.
        drawn = self.sampler, pass_start.epoch, steps[0], np.concatenate(batches)
        arrays = self.layout.flatten(batchers[0](Request.of(*drawn, seeds=False)))
        positions = np.array([(*pass_start, step) for step in steps])
        return positions, *(a.reshape(len(steps), size, *a.shape[1:]) for a in arrays)


def _bytes_per_record(feed: Feed) -> float:
    """Return the mean size of a record in bytes; infinity if it is not known."""
    index, specs = feed.index, feed.spec.values()
    if isinstance(index, Index):
        return int(index.shards["bytes"].sum()) / max(1, len(index))
    if not getattr(index, "in_memory", False) or any(is_string(spec.dtype) for spec in specs):
        return inf
    return sum(prod(smallest_shape(spec.shape)) * dtype_of(spec).itemsize for spec in specs)
