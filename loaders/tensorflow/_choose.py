"""Choose elements from datasets by numbers, and cut them into batches of any sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.tensorflow._callbacks import called
from twinfeed.loaders.tensorflow._optional import unwrapped, wrapped
from twinfeed.loaders.tensorflow._passes import START


class Sizes(NamedTuple):
    """The sizes of the batches of a pass, in the graph.

    - `each`: int64[steps].
    - `unit`: int64[], at least 1; it divides each size.
    - `same`: the size of all batches of the stream; None if the sizes differ.
    """

    each: tf.Tensor
    unit: tf.Tensor
    same: int | None


def stacked(datasets: Sequence[tf.data.Dataset]) -> tf.Tensor:
    """Stack datasets to one tensor.

    A function that takes each of 1,000 datasets by itself is slow to trace and to start.
    """
    with tf.device("/CPU:0"):
        return tf.stack([tf.data.experimental.to_variant(one) for one in datasets])


def skipped(datasets: tf.Tensor, counts: tf.Tensor, spec: Any) -> tf.Tensor:
    """Leave out the first elements of each of the datasets of this element spec."""

    def skip(dataset: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        rest = tf.data.experimental.from_variant(dataset, spec).skip(count)
        return tf.data.experimental.to_variant(rest)

    each = tf.TensorSpec([], tf.variant)
    return tf.map_fn(lambda both: skip(*both), (datasets, counts), fn_output_signature=each)


def chosen(
    datasets: tf.Tensor,
    spec: Any,
    numbers: tf.data.Dataset,
    sizes: Sizes,
    pass_state: tf.Tensor,
    ended: Callable[[Int64s, np.int64, np.int64], None],
) -> tf.data.Dataset:
    """Choose by `numbers`, int64 scalars: (step, batch) of the rest of a pass.

    `datasets` are of one element spec, stacked.

    A dataset without a further element ends the choice in silence. For the first batch that is not
    whole `ended` is called with the pass, the step, and the number of elements. It must raise.
    """
    elements = tf.data.Dataset.choose_from_datasets(
        [tf.data.experimental.from_variant(one, spec) for one in tf.unstack(datasets)],
        numbers,
        stop_on_empty_dataset=True,
    )
    batches = batched(elements, sizes)
    spec = batches.element_spec
    nothing = tf.data.Dataset.from_tensors(0).map(
        lambda _: (tf.constant(0, tf.int64), tf.raw_ops.OptionalNone())
    )
    rows = batches.map(lambda *batch: (_length(batch), wrapped(batch)))
    rows = rows.concatenate(nothing.repeat())

    def whole(step: tf.Tensor, size: tf.Tensor, row: Any) -> tuple[tf.Tensor, Any]:
        found, held = row
        fine = tf.cond(
            found < size, lambda: called(ended, [pass_state, step, found], tf.bool), lambda: True
        )
        with tf.control_dependencies([fine]):
            return step, _of_size(unwrapped(tf.identity(held), spec), sizes.same)

    start = pass_state[START]
    steps = tf.data.Dataset.range(start, start + tf.size(sizes.each, tf.int64))
    sized = tf.data.Dataset.from_tensor_slices(sizes.each)
    return tf.data.Dataset.zip((steps, sized, rows)).map(whole)


def batched(elements: tf.data.Dataset, sizes: Sizes) -> tf.data.Dataset:
    """Cut elements into batches; if they end early, the last batch is smaller."""
    if sizes.same is not None:
        return elements.batch(sizes.same)
    # In units, no element is drawn beyond the end of its batch: that element may fail.
    return elements.batch(sizes.unit).rebatch(sizes.each)


def _length(batch: Any) -> tf.Tensor:
    """Return the number of elements of a batch."""
    first = tf.nest.flatten(batch)[0]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int64)
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    return tf.shape(first, tf.int64)[0]


def _of_size(batch: Any, size: int | None) -> Any:
    """Make the size of a batch static, if it is known."""
    for part in tf.nest.flatten(batch):
        if isinstance(part, tf.Tensor) and part.shape.rank is not None:
            part.set_shape([size, *part.shape[1:]])
    return batch
