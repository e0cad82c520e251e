"""One pass after the other: the frame that both engines fill."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf

from twinfeed.loaders.tensorflow.calls import called, generated
from twinfeed.loaders.tensorflow.serve import Server


class Engine(Protocol):
    """Make the batches of a pass in their order."""

    server: Server

    def epoch(self, begun: tf.Tensor) -> tf.data.Dataset:
        """Make the dataset of (place, batch) of a pass; `begun`: see `Server.passes`."""


def batches_of(engine: Engine, prefetch: int) -> tf.data.Dataset:
    """Make a dataset of the batches of `engine`, whose every pass runs to the end of an epoch.

    The cardinality is always that of a whole epoch in steps, also where a pass begins in the midst
    of one, and where each step has a batch for each of several ranks. TensorFlow has one operation
    that forgives both: `unbatch` believes the static number of rows. So the batches of a step are
    put, each as one opaque value, into rows that are said to be one, and steps without rows fill
    the epoch up.
    """
    server = engine.server
    ranks, last = len(server.ranks), server.places - 1
    spec: Any = None

    def one_pass(begun: tf.Tensor) -> tf.data.Dataset:
        nonlocal spec
        placed = engine.epoch(begun).map(lambda place, batch: (begun, place, batch))
        spec = placed.element_spec
        rows = placed.map(wrap)
        if ranks > 1:  # not for one: TensorFlow fuses the two, and makes a batch ahead
            rows = rows.batch(ranks, drop_remainder=True)
        return rows.map(_said_to_be_one)

    def wrap(*placed: Any) -> tf.Tensor:
        parts = tf.nest.flatten(placed, expand_composites=True)
        return tf.raw_ops.OptionalFromValue(components=parts)

    def deliver(wrapped: tf.Tensor) -> Any:
        flat = tf.nest.flatten(spec, expand_composites=True)
        parts = tf.raw_ops.OptionalGetValue(
            optional=wrapped,
            output_types=[one.dtype for one in flat],
            output_shapes=[one.shape for one in flat],
        )
        begun, place, batch = tf.nest.pack_sequence_as(spec, parts, expand_composites=True)
        tf.cond(
            place == last,
            lambda: called(server.delivered, [begun], tf.bool),
            lambda: False,
        )
        return batch

    passes = generated(server.passes, tf.TensorSpec([4], tf.int64)).flat_map(one_pass)
    if prefetch:
        passes = passes.prefetch(prefetch)
    steps = passes.concatenate(_empty_rows()).take(server.steps)
    delivered = steps.unbatch().map(deliver)
    options = tf.data.Options()
    options.deterministic = True
    # A prefetch after the last step would deliver batches that nobody has asked for.
    options.experimental_optimization.inject_prefetch = False
    # Each rank has its own stream: tf.distribute must not cut it once more.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    delivered = delivered.with_options(options)
    delivered.twinfeed_engine = engine  # what the graph calls lives as long as the dataset
    return delivered


def _said_to_be_one(rows: tf.Tensor) -> tf.Tensor:
    """Say that there is one row, whatever there is."""
    rows = tf.reshape(rows, [-1])
    rows = tf.raw_ops.PlaceholderWithDefault(input=rows, shape=[None])  # forget what is known
    rows.set_shape([1])
    return rows


def _empty_rows() -> tf.data.Dataset:
    """Make an endless dataset of steps without rows, each said to have one."""
    empty = tf.data.Dataset.from_tensors(tf.raw_ops.OptionalNone()[None][:0])
    return empty.map(_said_to_be_one).repeat()
