"""Train in a loop of one's own, `tf.function` and GradientTape, validating after each epoch.

Run it, stop it (`--stop-after 25` batches), and run it again: the model, the optimizer and the
place in the data come back from one `tf.train.Checkpoint`, and the next batch is the one that the
run had not yet received.

    python tensorflow_loop.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
import tensorflow as tf
from digits import SEED, decode, open_digits

from twinfeed import (
    BatchSampler,
    ExactOnceBatchSampler,
    Feed,
    ShardShuffleSampler,
    TensorFlowLoader,
    prefetch_to_device,
)

EPOCHS, BATCH = 3, 51


def main() -> None:
    """Train, or go on training, and validate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("loop-data"))
    parser.add_argument("--stop-after", type=int, default=0, help="batches")
    options = parser.parse_args()
    train, evaluation = open_digits(options.out)

    keras.utils.set_random_seed(SEED)
    model = keras.Sequential([keras.Input([64]), keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(model.trainable_variables)
    shuffle = ShardShuffleSampler(train.shard_lengths, block=64, window=8, seed=SEED)
    sampler = BatchSampler(shuffle, batch_size=BATCH, last_batch="drop")
    loader = TensorFlowLoader(Feed(train, sampler, decode=decode))
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
    evaluator = TensorFlowLoader(Feed(evaluation, once, decode=decode))
    # The device prefetch comes last. It takes batches ahead, so `track` says what was received.
    training, validation = prefetch_to_device(loader.dataset), prefetch_to_device(evaluator.dataset)
    received = 0
    while loader.epoch < EPOCHS:
        for batch in loader.track(training):
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
