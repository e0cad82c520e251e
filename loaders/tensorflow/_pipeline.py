"""The batches of all passes as a dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from twinfeed.loaders.tensorflow._callbacks import called, generated
from twinfeed.loaders.tensorflow._optional import unwrapped, wrapped
from twinfeed.loaders.tensorflow._passes import CALLS, PassServer
from twinfeed.loaders.tensorflow._processes import policy_for
from twinfeed.loaders.tensorflow._serve import Server

Placed = Callable[[Callable[[tf.Tensor, tf.Tensor, Any], Any]], tf.data.Dataset]
"""Map a function of (pass_state, place, batch) over the batches of all passes."""


# No function branches on a tensor.
@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def batches_of(server: PassServer, prefetch: int) -> tf.data.Dataset:
    """Make a dataset of the batches of `server`. Each pass runs to the end of an epoch.

    The cardinality, which Keras takes for the length, is always the number of steps of a whole
    epoch. But a pass may begin in the middle of an epoch, and a step may have a batch for each of
    several ranks. `unbatch` allows both, since it relies on the static number of rows.
    """
    last = server.places - 1
    passes = generated(server.passes, tf.TensorSpec([5], tf.int64))
    if isinstance(server, Server) and server.together > 1:
        placed = _in_calls(server, passes, prefetch)
    else:
        placed = _in_steps(server, passes, prefetch)

    def deliver(pass_state: tf.Tensor, place: tf.Tensor, batch: Any) -> Any:
        tf.cond(
            tf.equal(place, last) | (place < 0),  # in a graph of TF1, == compares objects
            lambda: called(server.delivered, [pass_state, place], tf.bool),
            lambda: False,
        )
        return batch

    delivered = placed(deliver)
    options = tf.data.Options()
    options.deterministic = True
    # A prefetch after the last step would deliver batches that were not requested.
    options.experimental_optimization.inject_prefetch = False
    options.experimental_distribute.auto_shard_policy = policy_for(server.sampler)
    delivered = delivered.with_options(options)
    delivered.twinfeed_server = server  # the graph calls it, so it must live as long
    return delivered


def _in_steps(server: PassServer, passes: tf.data.Dataset, prefetch: int) -> Placed:
    """Make the batches one by one.

    Each batch of a step is wrapped into one opaque value. The values are the rows of the step,
    which is declared to have one row. Steps without rows fill the epoch up.
    """
    spec: Any = None

    def one_pass(pass_state: tf.Tensor) -> tf.data.Dataset:
        nonlocal spec
        placed = server.epoch(pass_state)
        spec = (tf.TensorSpec.from_tensor(pass_state), *placed.element_spec)
        if server.ranks == 1:
            return placed.map(lambda *batch: _said_to_be(1, wrapped((pass_state, *batch))[None]))
        rows = placed.map(lambda *batch: wrapped((pass_state, *batch)))
        rows = rows.batch(server.ranks, drop_remainder=True)
        return rows.map(lambda rows: _said_to_be(1, rows))

    passes = passes.flat_map(one_pass)
    if prefetch:
        passes = passes.prefetch(prefetch)
    # Made within the map: TensorFlow cannot write out a dataset of no opaque values, for snapshot.
    none = tf.data.Dataset.from_tensors(0).repeat()
    none = none.map(lambda _: _said_to_be(1, tf.raw_ops.OptionalNone()[None][:0]))
    rows = _unbatched(passes.concatenate(none).take(server.steps))
    return lambda deliver: rows.map(lambda row: deliver(*unwrapped(row, spec)))


def _in_calls(server: Server, passes: tf.data.Dataset, prefetch: int) -> Placed:
    """Make several batches by each call into Python: a call costs as much as many short records.

    The batches of a call are its rows. Every call is declared to give the same number of rows.
    Calls without rows fill the epoch up.
    """
    layout = server.layout
    calls = len(server.calls(0))
    specs = [tf.TensorSpec([5], tf.int64), *[tf.TensorSpec([], tf.int64)] * 2]
    specs += [tf.TensorSpec([layout.batch, *one.shape[1:]], one.dtype) for one in layout.flat]

    def said(rows: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        for one, spec in zip(rows, specs, strict=True):
            one.set_shape([None, *spec.shape])
        return tuple(_said_to_be(-(-server.steps // calls), one) for one in rows)

    def one_pass(pass_state: tf.Tensor) -> tf.data.Dataset:
        types = [spec.dtype for spec in specs]
        numbers = tf.data.Dataset.range(pass_state[CALLS])
        return server.mapped(
            numbers,
            lambda call: said(called(server.read_together, [pass_state, call], types)),
            server.parallel,
        )

    def single(pass_state: tf.Tensor, place: tf.Tensor, size: tf.Tensor, *parts: tf.Tensor) -> Any:
        if layout.batch is None:
            parts = tuple(part[:size] for part in parts)
        return pass_state, place, layout.restore(parts)

    empty = [tf.zeros([0, *(size or 0 for size in spec.shape)], spec.dtype) for spec in specs]
    none = tf.data.Dataset.from_tensors(tuple(empty)).map(lambda *rows: said(rows)).repeat()
    passes = passes.flat_map(one_pass).prefetch(-(-prefetch // server.together))
    rows = _unbatched(passes.concatenate(none).take(calls)).take(server.steps)
    return lambda deliver: rows.map(lambda *row: deliver(*single(*row)))


def _unbatched(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Cut batches of plain tensors into rows: `unbatch` maps them to plain tensors before."""
    spec = tf.nest.map_structure(
        lambda one: tf.TensorSpec(one.shape[1:], one.dtype), batches.element_spec
    )
    flat = tf.nest.flatten(spec)
    variant = tf.raw_ops.UnbatchDataset(
        input_dataset=tf.data.experimental.to_variant(batches),
        output_types=[one.dtype for one in flat],
        output_shapes=[one.shape for one in flat],
    )
    return tf.data.experimental.from_variant(variant, spec)


def _said_to_be(number: int, rows: tf.Tensor) -> tf.Tensor:
    """Override the static row count, so that len(dataset) is a whole epoch's."""
    rest = rows.shape[1:]
    rows = tf.raw_ops.PlaceholderWithDefault(input=rows, shape=[None, *rest])  # forget the number
    rows.set_shape([number, *rest])
    return rows
