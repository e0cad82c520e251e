"""`choose`: batches of elements that a sampler chooses from several datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from twinfeed.loaders.loop.loader import Loader
from twinfeed.loaders.loop.selector import Choices, Selector, SourceOf
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.tensorflow._callbacks import generator_dataset, numpy_function_of
from twinfeed.loaders.tensorflow._datasets import DatasetLoader
from twinfeed.loaders.tensorflow._pipeline import (
    PASS_START_SPEC,
    GraphSource,
    dataset_of,
    unwrap,
    wrap,
)
from twinfeed.loaders.tensorflow.device import chosen_device
from twinfeed.loaders.tensorflow.feed_datasets import SourceDatasets
from twinfeed.samplers import BatchStream, validate
from twinfeed.samplers.stream import steps_per_draw


def choose(
    sampler: BatchStream,
    datasets: Sequence[tf.data.Dataset],
    /,
    *,
    source: SourceOf | None = None,
    replay: bool = False,
    labels: bool = False,
    device: str | None = None,
    prefetch: int = 2,
) -> DatasetLoader[Any]:
    """Make batches of elements from several datasets, each element from the one a sampler chooses.

    There is a dataset for each class, each set or each segment that the sampler draws. They are
    your own datasets, or `source_datasets(feed)`, which have the records that the sampler draws.

    The sampler decides the size of each batch and, in order, the dataset of each element. The
    element is the next one of this dataset.

    A pass (an iteration to the end of the epoch) restarts each dataset of your own, as every
    iterator of tf.data does. So a dataset must last for an epoch: most need `repeat()`. If a
    dataset ends earlier, an error names it.

    Args:
        sampler: draws classes (`PKBatchSampler.of_classes`) or sets (`MixtureSampler`). Of several
            ranks, each has a loader with its own part of each set, as by `Dataset.shard`. With
            `source_datasets(feed)`, the sampler of the feed.
        datasets: of one element spec; elements are stacked to batches.
        source: the index in `datasets` of the dataset of each sample id, as a function of ids
            (int64[n]) or an array by id, such as labels from 0. Samplers of classes and mixtures
            need no `source`.
        replay: whether a pass skips as many elements of each dataset as were drawn before its
            position, in all epochs. Then an epoch continues where the previous epoch ended, and a
            resumed run is exact, if the datasets are deterministic. Skipped elements are read, and
            mapped, again. Without `replay`, only the choice of datasets is resumed.
        labels: whether each batch is a pair: the batch, and the index in `datasets` of the dataset
            of each element, int64[batch], which is its class. Keras takes such a pair as inputs and
            targets.
        device: as of a `TensorFlowLoader`.
        prefetch: as of a `TensorFlowLoader`.

    Returns:
        a loader, with the position, `state_dict`, `dataset` and `track` of a `TensorFlowLoader`.
        `ResumeCallback` takes it.

    Raises:
        ValueError: for datasets of your own, a sampler that needs the id of each record:
            `ShardShuffleSampler`, views, reuse, padding, and of `PKBatchSampler` coverage, several
            ranks, and options that leave out records. For `source_datasets(feed)`, a sampler that
            is not the feed's. In a pass: a batch with elements of datasets whose static shapes
            differ.
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
    loader = _ChoosingLoader(Choices(sampler, len(datasets), source, groups), datasets)
    loader.spec = chosen.element_spec
    loader.replay = validate.flag("replay", replay)
    loader.labels = validate.flag("labels", labels)
    loader.device = device if device is None else chosen_device(device)
    loader.prefetch = validate.integer("prefetch", prefetch, minimum=0)
    return loader


class _ChoosingLoader(DatasetLoader[Any]):
    """The loader that `choose` returns, which sets its options."""

    _shared = ("_sampler", "datasets")
    spec: Any
    replay: bool
    labels: bool

    def __init__(self, choices: Choices, datasets: Sequence[tf.data.Dataset]) -> None:
        super().__init__(choices.sampler)
        self.choices, self.datasets = choices, datasets

    def _make_dataset(self) -> tf.data.Dataset:
        return dataset_of(ElementSource(self), self.prefetch)


