"""Make a `tf.data.Dataset` of the batches of all passes, whose length is that of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from twinfeed.loaders.tensorflow._batch_source import BatchSource
from twinfeed.loaders.tensorflow._callbacks import generator_dataset, numpy_function_of
from twinfeed.loaders.tensorflow._graph_source import GraphSource, PassState
from twinfeed.loaders.tensorflow._processes import auto_shard_policy

Deliver = Callable[[tf.Tensor, tf.Tensor, Any], Any]
"""A function of (pass_state, batch number, batch) that returns the batch.

The graph calls it when a batch leaves the pipeline, so that the loader sees the last batch.
"""


# Its functions do not branch on tensors in Python, so AutoGraph need not convert them.
@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def dataset_of(source: GraphSource, prefetch: int) -> tf.data.Dataset:
    """Return the dataset of the batches of `source`. Each iteration of it ends with the epoch.

    Keras reads the number of steps of an epoch from the dataset's cardinality, so this must always
    be the number for a whole epoch. But an iteration may have fewer batches, if it starts in the
    middle of the epoch, or more, if each step has a batch for each of several ranks.

    The operator `unbatch` makes this possible. Its inputs are tensors whose rows are batches, and
    it yields the rows one by one. Its cardinality is computed from the row count that the tensors
    are declared to have; the actual count may be another. For example, an epoch has 5 steps, each a
    tensor that is declared to have 1 row, so the cardinality is 5. With 2 ranks each tensor has 2
    rows. In an iteration that starts at step 3, the first 2 tensors have rows, and 3 have none.
    """
    last = source.num_batches - 1

    def deliver(pass_state: tf.Tensor, batch_number: tf.Tensor, batch: Any) -> Any:
        """Return the batch unchanged, and call `source.end_pass` if it ends the iteration.

        An iteration ends with the last batch of the epoch, or with a batch that cannot be read.
        """
        is_last = tf.equal(batch_number, last)  # in a graph of TF1, == compares objects
        has_failed = batch_number < 0  # the number that a batch gets if it cannot be read
        # No result is used: tf.data runs the call all the same, since it may have effects.
        tf.cond(
            is_last | has_failed,
            lambda: numpy_function_of(source.end_pass, [pass_state, batch_number], tf.bool),
            lambda: False,
        )
        return batch

    if isinstance(source, BatchSource) and source.batches_per_call > 1:
        batches = _by_chunk(source, prefetch, deliver)
    else:
        batches = _by_batch(source, prefetch, deliver)
    options = tf.data.Options()
    options.deterministic = True
    # A prefetch after the last step would deliver batches that were not requested.
    options.experimental_optimization.inject_prefetch = False
    options.experimental_distribute.auto_shard_policy = auto_shard_policy(source.sampler)
    batches = batches.with_options(options)
    batches.twinfeed_source = source  # the graph calls it, so it must live as long
    return batches


def _passes_of(source: GraphSource) -> tf.data.Dataset:
    """Return a dataset of one element: a `PassState`. Reading the element starts the pass."""
    return generator_dataset(source.run_pass, tf.TensorSpec([5], tf.int64))


def _by_batch(source: GraphSource, prefetch: int, deliver: Deliver) -> tf.data.Dataset:
    """Return the dataset of batches where each call into Python makes a single batch.

    The length of the dataset must always be the 5 steps of an epoch, for example, though a pass (an
    iteration of the dataset) that starts at step 3 has 2 batches. So there are always 5 tensors,
    one for each step of an epoch, and `_unbatch` makes their rows the elements of the dataset::

        tensor of     step 3   step 4   missing   missing   missing
        real rows     1        1        0         0         0
        static rows   1        1        1         1         1         together 5, the length

    When the graph runs, a tensor has a row for the batch of each rank, or no row for a missing
    step. But its static shape says 1 row (`_with_row_count`), which is deliberately wrong in some
    cases, since TensorFlow computes the length from the static shapes. Each row is a scalar, into
    which `wrap` has put a batch of any structure.

    `deliver` is called with each batch, and returns it.
    """
    # The specs of (pass state, batch number, batch), by which `unwrap` gets a batch out of a row.
    # They are known when `steps_of` is traced. TensorFlow traces it inside `flat_map` below, which
    # is before the last line of this function uses the specs.
    spec: Any = None

    def steps_of(pass_state: tf.Tensor) -> tf.data.Dataset:
        """Return a dataset with a tensor for each step of a pass: a row for each rank's batch."""
        nonlocal spec
        batches = source.batches_of(pass_state)
        spec = (tf.TensorSpec.from_tensor(pass_state), *batches.element_spec)
        if source.ranks == 1:
            return batches.map(lambda *batch: _with_row_count(1, wrap((pass_state, *batch))[None]))
        rows = batches.map(lambda *batch: wrap((pass_state, *batch)))
        rows = rows.batch(source.ranks, drop_remainder=True)
        return rows.map(lambda rows: _with_row_count(1, rows))

    def without_rows(_: tf.Tensor) -> tf.Tensor:
        one_row = tf.raw_ops.OptionalNone()[None]
        return _with_row_count(1, one_row[:0])

    steps = _passes_of(source).flat_map(steps_of)
    if prefetch:
        steps = steps.prefetch(prefetch)
    # A map makes the variants: TensorFlow cannot serialize a dataset of variants, for `snapshot`.
    missing_steps = tf.data.Dataset.from_tensors(0).repeat().map(without_rows)
    rows = _unbatch(steps.concatenate(missing_steps).take(source.steps))
    return rows.map(lambda row: deliver(*unwrap(row, spec)))


