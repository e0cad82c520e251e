"""The engine that reads whole batches by id: any sampler, any container, any number of classes."""

from __future__ import annotations

import tensorflow as tf

from twinfeed.loaders.tensorflow.serve import Server


class Gather:
    """Ask for each batch by its place; `server.parallel` batches are read at once."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def epoch(self, epoch: tf.Tensor, start: tf.Tensor) -> tf.data.Dataset:
        """Make the dataset of (place, batch) of one epoch from step `start` on."""
        server = self.server
        places = tf.data.Dataset.range(start * len(server.ranks), server.places)
        return places.map(
            lambda place: (place, server.fetch(epoch, place)),
            num_parallel_calls=server.parallel,
            deterministic=True,
        )
