"""Train a Keras model with `fit` on P×K batches of real images, stopped and resumed at any step.

Run it, stop it (Ctrl-C, or `--stop-after 25` batches), and run it again: it goes on from
the last save, of every 5 batches, and ends with the same weights as a run that was never stopped.

    python keras_fit.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from digits import SEED, decode, open_digits

from twinfeed import ExactOnceBatchSampler, Feed, PKBatchSampler, ResumeCallback, TensorFlowLoader

EPOCHS, STEPS = 3, 20


def pairs(batch: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Make inputs and targets of a batch."""
    return batch["pixels"], batch["label"]


class StopAfter(keras.callbacks.Callback):
    """Stop the run after some batches, as Ctrl-C would."""

    def __init__(self, number: int, loader: TensorFlowLoader) -> None:
        super().__init__()
        self.left, self.loader = number or -1, loader

    def get_state(self) -> dict[str, Any]:
        """Know nothing that a resumed run needs."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Count anew in each run."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Say where the training begins."""
        if (self.loader.epoch, self.loader.step) > (0, 0):
            print(f"resuming at epoch {self.loader.epoch}, step {self.loader.step}")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Count down."""
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1


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
    resume = ResumeCallback(loader, options.out / "saved", save_freq=5)
    stop = StopAfter(options.stop_after, loader)
    try:
        resume.fit(model, pairs, epochs=EPOCHS, verbose=0, callbacks=[stop])
    except KeyboardInterrupt:
        print(f"stopped at epoch {loader.epoch}, step {loader.step}")
        return

    once = ExactOnceBatchSampler(len(evaluation), batch_size=64)
    evaluator = TensorFlowLoader(Feed(evaluation, once, decode=decode))
    accuracy = model.evaluate(evaluator.dataset.map(pairs), verbose=0)[1]
    print(f"evaluated {len(evaluation)} images, each once: accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
