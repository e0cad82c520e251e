"""A sampler that chooses from datasets of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from twinfeed.loaders.loop.loader import Loader
from twinfeed.loaders.loop.selector import Choices, Selector, SourceOf
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.tensorflow._callbacks import called
from twinfeed.loaders.tensorflow._choose import (
    Sizes,
    batched,
    chosen,
    skipped,
    stacked,
)
from twinfeed.loaders.tensorflow._datasets import DatasetLoader, check_process
from twinfeed.loaders.tensorflow._passes import START, PassServer, PassState
from twinfeed.loaders.tensorflow._pipeline import batches_of
from twinfeed.loaders.tensorflow.device import chosen_device
from twinfeed.loaders.tensorflow.feed_datasets import SourceDatasets
from twinfeed.samplers import BatchStream, validate
from twinfeed.samplers.drawing.chunks import steps_per_draw


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
    """Let a sampler choose from datasets: one for each class, each set or each lane.

    The datasets are your own, or `source_datasets(feed)`, which give the records of the sampler.

    Each batch is as the sampler draws it: of the size of its step, its elements in order, each the
    next element of its dataset.

    A pass begins each dataset of your own anew, as every iterator of tf.data does. So datasets must
    go on for an epoch: most need `repeat()`. A dataset that ends is an error that names it.

    Args:
        sampler: draws classes (`PKBatchSampler.of_classes`) or sets (`MixtureSampler`). Of several
            ranks, each has a loader with its own part of each set, as by `Dataset.shard`. With
            `source_datasets(feed)`, the sampler of the feed.
        datasets: of one element spec; elements are stacked to batches.
        source: the number of the dataset of each sample id, as a function of ids (int64[n]) or an
            array by id, such as labels from 0. Classes and mixtures have this by themselves.
        replay: whether a pass skips as many elements of each dataset as were drawn before its
            position, in all epochs. Then an epoch goes on where the epoch before ended, and a
            resumed run is exact, if the datasets are deterministic. Skipped elements are read, and
            mapped, again. Without `replay` the choice alone resumes.
        device: as of a `TensorFlowLoader`.
        prefetch: as of a `TensorFlowLoader`.

    Returns:
        a loader, with the position, `state_dict`, `dataset` and `track` of a `TensorFlowLoader`.
        `ResumeCallback` takes it.

    Raises:
        ValueError: for datasets of your own, a sampler that needs to know each record:
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
    return _Chosen(
        sampler, datasets, source=source, replay=replay, device=device, prefetch=prefetch
    )


class _Chosen(DatasetLoader[Any]):
    """Iterate over batches of what a sampler chooses from datasets."""

    _shared = ("_sampler", "_datasets")

    def __init__(
        self,
        sampler: BatchStream,
        datasets: Sequence[tf.data.Dataset],
        *,
        source: SourceOf | None,
        replay: bool,
        device: str | None,
        prefetch: int,
    ) -> None:
        if isinstance(datasets, SourceDatasets):
            groups, known = datasets.groups_of(sampler, source), [datasets[0]]
        else:
            groups, datasets = None, (known := list(datasets))
        # Raises if the datasets differ.
        one = tf.data.Dataset.choose_from_datasets(known, tf.data.Dataset.range(0))
        self._choices = Choices(sampler, len(datasets), source, groups)
        super().__init__(sampler)
        self._datasets, self._spec = datasets, one.element_spec
        self.replay = validate.flag("replay", replay)
        self.device = device if device is None else chosen_device(device)
        self.prefetch = validate.integer("prefetch", prefetch, minimum=0)

    def _made(self) -> tf.data.Dataset:
        check_process()
        server = ChooseDatasets(self, self._choices, self._datasets, self._spec, self.replay)
        return batches_of(server, self.prefetch)


class Numbers(PassServer):
    """Give the numbers themselves."""

    def __init__(self, loader: Loader[Any], choices: Choices) -> None:
        super().__init__(loader, choices.sampler)
        self.choices = choices
        self._together = steps_per_draw(self.sampler.batch_size)  # steps of a call

    def epoch(self, pass_state: tf.Tensor) -> tf.data.Dataset:
        """Make the dataset of (step, numbers) of a pass."""
        numbers = batched(self._drawn(pass_state), self._sizes(pass_state))
        steps = tf.data.Dataset.range(pass_state[START], self.steps)
        return tf.data.Dataset.zip((steps, numbers))

    def sizes(self, pass_state: Int64s) -> tuple[Int64s, np.int64]:
        """Return the sizes of the batches of a pass, and what divides each of them: see `Sizes`."""
        _, epoch, start, *_ = PassState.of(pass_state)
        lows, highs = self.sampler.rank_slices(epoch, start, self.steps)
        each = highs - lows
        return each, max(np.int64(1), np.gcd.reduce(each))

    def numbers(self, pass_state: Int64s, step: np.int64) -> Int64s:
        """Draw the numbers of some steps, end to end."""
        last = min(int(step) + self._together, self.steps)
        each = self.choices.numbers(PassState.of(pass_state).epoch, int(step), last)
        for at, numbers in enumerate(each, int(step)):
            self.check(numbers, PassState.of(pass_state).epoch, at)
        return np.concatenate(each)

    def check(self, numbers: Int64s, epoch: int, step: int) -> None:
        """Refuse a batch that cannot be made; numbers alone always can."""

    def _sizes(self, pass_state: tf.Tensor) -> Sizes:
        each, unit = called(self.sizes, [pass_state], [tf.int64] * 2)
        each.set_shape([None])
        unit.set_shape([])
        return Sizes(each, unit, self.sampler.fixed_size)

    def _drawn(self, pass_state: tf.Tensor) -> tf.data.Dataset:
        """Make the dataset of all numbers of a pass, int64 scalars."""

        def numbers(step: tf.Tensor) -> tf.Tensor:
            found = called(self.numbers, [pass_state, step], tf.int64)
            found.set_shape([None])
            return found

        steps = tf.data.Dataset.range(pass_state[START], self.steps, self._together)
        return steps.map(numbers).unbatch()


