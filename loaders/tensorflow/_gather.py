"""The engine that reads whole batches by id: any sampler, any container, any number of classes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from twinfeed.loaders.tensorflow._passes import START
from twinfeed.loaders.tensorflow._serve import Server


class Gather:
    """Read each batch by its place; `server.parallel` batches are read at once."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def epoch(self, pass_state: tf.Tensor) -> tf.data.Dataset:
        """Make the dataset of (place, batch) of one pass."""
        server = self.server
        places = tf.data.Dataset.range(pass_state[START] * server.ranks, server.places)

        def fetch(place: tf.Tensor) -> tuple[tf.Tensor, Any]:
            return place, server.fetch(pass_state, place)

        return server.mapped(places, fetch, server.parallel)
