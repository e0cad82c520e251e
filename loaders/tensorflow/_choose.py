"""The engine in which the sampler chooses from datasets: here, a dataset of ids for each shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from twinfeed.loaders._checks import Int64s
from twinfeed.loaders.tensorflow._calls import called
from twinfeed.loaders.tensorflow._serve import Server


class Selection(NamedTuple):
    """The samples of the rest of an epoch, end to end, and how they are batched.

    `batches` (int64[steps, width]) has the place of each sample in `ids`, and -1 where a batch is
    smaller than the widest. `sizes` is int64[steps]. Every batch takes `width` elements, with empty
    elements for -1, and is cut to its size afterwards.
    """

    ids: Int64s
    batches: Int64s
    sizes: Int64s


def select(server: Server, epoch: int, start: int, /) -> Selection:
    """Draw the rest of an epoch from step `start` on."""
    drawn = server.feed.sampler.batches(epoch, start, server.steps)
    sizes = np.array([len(ids) for ids in drawn], np.int64)
    places = np.full((len(drawn), sizes.max(initial=1)), -1)
    places[np.arange(places.shape[1]) < sizes[:, None]] = np.arange(sizes.sum())
    return Selection(np.concatenate([np.zeros(0, np.int64), *drawn]), places, sizes)


def chosen(
    datasets: Sequence[tf.data.Dataset],
    selector: tf.Tensor,
    rest: tf.data.Dataset,
) -> tf.data.Dataset:
    """Choose from `datasets` by number; the number after the last dataset chooses `rest`.

    `selector` is int64[steps, width]. The result has an element for each step, and then empty
    elements without end.
    """
    choices = tf.data.Dataset.from_tensor_slices(tf.reshape(selector, [-1]))
    elements = tf.data.Dataset.choose_from_datasets(
        [*datasets, rest], choices, stop_on_empty_dataset=True
    )
    steps = elements.batch(tf.shape(selector, tf.int64)[1], drop_remainder=True)
    # Without the empty elements, an epoch would end early in silence where a source has too few.
    nothing = tf.data.Dataset.from_tensors(tf.constant([], rest.element_spec.dtype))
    return steps.concatenate(nothing.repeat())


class ChooseIds:
    """One dataset of ids for each shard, and one gather of what was chosen."""

    by_calls = False

    def __init__(self, server: Server) -> None:
        self.server = server
        lengths = server.feed.index.shard_lengths
        self._source = np.repeat(np.arange(len(lengths)), lengths)
        self._count = len(lengths)

    def epoch(self, begun: tf.Tensor) -> tf.data.Dataset:
        """Make the dataset of (place, batch) of one pass."""
        server = self.server
        selector, sizes, ids, bounds = called(self.plan, [begun], [tf.int64] * 4)
        selector.set_shape([None, None])
        for part in (sizes, ids, bounds):
            part.set_shape([None])
        sources = [
            tf.data.Dataset.range(bounds[number], bounds[number + 1])
            for number in range(self._count)
        ]
        nothing = tf.data.Dataset.from_tensors(tf.constant(-1, tf.int64)).repeat()
        places = tf.data.Dataset.range(begun[2], server.places)
        sized = tf.data.Dataset.from_tensor_slices(sizes)
        taken = chosen(sources, selector, nothing)
        steps = tf.data.Dataset.zip((places, sized, taken))

        def fetch(place: tf.Tensor, size: tf.Tensor, taken: tf.Tensor) -> tuple[tf.Tensor, object]:
            taken = server.whole(taken)[:size]
            padding = tf.fill([size], tf.constant(-1, tf.int64))
            found = tf.where(taken < 0, padding, tf.gather(ids, tf.maximum(taken, 0)))
            return place, server.fetch(begun, place, found)

        return server.mapped(steps, fetch, server.parallel)

    def plan(self, begun: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """Sort the samples of an epoch by source. Each source is then a range of the sorted ids."""
        ids, batches, sizes = select(self.server, int(begun[1]), int(begun[2]))
        held = np.flatnonzero(ids >= 0)
        records = self.server.feed.sampler.records(ids[held])
        source = np.full(len(ids) + 1, self._count)  # the last entry is for -1
        source[held] = self._source[records]
        order = held[np.argsort(source[held], kind="stable")]
        bounds = np.searchsorted(source[order], np.arange(self._count + 1))
        # One more id, so that there is one to take where an epoch holds nothing but padding.
        return source[batches], sizes, np.append(ids[order], -1), bounds.astype(np.int64)
