"""Make a `tf.data.Dataset` of the batches of all passes, whose length is that of an epoch.

Keras reads the number of steps of an epoch from the dataset's cardinality, so this must always be
the number for a whole epoch. But an iteration has fewer batches if it starts in the middle of the
epoch, and more if each step has a batch for each of several ranks.

The operator `unbatch` makes this possible. Its inputs are tensors whose rows are batches, and it
yields the rows one by one. Its cardinality is computed from the row count that the tensors are
declared to have; the actual count may be another. So there are always as many tensors as an epoch
has steps, each declared to have 1 row. For example, an epoch has 5 steps, and the pass (an
iteration) starts at step 1::

    tensors            steps 1, 2   steps 3, 4   missing   missing   missing
    actual rows        2            2            0         0         0
    declared rows      1            1            1         1         1        together 5, the length
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from twinfeed.loaders.loop.loader import Loader
from twinfeed.loaders.loop.run import PassStart
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.tensorflow._callbacks import numpy_function_of
from twinfeed.loaders.tensorflow._datasets import check_process
from twinfeed.loaders.tensorflow._iterators import set_owner
from twinfeed.loaders.tensorflow._processes import auto_shard_policy, check_auto_shard
from twinfeed.samplers import BatchStream

S = TypeVar("S")
T = TypeVar("T")

POSITION_SPEC = tf.TensorSpec([4], tf.int64)
"""A position in a graph: the `PassStart` of its pass, and the number of the batch."""


class GraphSource(ABC):
    """The batches of a stream that a graph reads from Python, of one rank or of several in turn.

    A pass is one iteration of the dataset, from the loader's position to the end of the epoch. The
    batch number is `step * ranks + rank`: with 2 ranks, rank 1 of step 3 has batch number 7.
    """

    batches_per_call = 1

    def __init__(
        self, loader: Loader[Any], sampler: BatchStream, *, ranks: int = 1, by_rank: bool = False
    ) -> None:
        check_process()
        self.sampler, self.ranks, self.steps = sampler, ranks, len(sampler)
        self.run, self.meter = loader.run, loader.meter
        # Whether each replica of a strategy has a dataset of its rank. If not, the strategy divides
        # each batch among the replicas.
        self._by_rank = by_rank

    @abstractmethod
    def elements(self) -> tf.data.Dataset:
        """Return the dataset of one pass. By default, each element is a (position, batch)."""

    def rows(self, *element: Any) -> tuple[tf.Tensor, ...]:
        """Return tensors whose rows are the batches of an element of `elements`."""
        return self._wrapped([element])

    def batch(self, *row: tf.Tensor) -> Any:
        """Return (position, batch) of a row of the tensors of `rows`."""
        return tf.nest.pack_sequence_as(self._wrapper, row, expand_composites=True).get_value()

    def _wrapped(self, batches: Sequence[Any]) -> tuple[tf.Tensor]:
        """Wrap each (position, batch), whatever its tensors, into a scalar; stack the scalars."""
        wrapped = [tf.experimental.Optional.from_value(batch) for batch in batches]
        self._wrapper = tf.OptionalSpec(wrapped[0].element_spec)
        return (tf.stack(tf.nest.flatten(wrapped, expand_composites=True)),)

    def start_pass(self) -> PassStart:
        """Start a pass at the position where `Run.start_external` says."""
        # `reshardable` is False in a loop over the loader itself. Elsewhere, a `tf.distribute`
        # strategy may divide the batches among its processes.
        if self.run.reshardable and not self._by_rank:
            check_auto_shard(self.sampler)
        self.meter.start_external()  # measures how long the loop waits for batches
        return self.run.start_external()

    def end_pass(self, position: Int64s) -> bool:
        """Report that the last batch of a pass has left the pipeline; see `Run.finish_external`."""
        self.run.finish_external(PassStart(*position[:3].tolist()))
        return True  # TensorFlow cannot call a function without a result


def read_joined(read: Callable[..., T], parts: Sequence[S]) -> Iterable[T]:
    """Return `read(*parts)` alone, or if it fails, `read(part)` of each part, when it is needed."""
    try:
        return [read(*parts)]
    except Exception:
        if len(parts) == 1:
            raise
    return map(read, parts)


# Its functions do not branch on tensors in Python, so AutoGraph need not convert them.
@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def dataset_of(source: GraphSource, prefetch: int) -> tf.data.Dataset:
    """Return the dataset of the batches of `source`. Each iteration of it ends with the epoch."""
    last, several = source.steps * source.ranks - 1, source.batches_per_call > 1

    def rows_of(*element: Any) -> Any:
        return tf.nest.map_structure(_declare_one_row, source.rows(*element))

    def deliver(*row: Any) -> Any:
        """Return the batch of a row, and call `source.end_pass` with the last batch of an epoch; of
        several batches, all as the rows of tensors. The last one of an epoch comes alone.
        """
        position, batch = source.batch(*row)
        if several:
            position = position[-1]
        # No result is used: tf.data runs the call all the same, since it may have effects.
        tf.cond(
            tf.equal(position[3], last),  # in a graph of TF1, == compares objects
            lambda: numpy_function_of(source.end_pass, [position], tf.bool),
            lambda: False,
        )
        return tf.nest.map_structure(_declare_one_row, batch) if several else batch

    # TensorFlow would run a map of the outer graph in parallel, and so read ahead. So the map is in
    # the function of a flat_map, which it leaves as it is.
    steps = tf.data.Dataset.from_tensors(0).flat_map(
        lambda _: source.elements() if several else source.elements().map(rows_of)
    )
    if prefetch:
        steps = steps.prefetch(-(-prefetch // source.batches_per_call))  # rounded up
    if several:  # the call for each batch would take longer than reading it
        steps = steps.map(deliver)
    # A map makes the variants: TensorFlow cannot serialize a dataset of variants, for `snapshot`.
    missing = tf.data.Dataset.from_tensors(0).repeat()
    missing = missing.map(lambda _: tf.nest.map_structure(_without_rows, steps.element_spec))
    batches = _unbatch(steps.concatenate(missing).take(source.steps)).take(last + 1)
    if not several:
        batches = batches.map(deliver)
    options = tf.data.Options()
    options.deterministic = True
    # A prefetch after the last step would deliver batches that were not requested.
    options.experimental_optimization.inject_prefetch = False
    options.experimental_distribute.auto_shard_policy = auto_shard_policy(source.sampler)
    return set_owner(batches.with_options(options), source)


def _unbatch(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Return the dataset of the rows of tensors, as the method `Dataset.unbatch` does."""
    spec = tf.nest.map_structure(
        lambda batch: tf.TensorSpec(batch.shape[1:], batch.dtype), batches.element_spec
    )
    row_specs = tf.nest.flatten(spec)
    # The method would first map each tensor, to make ragged ones dense, which would cost time.
    variant = tf.raw_ops.UnbatchDataset(
        input_dataset=tf.data.experimental.to_variant(batches),
        output_types=[row.dtype for row in row_specs],
        output_shapes=[row.shape for row in row_specs],
    )
    return tf.data.experimental.from_variant(variant, spec)


def _declare_one_row(rows: tf.Tensor) -> tf.Tensor:
    """Return a tensor with the static shape [1, …], though it may have any number of rows."""
    row_shape = rows.shape[1:]
    # This op returns its input, with None as the static row count. Then another count can be set.
    rows = tf.raw_ops.PlaceholderWithDefault(input=rows, shape=[None, *row_shape])
    rows.set_shape([1, *row_shape])
    return rows


def _without_rows(spec: tf.TensorSpec) -> tf.Tensor:
    """Return a tensor without rows, which is declared to have one."""
    if spec.dtype == tf.variant:
        return _declare_one_row(tf.raw_ops.OptionalNone()[None][:0])
    return _declare_one_row(tf.zeros([0, *(size or 0 for size in spec.shape[1:])], spec.dtype))
