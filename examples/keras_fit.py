"""Train a Keras model with `fit` on P×K batches of real images, stopped and resumed at any step.

Run it, stop it (Ctrl-C, or `--stop-after 25` batches), and run it again: it goes on with the very
next batch, and ends with the same weights as a run that was never stopped.

    python keras_fit.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from digits import SEED, decode, open_digits

from twinfeed.loaders import Feed
from twinfeed.loaders.keras import ResumeCallback
from twinfeed.loaders.tensorflow import TensorFlowLoader, prefetch_to_device
from twinfeed.samplers import ExactOnceBatchSampler, PKBatchSampler

EPOCHS, STEPS = 3, 20


def batches(loader: TensorFlowLoader) -> tf.data.Dataset:
    """Make pairs of inputs and targets, on the device."""
    pairs = loader.dataset.map(lambda batch: (batch["pixels"], batch["label"]))
    return prefetch_to_device(pairs)


class StopAfter(keras.callbacks.Callback):
    """Stop the run after some batches, as Ctrl-C would."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count down."""
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def main() -> None:
    """Train, or go on training, and evaluate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("keras-data"))
    parser.add_argument("--stop-after", type=int, default=0, help="batches")
    options = parser.parse_args()
    train, evaluation = open_digits(options.out)

    keras.utils.set_random_seed(SEED)
    model = keras.Sequential(
        [
            keras.Input([64]),
            keras.layers.Reshape([8, 8, 1]),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])

    sampler = PKBatchSampler(train.labels, p=8, k=4, batches_per_epoch=STEPS, seed=SEED)
    loader = TensorFlowLoader(Feed(train, sampler, decode=decode))
    resume = ResumeCallback(loader, options.out / "saved", every=5)
    if resume.restore(model):
        print(f"resuming at epoch {loader.epoch}, step {loader.step}")
    try:
        model.fit(
            batches(loader),
            initial_epoch=loader.epoch,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=[resume, StopAfter(options.stop_after)],
        )
    except KeyboardInterrupt:
        print(f"stopped at epoch {loader.epoch}, step {loader.step}")
        return

    once = ExactOnceBatchSampler(len(evaluation), batch_size=64)
    evaluator = TensorFlowLoader(Feed(evaluation, once, decode=decode))
    accuracy = model.evaluate(batches(evaluator), verbose=0)[1]
    print(f"evaluated {len(evaluation)} images, each once: accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
