"""Train a Keras model with `fit` on P×K batches of real images, stopped and resumed at any step.

Run it, stop it (Ctrl-C, or `--stop-after 25` batches), and run it again: it goes on with the very
next batch, and ends with the same weights as a run that was never stopped.

    python examples/keras_fit.py
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from PIL import Image
from sklearn.datasets import load_digits

from twinfeed.loaders import Feed, Index, open_index, pack
from twinfeed.loaders.keras import ResumeCallback
from twinfeed.loaders.tensorflow import TensorFlowLoader, prefetch_to_device
from twinfeed.samplers import ExactOnceBatchSampler, PKBatchSampler

EPOCHS, STEPS, SEED = 3, 20, 7


def digits() -> list[dict[str, Any]]:
    """Give scikit-learn's 1,797 handwritten digits as PNG files and labels."""
    samples = []
    data = load_digits()
    for pixels, label in zip(data.images, data.target, strict=True):
        file = io.BytesIO()
        Image.fromarray((pixels * 255 / 16).astype("uint8")).save(file, "png")
        samples.append({"image": file.getvalue(), "label": int(label)})
    return samples


def open_data(folder: Path) -> tuple[Index, Index]:
    """Open the shards, packed by the first run."""
    if not (folder / "eval.index").exists():
        pack(digits(), folder, split={"train": 1036, "eval": 761}, seed=SEED)
    return open_index(folder / "train.index"), open_index(folder / "eval.index")


def decode_png(file: tf.Tensor) -> tf.Tensor:
    """Decode one image in TensorFlow operations."""
    pixels = tf.io.decode_png(file, channels=1)
    return tf.ensure_shape(tf.cast(pixels, tf.float32) / 255, [8, 8, 1])


def inputs_and_targets(batch: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Give `fit` what it takes, of batches of any size."""
    spec = tf.TensorSpec([8, 8, 1], tf.float32)
    return tf.map_fn(decode_png, batch["image"], fn_output_signature=spec), batch["label"]


def batches(loader: TensorFlowLoader) -> tf.data.Dataset:
    """Make the dataset: decoding in the map's threads, and the device prefetch last."""
    return prefetch_to_device(loader.dataset.map(inputs_and_targets, num_parallel_calls=2))


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
    train, evaluation = open_data(options.out)

    keras.utils.set_random_seed(SEED)
    model = keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])

    sampler = PKBatchSampler(train.labels, p=8, k=4, batches_per_epoch=STEPS, seed=SEED)
    loader = TensorFlowLoader(Feed(train, sampler))
    resume = ResumeCallback(loader, options.out / "saved", every=5)
    if resume.restore(model):
        print(f"resuming at epoch {loader.epoch}, step {loader.step}")
    try:
        model.fit(
            batches(loader),
            initial_epoch=loader.epoch,
            epochs=EPOCHS,
            shuffle=False,
            callbacks=[resume, StopAfter(options.stop_after)],
        )
    except KeyboardInterrupt:
        print(f"stopped at epoch {loader.epoch}, step {loader.step}")
        return

    once = ExactOnceBatchSampler(len(evaluation), batch_size=64)
    accuracy = model.evaluate(batches(TensorFlowLoader(Feed(evaluation, once))))[1]
    print(f"evaluated {len(evaluation)} images, each once: accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
