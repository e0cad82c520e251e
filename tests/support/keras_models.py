"""What the tests of Keras share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import keras

from support.tensorflow_feeds import CLASSES, RECORDS, loader, numbers, packed
from twinfeed.loaders.tensorflow import TensorFlowLoader
from twinfeed.samplers import BatchSampler, RandomSampler


def made(seed: int = 1) -> TensorFlowLoader:
    stream = BatchSampler(RandomSampler(RECORDS, seed=seed), batch_size=8)
    return loader(packed(RECORDS), stream, decode=numbers)


def pairs(batch: dict[str, Any]) -> tuple[Any, Any]:
    return batch["x"], batch["label"]


def model(optimizer: Any = "adam", *first: keras.layers.Layer, units: int = CLASSES) -> keras.Model:
    keras.utils.set_random_seed(1)
    network = keras.Sequential([keras.Input([5]), *first, keras.layers.Dense(units)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(optimizer, loss, run_eagerly=True)
    return network


def names(folder: Path) -> list[str]:
    """Return the names of all files in a folder of saves, without the suffix."""
    return sorted(path.name.removesuffix(".weights.h5") for path in folder.iterdir())


def state_of(file: Path) -> dict[str, Any]:
    """Return the state that a save has, without its arrays."""
    with h5py.File(file) as weights:
        state: dict[str, Any] = json.loads(weights["twinfeed.state/state"].asstr()[()])
    return state


class Interrupt(keras.callbacks.Callback):
    """End `fit` within a batch, as Ctrl-C or a killed job does."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
