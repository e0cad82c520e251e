"""Train and evaluate with `tf.distribute`, and write down what each replica received.

By itself it has two replicas in this process. Started once for each worker with TF_CONFIG set, it
runs over processes; with `--workers 2` it starts them itself.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from digits import SEED, decode, open_digits
from support.programs import PYTHON

from twinfeed.loaders import Feed, Index
from twinfeed.loaders.tensorflow import TensorFlowLoader
from twinfeed.samplers import ExactOnceBatchSampler, PKBatchSampler


def train(strategy: tf.distribute.Strategy, index: Index, evaluation: Index) -> dict[str, Any]:
    """Train two epochs in a loop of its own; return what the replicas of this process received."""
    sampler = PKBatchSampler(index.labels, p=6, k=4, batches_per_epoch=15, seed=SEED)
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
                logits = tf.matmul(batch["pixels"], weights)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], logits)
                loss = tf.reduce_mean(losses)
            together = tf.distribute.get_replica_context().all_reduce(
                tf.distribute.ReduceOp.MEAN, tape.gradient(loss, weights)
            )
            weights.assign_sub(0.1 * together)
            return batch["label"]

        return strategy.run(replica, (batch,))

    @tf.function
    def correct(batch: Any) -> tuple[Any, tf.Tensor]:
        def replica(batch: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
            found = tf.argmax(tf.matmul(batch["pixels"], weights), axis=1)
            return batch["id"], tf.reduce_sum(tf.cast(found == batch["label"], tf.int64))

        ids, right = strategy.run(replica, (batch,))
        return ids, strategy.reduce("SUM", right, axis=None)

    labels: list[list[list[int]]] = []
    for _ in range(2):
        for batch in loader.track(training):
            parts = strategy.experimental_local_results(step(batch))
            labels.append([part.numpy().tolist() for part in parts])
    seen: list[int] = []
    right = 0
    for batch in evaluating:
        ids, number = correct(batch)
        seen += np.concatenate(strategy.experimental_local_results(ids)).tolist()
        right += int(number)
    return {"labels": labels, "evaluated": seen, "accuracy": right / len(evaluation)}


def start_workers(number: int, out: Path) -> int:
    """Start this script once for each worker, and wait for all of them."""
    ports = []
    for _ in range(number):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            ports.append(free.getsockname()[1])
    addresses = [f"localhost:{port}" for port in ports]
    workers = []
    for rank in range(number):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        environment = os.environ | {"TF_CONFIG": json.dumps(config)}
        command = [PYTHON, __file__, "--out", str(out)]
        workers.append(subprocess.Popen(command, env=environment))
    return max(worker.wait() for worker in workers)


def main() -> int:
    """Run as a single process, as a worker, or as the process that starts the workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("distribute-data"))
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"index": 0})
    name = f"worker-{task['index']}.json"
    index, evaluation = open_digits(options.out)
    if options.workers:
        return start_workers(options.workers, options.out)
    if "TF_CONFIG" in os.environ:
        strategy: tf.distribute.Strategy = tf.distribute.MultiWorkerMirroredStrategy()
    else:
        cpu = tf.config.list_physical_devices("CPU")[0]
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
        strategy = tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1"])
    result = train(strategy, index, evaluation)
    (options.out / name).write_text(json.dumps(result))
    print(
        f"{name}: {len(result['labels'])} batches, {len(result['evaluated'])} records evaluated "
        f"here, accuracy over all {len(evaluation)}: {result['accuracy']:.1%}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
