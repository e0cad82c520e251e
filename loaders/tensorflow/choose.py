"""The engine in which the sampler chooses from datasets: here, from one dataset of ids a source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from twinfeed.loaders.tensorflow.errors import remembered
from twinfeed.loaders.tensorflow.serve import Server

Int64s = npt.NDArray[np.int64]


class Selection(NamedTuple):
    """The samples of the rest of an epoch, end to end, and how they are batched.

    `batches` is int64[steps, width]: the number of each sample in `ids`, or -1 where a batch is
    smaller than the widest, `sizes` int64[steps]. So every batch takes `width` elements, empty
    ones too, and is cut to its size afterwards.
    """

    ids: Int64s
    batches: Int64s
    sizes: Int64s


def select(server: Server, epoch: int, start: int, /) -> Selection:
    """Draw the rest of an epoch from step `start` on."""
    drawn = server.ranks[0].sampler.batches(epoch, start, server.steps)
    sizes = np.array([len(ids) for ids in drawn], np.int64)
    places = np.full((len(drawn), sizes.max(initial=1)), -1)
    places[np.arange(places.shape[1]) < sizes[:, None]] = np.arange(sizes.sum())
    return Selection(np.concatenate([np.zeros(0, np.int64), *drawn]), places, sizes)


def chosen(
    datasets: Sequence[tf.data.Dataset], selector: tf.Tensor, rest: tf.data.Dataset
) -> tf.data.Dataset:
    """Choose from `datasets` by the number of each; `rest`, by the number after them.

    `selector` is int64[steps, width]; the result has an element for each step.
    """
    choices = tf.data.Dataset.from_tensor_slices(tf.reshape(selector, [-1]))
    elements = tf.data.Dataset.choose_from_datasets(
        [*datasets, rest], choices, stop_on_empty_dataset=True
    )
    return elements.batch(tf.shape(selector, tf.int64)[1], drop_remainder=True)


class ChooseIds:
    """One dataset of ids for each shard or class, and one gather of what was chosen."""

    def __init__(self, server: Server, sources: Literal["shards", "classes"]) -> None:
        self.server = server
        index = server.feed.index
        if sources == "shards":
            self._source = np.repeat(np.arange(len(index.shard_lengths)), index.shard_lengths)
        elif index.labels is None:
            raise ValueError("sources='classes' needs labels, and the index has none")
        else:
            self._source = np.unique(index.labels, return_inverse=True)[1].astype(np.int64)
        self._count = int(self._source.max(initial=-1)) + 1

    def epoch(self, epoch: tf.Tensor, start: tf.Tensor) -> tf.data.Dataset:
        """Make the dataset of (place, batch) of one epoch from step `start` on."""
        server = self.server
        types = [tf.int64] * 4
        selector, sizes, ids, bounds = tf.numpy_function(self._plan, [epoch, start], types)
        selector.set_shape([None, None])
        for part in (sizes, ids, bounds):
            part.set_shape([None])
        sources = [
            tf.data.Dataset.range(bounds[number], bounds[number + 1])
            for number in range(self._count)
        ]
        nothing = tf.data.Dataset.from_tensors(tf.constant(-1, tf.int64)).repeat()
        places = tf.data.Dataset.range(start, server.places)
        steps = tf.data.Dataset.zip((places, chosen(sources, selector, nothing)))
        sized = tf.data.Dataset.zip((steps, tf.data.Dataset.from_tensor_slices(sizes)))

        def fetch(step: tuple[tf.Tensor, tf.Tensor], size: tf.Tensor) -> tuple[tf.Tensor, object]:
            place, taken = step
            taken = taken[:size]
            padding = tf.fill([size], tf.constant(-1, tf.int64))
            found = tf.where(taken < 0, padding, tf.gather(ids, tf.maximum(taken, 0)))
            return place, server.fetch(epoch, place, found)

        return sized.map(fetch, num_parallel_calls=server.parallel, deterministic=True)

    @remembered
    def _plan(self, epoch: np.int64, start: np.int64) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """Sort the samples of an epoch by source: each source is a range of them."""
        ids, batches, sizes = select(self.server, int(epoch), int(start))
        held = np.flatnonzero(ids >= 0)
        records = self.server.ranks[0].sampler.records(ids[held])
        source = np.full(len(ids) + 1, self._count)  # the last entry is for -1
        source[held] = self._source[records]
        order = held[np.argsort(source[held], kind="stable")]
        bounds = np.searchsorted(source[order], np.arange(self._count + 1))
        # One more id, so that there is one to take where an epoch holds nothing but padding.
        return source[batches], sizes, np.append(ids[order], -1), bounds.astype(np.int64)
