"""Train on P×K batches and evaluate exactly once with `tf.distribute`, whole classes per replica.

By itself it has two replicas in one process, by `MirroredStrategy`. Started once for each worker
with TF_CONFIG set, it runs over machines, by `MultiWorkerMirroredStrategy`. Started again, it goes
on after the batches that were trained on, with as many workers as there are then:

    python tensorflow_distribute.py
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import tensorflow as tf
from digits import SEED, decode, open_digits

from twinfeed import ExactOnceBatchSampler, Feed, PKBatchSampler, TensorFlowLoader


def two_replicas() -> tf.distribute.Strategy:
    """Divide this machine's processor into two devices."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1"])


def main() -> None:
    """Train two epochs, and evaluate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("distribute-data"))
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    folder: Path = options.out
    if workers := "TF_CONFIG" in os.environ:  # each machine has its own copy of the data
        folder /= f"worker-{json.loads(os.environ['TF_CONFIG'])['task']['index']}"
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if workers else two_replicas()
    index, evaluation = open_digits(folder)
    sampler = PKBatchSampler(index.labels, p=6, k=4, batches_per_epoch=20, seed=SEED)
    once = ExactOnceBatchSampler(len(evaluation), batch_size=64)
    loader = TensorFlowLoader(Feed(index, sampler, decode=decode))
    evaluator = TensorFlowLoader(Feed(evaluation, once, decode=decode))

    # Each replica gets its slice of every global batch: no class is ever cut.
    training = strategy.distribute_datasets_from_function(loader.dataset_for)
    evaluating = strategy.distribute_datasets_from_function(evaluator.dataset_for)
    with strategy.scope():
        weights = tf.Variable(tf.zeros([64, 10]))

    @tf.function
    def step(batch: Any) -> Any:
        def replica(batch: dict[str, tf.Tensor]) -> tf.Tensor:
            with tf.GradientTape() as tape:
                scores = tf.matmul(batch["pixels"], weights)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], scores)
                loss = tf.reduce_mean(losses)
            mean = tf.distribute.ReduceOp.MEAN
            gradient = tape.gradient(loss, weights)
            context = tf.distribute.get_replica_context()
            weights.assign_sub(0.5 * context.all_reduce(mean, gradient))
            return batch["label"]

        return strategy.run(replica, (batch,))

    @tf.function
    def sums(batch: Any) -> tf.Tensor:
        def replica(batch: dict[str, tf.Tensor]) -> tf.Tensor:
            right = tf.argmax(tf.matmul(batch["pixels"], weights), axis=1) == batch["label"]
            return tf.stack([tf.size(right), tf.reduce_sum(tf.cast(right, tf.int32))])

        return strategy.reduce("SUM", strategy.run(replica, (batch,)), axis=None)

    checkpoint = tf.train.Checkpoint(loader=loader, weights=weights)
    saved = tf.train.CheckpointManager(checkpoint, folder / "checkpoints", max_to_keep=1)
    if saved.restore_or_initialize():
        print(f"resuming at epoch {loader.epoch}, step {loader.step}")
    while loader.epoch < options.epochs:
        for batch in loader.track(training):
            labels = strategy.experimental_local_results(step(batch))
            if loader.step == 10:
                saved.save()
    shown = [" ".join(str(label) for label in part.numpy()[::4]) for part in labels]
    print(f"the last batch: classes {', '.join(shown)}")
    records, right = sum(sums(batch) for batch in evaluating).numpy()
    replicas = strategy.num_replicas_in_sync
    print(f"tf.distribute: {records} records over {replicas} replicas, {right / records:.2%} right")


if __name__ == "__main__":
    main()
