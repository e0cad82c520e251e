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
"""A function of (pass_state, batch number, batch) that returns the batch."""


# No function branches on a tensor.
@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def dataset_of(source: GraphSource, prefetch: int) -> tf.data.Dataset:
    """Return the dataset of the batches of `source`. Each iteration of it ends with the epoch.

    The cardinality, which Keras takes for the length, is always the number of steps of a whole
    epoch. But an iteration (a pass) may start in the middle of an epoch, and a step may have a
    batch for each of several ranks. `unbatch` makes this possible: the cardinality of its output is
    computed from the static number of rows of its input, whatever the real number is.
    """
    last = source.num_batches - 1

    def deliver(pass_state: tf.Tensor, batch_number: tf.Tensor, batch: Any) -> Any:
        is_last = tf.equal(batch_number, last)  # in a graph of TF1, == compares objects
        has_error = batch_number < 0
        tf.cond(
            is_last | has_error,
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
    """Return a dataset of one element, the `PassState` of a pass, which starts when it is read."""
    return generator_dataset(source.run_pass, tf.TensorSpec([5], tf.int64))


def _by_batch(source: GraphSource, prefetch: int, deliver: Deliver) -> tf.data.Dataset:
    """Return the dataset of batches where each call of Python makes a single batch.

    The batches of a step, one for each rank, are wrapped into the rows of a variant tensor, which
    is declared to have one row. If the pass starts in the middle of the epoch, empty tensors are
    appended up to the number of steps of an epoch. Then all are unbatched (see `dataset_of`).
    """
    spec: Any = None

    def steps_of(pass_state: tf.Tensor) -> tf.data.Dataset:
        nonlocal spec
        batches = source.batches_of(pass_state)
        spec = (tf.TensorSpec.from_tensor(pass_state), *batches.element_spec)
        if source.ranks == 1:
            return batches.map(lambda *batch: _with_row_count(1, wrap((pass_state, *batch))[None]))
        rows = batches.map(lambda *batch: wrap((pass_state, *batch)))
        rows = rows.batch(source.ranks, drop_remainder=True)
        return rows.map(lambda rows: _with_row_count(1, rows))

    steps = _passes_of(source).flat_map(steps_of)
    if prefetch:
        steps = steps.prefetch(prefetch)
    # Made within the map: TensorFlow cannot serialize a dataset of empty variants, for snapshot.
    filler = tf.data.Dataset.from_tensors(0).repeat()
    filler = filler.map(lambda _: _with_row_count(1, tf.raw_ops.OptionalNone()[None][:0]))
    rows = _unbatch(steps.concatenate(filler).take(source.steps))
    return rows.map(lambda row: deliver(*unwrap(row, spec)))


def _by_chunk(source: BatchSource, prefetch: int, deliver: Deliver) -> tf.data.Dataset:
    """Return the dataset of batches where each call of Python makes a chunk of several batches.

    A call costs as much time as many short records. The batches of a chunk are the rows of its
    tensors, which are declared to have the same number of rows for every chunk. If the pass starts
    in the middle of the epoch, empty chunks are appended. Then all are unbatched (see
    `dataset_of`).
    """
    layout, num_chunks = source.layout, len(source.chunks(0))
    rows_per_chunk = -(-source.steps // num_chunks)
    specs = [tf.TensorSpec([5], tf.int64), *[tf.TensorSpec([], tf.int64)] * 2]
    specs += [tf.TensorSpec([layout.batch, *spec.shape[1:]], spec.dtype) for spec in layout.flat]
    types = [spec.dtype for spec in specs]

    def declare(chunk: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        for part, spec in zip(chunk, specs, strict=True):
            part.set_shape([None, *spec.shape])
        return tuple(_with_row_count(rows_per_chunk, part) for part in chunk)

    def chunks_of(pass_state: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.range(PassState.unpack(pass_state).num_chunks).map(
            lambda chunk: declare(numpy_function_of(source.read_chunk, [pass_state, chunk], types)),
            **source.map_options,
        )

    def restore(
        pass_state: tf.Tensor, number: tf.Tensor, size: tf.Tensor, *parts: tf.Tensor
    ) -> Any:
        if layout.batch is None:
            parts = tuple(part[:size] for part in parts)
        return deliver(pass_state, number, layout.restore(parts))

    empty = [tf.zeros([0, *(size or 0 for size in spec.shape)], spec.dtype) for spec in specs]
    filler = tf.data.Dataset.from_tensors(tuple(empty)).map(lambda *chunk: declare(chunk)).repeat()
    chunks_ahead = -(-prefetch // source.batches_per_call)
    chunks = _passes_of(source).flat_map(chunks_of).prefetch(chunks_ahead)
    return _unbatch(chunks.concatenate(filler).take(num_chunks)).take(source.steps).map(restore)


def _unbatch(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Return the dataset of the rows of batches, as `Dataset.unbatch` does, but without its map."""
    spec = tf.nest.map_structure(
        lambda batch: tf.TensorSpec(batch.shape[1:], batch.dtype), batches.element_spec
    )
    flat = tf.nest.flatten(spec)
    variant = tf.raw_ops.UnbatchDataset(
        input_dataset=tf.data.experimental.to_variant(batches),
        output_types=[row.dtype for row in flat],
        output_shapes=[row.shape for row in flat],
    )
    return tf.data.experimental.from_variant(variant, spec)


def _with_row_count(count: int, rows: tf.Tensor) -> tf.Tensor:
    """Declare that the tensor `rows` has `count` rows, whatever its number is at run time."""
    row_shape = rows.shape[1:]
    rows = tf.raw_ops.PlaceholderWithDefault(input=rows, shape=[None, *row_shape])
    rows.set_shape([count, *row_shape])
    return rows


def wrap(value: Any) -> tf.Tensor:
    """Wrap tensors of any structure and shape into a scalar variant tensor."""
    parts = tf.nest.flatten(value, expand_composites=True)
    return tf.raw_ops.OptionalFromValue(components=parts)


def unwrap(scalar: tf.Tensor, spec: Any) -> Any:
    """Return the tensors of a scalar made by `wrap`; `spec` is the spec of each, as a structure."""
    flat = tf.nest.flatten(spec, expand_composites=True)
    parts = tf.raw_ops.OptionalGetValue(
        optional=scalar,
        output_types=[part.dtype for part in flat],
        output_shapes=[part.shape for part in flat],
    )
    return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)
