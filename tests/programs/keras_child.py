"""A training whose weights take long to write, for a process that is killed while it writes."""

import os
import sys
from pathlib import Path
from typing import Any

import keras
from support.tensorflow_feeds import loader, packed

from twinfeed.loaders.keras import ResumeCallback
from twinfeed.loaders.tensorflow import TensorFlowLoader
from twinfeed.samplers import BatchSampler, RandomSampler

WIDTH = 4_000_000


def run(folder: Path, *, train: bool) -> tuple[keras.Model, TensorFlowLoader]:
    one = loader(packed(61), BatchSampler(RandomSampler(61, seed=1), batch_size=8))
    network = keras.Sequential([keras.Input([1]), keras.layers.Dense(WIDTH), Mean()])
    network.compile("adam", "mse")
    resume = ResumeCallback(one, folder, save_freq=8, order="unchecked")
    resume.restore(network)
    if train:
        options = {"epochs": 2, "verbose": 0, "shuffle": False}
        network.fit(one.dataset.map(pairs), callbacks=[resume], **options)
    return network, one


class Mean(keras.layers.Layer):
    def call(self, outputs: Any) -> Any:
        return keras.ops.mean(outputs, axis=-1, keepdims=True)


def pairs(batch: dict[str, Any]) -> tuple[Any, Any]:
    labels = keras.ops.cast(batch["label"], "float32")[:, None]
    return labels, labels


if __name__ == "__main__":
    print(os.getpid(), flush=True)  # of the process that is to be killed
    run(Path(sys.argv[1]), train=True)