class ChoiceSource(GraphSource):
    """The index of the dataset that each sample of a batch comes from, read by a graph."""

    def __init__(self, loader: Loader[Any], choices: Choices) -> None:
        super().__init__(loader, choices.sampler)
        self.choices = choices
        self._steps_per_call = steps_per_draw(self.sampler.batch_size)

    def elements(self) -> tf.data.Dataset:
        return generator_dataset(self.pass_starts, PASS_START_SPEC).flat_map(self.batches_of)

    def batches_of(self, pass_start: tf.Tensor) -> tf.data.Dataset:
        """Return the dataset of ((pass start, step, dataset index of each sample),) of a pass."""
        batches = self._batch(self._choice_dataset(pass_start), self._sizes_of(pass_start))
        numbered = tf.data.Dataset.zip((self._steps_of_pass(pass_start), batches))
        return numbered.map(lambda step, batch: ((pass_start, step, batch),))

    def sizes(self, pass_start: Int64s) -> Int64s:
        """Return the number of samples of each batch of a pass, int64[steps]."""
        epoch, start, _ = pass_start.tolist()
        starts, stops = self.sampler.rank_slices(epoch, start, self.steps)
        return stops - starts

    def draw_indices(self, pass_start: Int64s, step: np.int64) -> Int64s:
        """Return the index of the dataset of each sample of several batches, int64[samples]."""
        epoch, start = int(pass_start[0]), int(step)
        stop = min(start + self._steps_per_call, self.steps)
        # A source of `Choices` is a dataset here: source number 2 is the dataset with the index 2.
        batches = self.choices.source_numbers(epoch, start, stop)
        for offset, dataset_indices in enumerate(batches):
            self.check_shapes(dataset_indices, epoch, start + offset)
        return np.concatenate(batches)

    def check_shapes(self, dataset_indices: Int64s, epoch: int, step: int) -> None:
        """Do nothing; a subclass raises ValueError if elements of a batch cannot be stacked."""

    def _steps_of_pass(self, pass_start: tf.Tensor, every: int = 1) -> tf.data.Dataset:
        """Return the dataset of the steps of a pass; with `every=4`, only each fourth step."""
        return tf.data.Dataset.range(pass_start[1], self.steps, every)

    def _sizes_of(self, pass_start: tf.Tensor) -> tf.Tensor:
        """Return the number of samples of each batch of a pass as a tensor."""
        sizes = numpy_function_of(self.sizes, [pass_start], tf.int64)
        sizes.set_shape([None])
        return sizes

    def _batch(self, elements: tf.data.Dataset, sizes: tf.Tensor) -> tf.data.Dataset:
        """Stack elements to batches of these sizes; the last is smaller if elements run out."""
        if self.sampler.fixed_size is not None:
            return elements.batch(self.sampler.fixed_size)
        # `rebatch` joins and splits batches. From batches of 1, it reads just the elements that it
        # needs. From larger ones, it would also read an element of the next batch, and if that
        # failed, this batch would fail.
        return elements.batch(1).rebatch(sizes)

    def _choice_dataset(self, pass_start: tf.Tensor) -> tf.data.Dataset:
        """Return the dataset of the dataset index of each sample of a pass, as int64 scalars.

        A call into Python takes long, so each draws the indices of several steps.
        """

        def draw(step: tf.Tensor) -> tf.Tensor:
            dataset_indices = numpy_function_of(self.draw_indices, [pass_start, step], tf.int64)
            dataset_indices.set_shape([None])
            return dataset_indices

        return self._steps_of_pass(pass_start, every=self._steps_per_call).map(draw).unbatch()


