"""`choose`: batches of elements that a sampler chooses from several datasets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from twinfeed.loaders.loop.selector import Choices, SourceOf
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.tensorflow._callbacks import generator_dataset
from twinfeed.loaders.tensorflow._datasets import DatasetLoader
from twinfeed.loaders.tensorflow._pipeline import GraphSource, dataset_of
from twinfeed.loaders.tensorflow.device import chosen_device
from twinfeed.loaders.tensorflow.feed_datasets import PASS_START_SPEC, SourceDatasets
from twinfeed.samplers import BatchStream, validate

_NUMBERS_SPEC = tf.TensorSpec([None], tf.int64)
_to_variant = tf.data.experimental.to_variant


def choose(
    sampler: BatchStream,
    datasets: Sequence[tf.data.Dataset],
    /,
    *,
    source: SourceOf | None = None,
    replay: bool = False,
    device: str | None = None,
    prefetch: int = 2,
) -> DatasetLoader[Any]:
    """Make batches of elements from several datasets, each element from the one a sampler chooses.

    There is a dataset for each class, each set or each segment that the sampler draws: datasets of
    your own, or `source_datasets(feed)`. The sampler decides the size of each batch and the dataset
    of each element, which is the next one of this dataset.

    A pass restarts each dataset of your own, which must last for an epoch: most need `repeat()`. If
    a dataset ends earlier, an error names it.

    Args:
        sampler: draws classes (`PKBatchSampler.of_classes`) or sets (`MixtureSampler`). Of several
            ranks, each has a loader with its own part of each set, as by `Dataset.shard`. With
            `source_datasets(feed)`, the sampler of the feed.
        datasets: of one element spec; elements are stacked to batches.
        source: the index in `datasets` of the dataset of each sample id, as a function of ids
            (int64[n]) or an array by id, such as labels from 0. Samplers of classes and mixtures
            need no `source`.
        replay: whether a pass skips as many elements of each dataset as were drawn before its
            position, in all epochs. Then epochs follow one another, and a resumed run is exact, if
            the datasets are deterministic. Skipped elements are read and mapped again. Without
            `replay`, only the choice of datasets is resumed.
        device: as of a `TensorFlowLoader`.
        prefetch: as of a `TensorFlowLoader`.

    Returns:
        a loader, with the position, `state_dict`, `dataset` and `track` of a `TensorFlowLoader`.
        `ResumeCallback` takes it.

    Raises:
        ValueError: for datasets of your own, a sampler that needs the id of each record:
            `ShardShuffleSampler`, views, reuse, padding, and of `PKBatchSampler` coverage, several
            ranks, and options that leave out records. For `source_datasets(feed)`, a sampler that
            is not the feed's. Batches of several sizes, over datasets without one static shape.
        TypeError: datasets of two element specs, from TensorFlow.

    >>> from twinfeed.loaders.tensorflow import choose
    >>> from twinfeed.samplers import PKBatchSampler
    >>> datasets = [tf.data.Dataset.range(10 * n, 10 * n + 10).repeat() for n in range(3)]
    >>> loader = choose(PKBatchSampler.of_classes(3, p=2, k={0: 2, 1: 3}, seed=0), datasets)
    >>> for batch in loader:
    ...     print(batch.numpy())
    [10 11  0  1]
    [20 21 22 12 13 14]
    """
    groups = None
    if isinstance(datasets, SourceDatasets):
        # All have the element spec of the first: it is enough to make this one.
        groups, examples = datasets.checked_group_schedule(sampler, source), [datasets[0]]
    else:
        datasets = examples = list(datasets)
    # Made only for its element spec. TensorFlow raises if the specs of the datasets differ.
    chosen = tf.data.Dataset.choose_from_datasets(examples, tf.data.Dataset.range(0))
    choices = Choices(sampler, len(datasets), source, groups)
    if sampler.fixed_size is None:
        _check_shapes(chosen.element_spec)
    replay = validate.flag("replay", replay)
    loader = _ChoosingLoader(choices, datasets, chosen.element_spec, replay)
    loader.device = device if device is None else chosen_device(device)
    loader.prefetch = validate.integer("prefetch", prefetch, minimum=0)
    return loader


def _check_shapes(specs: Any) -> None:
    """Raise ValueError if a static shape is unknown, for batches of several sizes.

    `rebatch` would mix up elements of the shapes [2, 3] and [3, 2].
    """
    shapes = [spec.shape for spec in tf.nest.flatten(specs) if isinstance(spec, tf.TensorSpec)]
    if not all(shape.is_fully_defined() for shape in shapes):
        raise ValueError(
            f"batches of several sizes need datasets of one static shape, got {shapes}: map the "
            f"datasets to one shape, for example by tf.image.resize"
        )


class _ChoosingLoader(DatasetLoader[Any]):
    """The loader that `choose` returns. `choice` are the arguments of its `ElementSource`."""

    _shared = ("_sampler", "_choice")

    def __init__(self, choices: Choices, *choice: Any) -> None:
        super().__init__(choices.sampler)
        self._choice = choices, *choice

    def _make_dataset(self) -> tf.data.Dataset:
        return dataset_of(ElementSource(self, *self._choice), self.prefetch)


class ElementSource(GraphSource):
    """Let a graph read batches of elements that a sampler chooses from several datasets."""

    def __init__(self, loader: Any, choices: Choices, datasets: Any, *options: Any) -> None:
        super().__init__(loader, choices.sampler)
        self._choices, self._datasets = choices, datasets
        self._spec, self._replay = options
        # All in one tensor [datasets]: a function that captures 1,000 datasets is slow to trace and
        # to start. `SourceDatasets` are made anew in each pass.
        self._of_feed = isinstance(datasets, SourceDatasets)
        with tf.device("/CPU:0"):
            variants = range(len(datasets)) if self._of_feed else map(_to_variant, datasets)
            self._variants = tf.stack([*variants])

    def elements(self) -> tf.data.Dataset:
        specs = PASS_START_SPEC, _NUMBERS_SPEC, _NUMBERS_SPEC
        return generator_dataset(self.pass_starts, specs).flat_map(self.batches_of)

    def pass_starts(self) -> Iterator[tuple[Int64s, Int64s, Int64s]]:
        """Start a pass; yield its start, the size of each batch, int64[steps], and the number of
        elements of each dataset, int64[datasets], that were drawn before and are skipped.
        """
        epoch, step, _ = pass_start = self.start_pass()
        starts, stops = self.sampler.rank_slices(epoch, step, self.steps)
        skipped = self._choices.counts_before(*(epoch, step) if self._replay else (0, 0))
        yield np.array(pass_start), stops - starts, skipped

    def numbers(self, pass_start: Int64s) -> Iterator[Int64s]:
        """Yield the number of the dataset of each sample of several steps, int64[samples]."""
        epoch, step, _ = pass_start.tolist()
        yield from map(np.concatenate, self._choices.chunks(epoch, step, self.steps))

    def batches_of(
        self, pass_start: tf.Tensor, sizes: tf.Tensor, skipped: tf.Tensor
    ) -> tf.data.Dataset:
        """Return the dataset of the (position, batch) of a pass."""
        chosen = generator_dataset(self.numbers, _NUMBERS_SPEC, (pass_start,)).unbatch()
        variants = tf.unstack(self._variants_of(pass_start, skipped), len(self._datasets))
        elements = tf.data.Dataset.choose_from_datasets(
            [tf.data.experimental.from_variant(variant, self._spec) for variant in variants], chosen
        )
        if self.sampler.fixed_size is not None:
            batches = elements.batch(self.sampler.fixed_size, drop_remainder=True)
        else:
            # `rebatch` joins and splits batches. From batches of 1, it reads just the elements that
            # it needs. From larger ones, it would also read an element of the next batch, and if
            # that failed, this batch would fail.
            batches = elements.batch(1).rebatch(sizes)
        numbered = batches.take(self.steps - pass_start[1]).enumerate(pass_start[1])
        return numbered.map(lambda step, batch: (tf.concat([pass_start, step[None]], 0), batch))

    def _variants_of(self, pass_start: tf.Tensor, skipped: tf.Tensor) -> tf.Tensor:
        """Return the datasets that a pass reads, as a variant tensor [datasets]."""

        def prepared(arguments: tuple[tf.Tensor, ...]) -> tf.Tensor:
            variant, count, number = arguments
            if self._of_feed:
                return _to_variant(self._datasets.of_pass(pass_start, number))
            dataset = tf.data.experimental.from_variant(variant, self._spec).skip(count)
            ended = generator_dataset(self.raise_ended, self._spec, (pass_start, number))
            return _to_variant(dataset.concatenate(ended))

        numbered = self._variants, skipped, tf.range(len(self._datasets), dtype=tf.int64)
        return tf.map_fn(prepared, numbered, fn_output_signature=tf.TensorSpec([], tf.variant))

    def raise_ended(self, pass_start: Int64s, number: np.int64) -> Iterator[Any]:
        """Raise ValueError: a dataset has no further element."""
        raise ValueError(
            f"dataset {number} (of {len(self._datasets)}) has ended in epoch {pass_start[0]}: add "
            f".repeat() to the dataset, or make epochs shorter by batches_per_epoch of the sampler"
        )
        yield  # of a generator
