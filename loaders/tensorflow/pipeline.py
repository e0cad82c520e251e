"""One pass after the other: the frame that both engines fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from twinfeed.loaders.tensorflow.serve import Server


class Engine(Protocol):
    """Make the batches of an epoch in their order."""

    server: Server

    def epoch(self, epoch: tf.Tensor, start: tf.Tensor) -> tf.data.Dataset:
        """Make the dataset of (place, batch) of one epoch from step `start` on."""


def batches_of(
    engine: Engine,
    begin: Callable[[], tuple[np.int64, np.int64]],
    end: Callable[[np.int64], None],
    prefetch: int,
) -> tf.data.Dataset:
    """Make a dataset whose every pass runs from where `begin` says to the end of that epoch.

    `end` is called with the epoch when the last batch leaves the pipeline: after the prefetch,
    on the thread that asked for it.
    """
    last = engine.server.places - 1

    def ended(epoch: np.int64) -> bool:
        end(epoch)
        return True

    def deliver(epoch: tf.Tensor, place: tf.Tensor, batch: Any) -> Any:
        tf.cond(place == last, lambda: tf.numpy_function(ended, [epoch], tf.bool), lambda: False)
        return batch

    def one_pass(_: tf.Tensor) -> tf.data.Dataset:
        epoch, start = tf.numpy_function(begin, [], [tf.int64, tf.int64])
        epoch.set_shape([])
        start.set_shape([])
        placed = engine.epoch(epoch, start)
        return placed.map(lambda place, batch: (epoch, place, batch))

    passes = tf.data.Dataset.range(1).flat_map(one_pass)
    delivered = passes.prefetch(prefetch).map(deliver)
    options = tf.data.Options()
    options.deterministic = True
    # A prefetch after the last step would deliver batches that nobody has asked for.
    options.experimental_optimization.inject_prefetch = False
    # Each rank has its own stream: tf.distribute must not cut it once more.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return delivered.with_options(options)