class ElementSource(ChoiceSource):
    """Let a graph read batches of elements that a sampler chooses from several datasets."""

    def __init__(self, loader: _ChoosingLoader) -> None:
        super().__init__(loader, loader.choices)
        self._datasets, self._spec = loader.datasets, loader.spec
        self._replay, self._labels = loader.replay, loader.labels
        # Those of `source_datasets(feed)` have the same shapes, and are made anew in each pass.
        user_datasets = [] if isinstance(self._datasets, SourceDatasets) else self._datasets
        specs = [tf.nest.flatten(dataset.element_spec) for dataset in user_datasets]
        # By dataset, the shapes of its dense components. Ragged and sparse ones need not agree.
        self._shapes = [[s.shape for s in spec if isinstance(s, tf.TensorSpec)] for spec in specs]
        self._shapes_differ = any(shapes != self._shapes[0] for shapes in self._shapes)
        # All datasets in one variant tensor [datasets]: a function that captures 1,000 datasets is
        # slow to trace and to start.
        with tf.device("/CPU:0"):
            variants = [tf.data.experimental.to_variant(dataset) for dataset in user_datasets]
            self._variants = tf.stack(variants) if user_datasets else None

    def batches_of(self, pass_start: tf.Tensor) -> tf.data.Dataset:
        """Return the dataset of ((pass start, step, batch),) of a pass; `batch` may have labels.

        If a dataset runs out of elements, `choose_from_datasets` ends without an error. So each
        batch is compared with its size, and `raise_ended` names the dataset. Empty batches are
        appended in case that a dataset has ended after a full batch.
        """
        variants = tf.unstack(self._variants_of(pass_start), len(self._datasets))
        elements = tf.data.Dataset.choose_from_datasets(
            [tf.data.experimental.from_variant(variant, self._spec) for variant in variants],
            self._choice_dataset(pass_start),
            stop_on_empty_dataset=True,
        )
        sizes = self._sizes_of(pass_start)
        batches = self._batch(elements, sizes)
        spec = batches.element_spec
        # (length 0, a wrapped batch of nothing), in place of a batch that is missing.
        empty_batch = tf.data.Dataset.from_tensors(0).map(
            lambda _: (tf.constant(0, tf.int64), tf.raw_ops.OptionalNone())
        )
        rows = batches.map(lambda *batch: (_length(batch), wrap(batch)))

        def check_length(
            step: tf.Tensor, size: tf.Tensor, row: Any, *labels: tf.Tensor
        ) -> tuple[tuple[tf.Tensor, tf.Tensor, Any]]:
            """Return ((pass start, step, batch),); raise ValueError if the batch is too short."""
            length, batch = row
            is_full = tf.cond(
                length < size,
                lambda: numpy_function_of(self.raise_ended, [pass_start, step, length], tf.bool),
                lambda: True,
            )
            with tf.control_dependencies([is_full]):  # or the graph would leave the check out
                batch = unwrap(tf.identity(batch), spec)
            batch = (batch, *labels) if labels else batch
            return ((pass_start, step, _set_batch_size(batch, self.sampler.fixed_size)),)

        rows = rows.concatenate(empty_batch.repeat())
        parts = [self._steps_of_pass(pass_start), tf.data.Dataset.from_tensor_slices(sizes), rows]
        if self._labels:
            parts.append(self._batch(self._choice_dataset(pass_start), sizes))
        return tf.data.Dataset.zip(tuple(parts)).map(check_length)

    def _variants_of(self, pass_start: tf.Tensor) -> tf.Tensor:
        """Return the datasets that a pass reads, as a variant tensor [datasets].

        `SourceDatasets` start at the samples of the pass. Datasets of the user start at their first
        element; with `replay`, they skip the elements that earlier steps, of all epochs, have
        drawn.
        """
        if isinstance(self._datasets, SourceDatasets):
            return self._datasets.variants(pass_start)
        if not self._replay:
            return self._variants
        # How many elements were drawn from each dataset before this step: [5, 3].
        counts = numpy_function_of(self.counts_before_pass, [pass_start], tf.int64)
        counts.set_shape([len(self._datasets)])

        def skip(variant_and_count: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
            variant, count = variant_and_count
            dataset = tf.data.experimental.from_variant(variant, self._spec)
            return tf.data.experimental.to_variant(dataset.skip(count))

        variant_spec = tf.TensorSpec([], tf.variant)
        return tf.map_fn(skip, (self._variants, counts), fn_output_signature=variant_spec)

    def check_shapes(self, dataset_indices: Int64s, epoch: int, step: int) -> None:
        """Raise ValueError if a batch has elements whose static shapes are not compatible.

        TensorFlow mixes some of them up without an error.
        """
        if not self._shapes_differ:
            return
        # By component of an element: the first dataset of the batch, and the shape of all so far.
        known: dict[int, tuple[int, tf.TensorShape]] = {}
        for index in dict.fromkeys(dataset_indices.tolist()):  # each dataset of the batch once
            for component, shape in enumerate(self._shapes[index]):
                first, known_shape = known.get(component, (index, shape))
                if not shape.is_compatible_with(known_shape):
                    raise ValueError(
                        f"the batch of epoch {epoch}, step {step} has elements of dataset {index} "
                        f"(of {self.choices.sources}), of shape {shape}, and of dataset {first}, "
                        f"of shape {known_shape}: map the datasets to one shape, for "
                        f"example by tf.image.resize"
                    )
                known[component] = (first, known_shape.merge_with(shape))

    def counts_before_pass(self, pass_start: Int64s) -> Int64s:
        """Return the number of elements drawn from each dataset before a pass, int64[datasets]."""
        epoch, step, _ = pass_start.tolist()
        return self.choices.counts_before(epoch, step)

    def raise_ended(self, pass_start: Int64s, step: np.int64, length: np.int64) -> None:
        """Raise ValueError that names the dataset which lacks element `length` of a batch."""
        epoch = int(pass_start[0])
        (indices,) = self.choices.source_numbers(epoch, int(step), int(step) + 1)
        raise ValueError(
            f"dataset {indices[length]} (of {self.choices.sources}) has ended in step {step} of "
            f"epoch {epoch}: add .repeat() to the dataset, or make epochs shorter by "
            f"batches_per_epoch of the sampler"
        )


def _length(batch: Any) -> tf.Tensor:
    """Return the number of elements of a batch of any structure, as an int64 scalar tensor."""
    first = tf.nest.flatten(batch)[0]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int64)
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    return tf.shape(first, tf.int64)[0]


