"""Train in TensorFlow on images with annotations; killed, go on with the next batch."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras
import tensorflow as tf
from annotations import EPOCHS, SAVED_EVERY, feeds, options
from tqdm import tqdm

from twinfeed import TensorFlowLoader


def scores(model: keras.Model, batch: dict[str, tf.Tensor]) -> tf.Tensor:
    """Give the model its pixels."""
    return model(tf.cast(tf.reshape(batch["image"], [-1, 64]), tf.float32) / 255)


def main() -> None:
    """Train, or go on training, and validate after each epoch."""
    given = options()
    loader, validator = (TensorFlowLoader(feed) for feed in feeds(given.out))
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([64]), keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, loader=loader)
    manager = tf.train.CheckpointManager(checkpoint, str(given.out / "saved"), max_to_keep=1)
    if manager.restore_or_initialize():
        print(f"goes on at epoch {loader.epoch}, step {loader.step}")

    received = 0
    while loader.epoch < EPOCHS:
        epoch = loader.epoch
        for batch in tqdm(loader, f"epoch {epoch}", len(loader), initial=loader.step):
            with tf.GradientTape() as tape:
                found = loss(batch["label"], scores(model, batch))
            optimizer.apply(tape.gradient(found, model.trainable_variables))
            received += 1
            if loader.step and loader.step % SAVED_EVERY == 0:  # step 0: not validated yet
                manager.save()
            if received == given.kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
        right = [tf.argmax(scores(model, one), axis=1) == one["label"] for one in validator]
        share = tf.reduce_mean(tf.cast(tf.concat(right, 0), tf.float32))
        print(f"epoch {epoch}: {sum(map(len, right))} images validated, {share:.1%} right")
        manager.save()


if __name__ == "__main__":
    main()