def _by_chunk(source: BatchSource, prefetch: int, deliver: Deliver) -> tf.data.Dataset:
    """Return the dataset of batches where each call into Python makes a chunk of several batches.

    A call takes as long as reading many short records. The batches of a chunk are the rows of its
    tensors. Chunks differ in size (1, 2, 4, … batches), but all are declared to have the same
    number of rows, because `unbatch` computes the cardinality, the number of steps of an epoch,
    from that. If the pass (an iteration of the dataset) starts in the middle of the epoch, chunks
    without rows are appended.
    """
    layout, num_chunks = source.layout, len(source.chunks(0))
    declared_rows = -(-source.steps // num_chunks)  # rounded up; `take` below cuts the excess
    # The specs of a row: the pass state, int64[5]; the batch number and size; arrays of the batch.
    specs = [tf.TensorSpec(shape, tf.int64) for shape in ([5], [], [])]
    size = layout.batch_size  # or None
    specs += [tf.TensorSpec([size, *spec.shape[1:]], spec.dtype) for spec in layout.flat_specs]
    types = [spec.dtype for spec in specs]

    def declare(chunk: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        """Set the static shapes of the tensors of a chunk, with `declared_rows` as first size."""
        for tensor, spec in zip(chunk, specs, strict=True):
            tensor.set_shape([None, *spec.shape])
        return tuple(_with_row_count(declared_rows, tensor) for tensor in chunk)

    def chunks_of(pass_state: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.range(PassState.unpack(pass_state).num_chunks).map(
            lambda chunk: declare(numpy_function_of(source.read_chunk, [pass_state, chunk], types)),
            **source.map_options,
        )

    def restore(
        pass_state: tf.Tensor, batch_number: tf.Tensor, real_size: tf.Tensor, *arrays: tf.Tensor
    ) -> Any:
        """Turn a row of a chunk into a batch: a dict of tensors by field name."""
        if size is None:  # batches differ in size, so shorter ones were padded: cut the padding off
            arrays = tuple(array[:real_size] for array in arrays)
        return deliver(pass_state, batch_number, layout.restore(arrays))

    no_rows = [tf.zeros([0, *(length or 0 for length in spec.shape)], spec.dtype) for spec in specs]
    missing_chunks = tf.data.Dataset.from_tensors(tuple(no_rows)).repeat()
    missing_chunks = missing_chunks.map(lambda *chunk: declare(chunk))
    num_prefetched = -(-prefetch // source.batches_per_call)  # rounded up
    chunks = _passes_of(source).flat_map(chunks_of).prefetch(num_prefetched)
    batches = _unbatch(chunks.concatenate(missing_chunks).take(num_chunks))
    return batches.take(source.steps).map(restore)


def _unbatch(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Return the dataset of the rows of tensors, as the method `Dataset.unbatch` does.

    The method would first map each tensor, to make ragged ones dense. There are none here, and the
    map would cost time for each batch.
    """
    spec = tf.nest.map_structure(
        lambda batch: tf.TensorSpec(batch.shape[1:], batch.dtype), batches.element_spec
    )
    row_specs = tf.nest.flatten(spec)
    variant = tf.raw_ops.UnbatchDataset(
        input_dataset=tf.data.experimental.to_variant(batches),
        output_types=[row.dtype for row in row_specs],
        output_shapes=[row.shape for row in row_specs],
    )
    return tf.data.experimental.from_variant(variant, spec)


def _with_row_count(count: int, rows: tf.Tensor) -> tf.Tensor:
    """Return the tensor `rows` with the static shape [count, …], which may deliberately be wrong.

    When the graph runs, the tensor has all its rows, 0 or 2 for example, though its static shape
    says 1. Nothing in `tf.data` compares the two. `unbatch`, which makes a dataset of the rows,
    computes the length of the dataset from the static shape, and iterates over the real rows. So
    the dataset always has the length of an epoch, which Keras needs, even if an iteration starts in
    the middle of the epoch and has fewer batches.
    """
    row_shape = rows.shape[1:]
    # This op returns its input, with None as the static row count. Then another count can be set.
    rows = tf.raw_ops.PlaceholderWithDefault(input=rows, shape=[None, *row_shape])
    rows.set_shape([count, *row_shape])
    return rows


def wrap(value: Any) -> tf.Tensor:
    """Wrap a structure of tensors of any shapes into one scalar, so that scalars can be batched.

    The scalar is a variant tensor that holds a TensorFlow Optional. `unwrap` is the inverse.
    """
    tensors = tf.nest.flatten(value, expand_composites=True)
    return tf.raw_ops.OptionalFromValue(components=tensors)


def unwrap(scalar: tf.Tensor, spec: Any) -> Any:
    """Return the structure of tensors that `wrap` has wrapped into a scalar variant tensor.

    `spec` is the same structure, of the specs of the tensors.
    """
    flat_specs = tf.nest.flatten(spec, expand_composites=True)
    tensors = tf.raw_ops.OptionalGetValue(
        optional=scalar,
        output_types=[part.dtype for part in flat_specs],
        output_shapes=[part.shape for part in flat_specs],
    )
    return tf.nest.pack_sequence_as(spec, tensors, expand_composites=True)