class ChooseDatasets(Numbers):
    """Choose from datasets."""

    def __init__(
        self,
        loader: Loader[Any],
        choices: Choices,
        datasets: Sequence[tf.data.Dataset],
        spec: Any,
        replay: bool,
    ) -> None:
        super().__init__(loader, choices)
        self._datasets, self._spec, self._replay = datasets, spec, replay
        own = [] if isinstance(datasets, SourceDatasets) else datasets
        specs = [tf.nest.flatten(dataset.element_spec) for dataset in own]
        # Of ragged and sparse elements, those of any shapes are stacked.
        self._shapes = [[s.shape for s in each if isinstance(s, tf.TensorSpec)] for each in specs]
        self._differ = any(shapes != self._shapes[0] for shapes in self._shapes)
        self._stacked = stacked(own) if own else None

    def epoch(self, pass_state: tf.Tensor) -> tf.data.Dataset:
        """Make the dataset of (step, batch) of a pass."""
        sizes, numbers = self._sizes(pass_state), self._drawn(pass_state)
        return chosen(
            self._stacked_datasets(pass_state), self._spec, numbers, sizes, pass_state, self.ended
        )

    def _stacked_datasets(self, pass_state: tf.Tensor) -> tf.Tensor:
        """Return the datasets of a pass, stacked."""
        if isinstance(self._datasets, SourceDatasets):
            return self._datasets.variants(pass_state)
        if not self._replay:
            return self._stacked
        drawn = called(self.drawn, [pass_state], tf.int64)
        drawn.set_shape([len(self._datasets)])
        return skipped(self._stacked, drawn, self._spec)

    def check(self, numbers: Int64s, epoch: int, step: int) -> None:
        """Refuse a batch of datasets whose elements are known to have other shapes."""
        known: dict[int, tuple[int, tf.TensorShape]] = {}  # by part: where from, and its shape
        for number in dict.fromkeys(numbers.tolist()) if self._differ else ():
            for part, shape in enumerate(self._shapes[number]):
                first, other = known.get(part, (number, shape))
                if not shape.is_compatible_with(other):
                    raise ValueError(
                        f"the batch of epoch {epoch}, step {step} has elements of dataset {number} "
                        f"(of {self.choices.sources}), of shape {shape}, and of dataset {first}, "
                        f"of shape {other}: map the datasets to one shape, as by tf.image.resize"
                    )
                # A shape that is partly unknown does not hide the one before.
                known[part] = (first, other.merge_with(shape))

    def drawn(self, pass_state: Int64s) -> Int64s:
        """Return how often each dataset was drawn before a pass."""
        return self.choices.drawn(*PassState.of(pass_state)[1:3])

    def ended(self, pass_state: Int64s, step: np.int64, found: np.int64) -> None:
        """Raise for the dataset that has fewer elements than were chosen."""
        epoch = PassState.of(pass_state).epoch
        (numbers,) = self.choices.numbers(epoch, int(step), int(step) + 1)
        raise ValueError(
            f"dataset {numbers[found]} (of {self.choices.sources}) has ended in step {step} of "
            f"epoch {epoch}: add .repeat() to the dataset, or make epochs shorter by "
            f"batches_per_epoch of the sampler"
        )


def selector_dataset(selector: Selector, /) -> tf.data.Dataset:
    """Make a dataset of the numbers that a `Selector` gives, int64[batch].

    `tf.data.Dataset.choose_from_datasets` takes `selector_dataset(selector).unbatch()`. The passes
    are those of `TensorFlowLoader.dataset`.

    >>> from twinfeed.loaders import Selector
    >>> from twinfeed.loaders.tensorflow import selector_dataset
    >>> from twinfeed.samplers import PKBatchSampler
    >>> selector = Selector(PKBatchSampler.of_classes(3, p=2, k=2, seed=0), 3)
    >>> for numbers in selector_dataset(selector):
    ...     print(numbers.numpy())
    [1 1 0 0]
    [2 2 1 1]
    """
    check_process()
    return batches_of(Numbers(selector, selector.choices), prefetch=1)