def _set_batch_size(batch: Any, size: int | None) -> Any:
    """Set the static first dimension of the tensors of a batch to `size`; None is any size."""
    for part in tf.nest.flatten(batch):
        if isinstance(part, tf.Tensor) and part.shape.rank is not None:
            part.set_shape([size, *part.shape[1:]])
    return batch


def selector_dataset(selector: Selector, /) -> tf.data.Dataset:
    """Make a dataset that says from which source each record of a batch comes.

    A source is a dataset of your own, with the records of one class or set. Source n is for class n
    or set n of the sampler. A `Selector` is a loader whose batches are source numbers. Each element
    of this dataset is such a batch: int64[batch], the number of the source of each record.

    `selector_dataset(selector).unbatch()` is a choice dataset for
    `tf.data.Dataset.choose_from_datasets`.

    Each iteration runs from the selector's position to the end of the epoch, as those of
    `TensorFlowLoader.dataset`.

    >>> from twinfeed.loaders import Selector
    >>> from twinfeed.loaders.tensorflow import selector_dataset
    >>> from twinfeed.samplers import PKBatchSampler
    >>> selector = Selector(PKBatchSampler.of_classes(3, p=2, k=2, seed=0), 3)
    >>> for numbers in selector_dataset(selector):
    ...     print(numbers.numpy())
    [1 1 0 0]
    [2 2 1 1]
    """
    return dataset_of(ChoiceSource(selector, selector.choices), prefetch=1)
