"""Train in a loop of one's own, `tf.function` and GradientTape, validating after each epoch.

Run it, stop it (`--stop-after 25` batches), and run it again: the model, the optimizer and the
place in the data come back from one `tf.train.Checkpoint`, and the next batch is the one that the
run had not yet received.

    python examples/tensorflow_loop.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

from twinfeed.loaders import Feed, Index, open_index, pack
from twinfeed.loaders.tensorflow import TensorFlowLoader, prefetch_to_device
from twinfeed.samplers import BatchSampler, ExactOnceBatchSampler, ShardShuffleSampler

EPOCHS, BATCH, SEED = 3, 51, 7


def open_data(folder: Path) -> tuple[Index, Index]:
    """Open the shards, packed by the first run: the pixels of handwritten digits as bytes."""
    if not (folder / "eval.index").exists():
        data = load_digits()
        rows = zip(data.images.astype("uint8"), data.target, strict=True)
        samples = [{"pixels": pixels.tobytes(), "label": int(label)} for pixels, label in rows]
        pack(samples, folder, split={"train": 1036, "eval": 761}, seed=SEED)
    return open_index(folder / "train.index"), open_index(folder / "eval.index")


def scaled(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Decode a whole batch in TensorFlow operations, of fixed length as the pixels are."""
    pixels = tf.io.decode_raw(batch["pixels"], tf.uint8, fixed_length=64)
    return {**batch, "pixels": tf.cast(pixels, tf.float32) / 16}


def batches(loader: TensorFlowLoader) -> tf.data.Dataset:
    """Make the dataset: the device prefetch last, which leaves strings on the host."""
    return prefetch_to_device(loader.dataset.map(scaled))


def main() -> None:
    """Train, or go on training, and validate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("loop-data"))
    parser.add_argument("--stop-after", type=int, default=0, help="batches")
    options = parser.parse_args()
    train, evaluation = open_data(options.out)

    keras.utils.set_random_seed(SEED)
    model = keras.Sequential([keras.Input([64]), keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(model.trainable_variables)
    shuffle = ShardShuffleSampler(train.shard_lengths, block=64, window=8, seed=SEED)
    loader = TensorFlowLoader(Feed(train, BatchSampler(shuffle, batch_size=BATCH, final="drop")))
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, loader=loader)
    manager = tf.train.CheckpointManager(checkpoint, str(options.out / "saved"), max_to_keep=1)
    if manager.restore_or_initialize():
        print(f"resuming at epoch {loader.epoch}, step {loader.step}")

    @tf.function(reduce_retracing=True)
    def step(batch: dict[str, tf.Tensor]) -> None:
        with tf.GradientTape() as tape:
            logits = model(batch["pixels"], training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], logits)
            loss = tf.reduce_mean(losses)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    @tf.function(reduce_retracing=True)
    def correct(batch: dict[str, tf.Tensor]) -> tf.Tensor:
        found = tf.argmax(model(batch["pixels"], training=False), axis=1)
        return tf.reduce_sum(tf.cast(found == batch["label"], tf.int32))

    once = ExactOnceBatchSampler(len(evaluation), batch_size=64)
    training, validation = batches(loader), batches(TensorFlowLoader(Feed(evaluation, once)))
    received = 0
    while loader.epoch < EPOCHS:
        for batch in loader.counted(training):
            step(batch)
            received += 1
            if received == options.stop_after:
                manager.save()
                print(f"stopped at epoch {loader.epoch}, step {loader.step}")
                return
        manager.save()
        right = sum(int(correct(batch)) for batch in validation)
        print(f"epoch {loader.epoch}: accuracy on {len(evaluation)} {right / len(evaluation):.1%}")


if __name__ == "__main__":
    main()
