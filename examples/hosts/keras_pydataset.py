"""A PyDataset of one's own: item n is the n-th batch of the training, in whatever epoch."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras
import numpy as np
from same_ids import report

from twinfeed import PKBatchSampler

LABELS = np.repeat(np.arange(17), 40)
POINTS = np.random.default_rng(0).normal(LABELS[:, None], 1, (680, 8)).astype(np.float32)
SAMPLER = PKBatchSampler(LABELS, p=8, k=4, seed=0)


class Batches(keras.utils.PyDataset):
    """The batches of all epochs, from an epoch on."""

    num_batches = None  # without an end, so `fit` goes on where the epoch before ended

    def __init__(self, epoch: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.start = epoch * len(SAMPLER)

    def __getitem__(self, item: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        ids = SAMPLER.batch(*divmod(self.start + item, len(SAMPLER)))
        return {"id": ids, "x": POINTS[ids]}, LABELS[ids]


class Model(keras.Model):
    """A model that keeps the ids of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(17)

    def call(self, inputs: dict[str, Any]) -> Any:
        return self.dense(inputs["x"])

    def train_step(self, *arguments: Any) -> Any:
        inputs, _ = arguments[-1]  # after a state, on JAX's backend
        delivered.append(np.asarray(inputs["id"]))
        return super().train_step(*arguments)


def fit(first: int, epochs: int, **options: Any) -> None:
    """Train from an epoch up to another."""
    model = Model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, run_eagerly=True)
    model.fit(
        Batches(first, **options),
        initial_epoch=first,
        epochs=epochs,
        steps_per_epoch=len(SAMPLER),
        verbose=0,
    )


if __name__ == "__main__":
    delivered: list[np.ndarray] = []
    fit(0, 2, workers=2 if keras.backend.backend() == "tensorflow" else 1)
    fit(2, 3)  # resumed at an epoch
    report(delivered, SAMPLER)
