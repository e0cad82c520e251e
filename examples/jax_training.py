"""Train with P×K batches in plain JAX, kill the run, and go on with the next batch.

You train in JAX without a trainer, on data that a sampler must balance. A run that is killed must
go on with the batch after its last save, and not begin its epoch again. Orbax saves the position of
the loader beside the weights:

    python jax_training.py --kill-after 25
    python jax_training.py
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from digits import SEED, decode, open_digits
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from twinfeed import ExactOnceBatchSampler, Feed, Index, JaxLoader, PKBatchSampler, Results

EPOCHS, STEPS, EVERY, RATE, MARGIN = 3, 20, 10, 0.1, 0.2


Weights = dict[str, jax.Array]


def embed(weights: Weights, pixels: jax.Array) -> jax.Array:
    """Return a point of length 1 for each image."""
    points = pixels @ weights["linear"]
    return points / jnp.linalg.norm(points, axis=1, keepdims=True)


@jax.jit
def step(weights: Weights, pixels: jax.Array, labels: jax.Array) -> Weights:
    """Return the weights after a step of the triplet loss with the hardest pairs."""

    def loss(weights: Weights) -> jax.Array:
        points = embed(weights, pixels)
        far = 2 - 2 * points @ points.T
        same = labels[:, None] == labels
        hardest = (far * same).max(1) - (far + 4 * same).min(1)
        return jnp.maximum(hardest + MARGIN, 0).mean()

    return jax.tree.map(
        lambda weight, slope: weight - RATE * slope, weights, jax.grad(loss)(weights)
    )


def train(loader: JaxLoader, weights: Weights, saves: Any, kill_after: int) -> Weights:
    """Train to the end from the last save, and save the weights and the position together."""
    if saves.latest_step() is not None:
        kept = {"weights": ocp.args.StandardRestore(weights), "loader": ocp.args.JsonRestore()}
        found = saves.restore(saves.latest_step(), args=ocp.args.Composite(**kept))
        weights = found["weights"]
        loader.load_state_dict(found["loader"])
        print(f"resuming at epoch {loader.epoch}, step {loader.step}")
    while loader.epoch < EPOCHS:
        for batch in loader:
            weights = step(weights, batch["pixels"], batch["label"])
            done = loader.epoch * STEPS + loader.step
            if done % EVERY == 0:
                kept = {
                    "weights": ocp.args.StandardSave(weights),
                    "loader": ocp.args.JsonSave(loader.state_dict()),
                }
                saves.save(done, args=ocp.args.Composite(**kept))
            if done == kill_after:
                saves.wait_until_finished()
                print(f"killed at epoch {loader.epoch}, step {loader.step}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
    return weights


def recall_at_1(weights: Weights, index: Index, rows: NamedSharding) -> float:
    """Return for how many images the nearest other image is of the same class."""
    sampler = ExactOnceBatchSampler(len(index), batch_size=64, last_batch="pad")
    results = Results(len(index))
    for batch in JaxLoader(Feed(index, sampler, decode=decode), sharding=rows):
        results.add(batch["id"], point=embed(weights, batch["pixels"]))
    points = results.gather()["point"]
    near = points @ points.T
    np.fill_diagonal(near, -1)
    return float((index.labels[near.argmax(1)] == index.labels).mean())


def main() -> None:
    """Train, or go on, and evaluate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("jax-data"))
    parser.add_argument("--kill-after", type=int, default=0, help="steps")
    parser.add_argument("--devices", type=int, default=1, help="how many the CPU is divided into")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)
    training, evaluation = open_digits(options.out)
    mesh = Mesh(np.array(jax.devices()), "data")
    rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    sampler = PKBatchSampler(training.labels, p=8, k=4, batches_per_epoch=STEPS, seed=SEED)
    loader = JaxLoader(Feed(training, sampler, decode=decode), sharding=rows)
    linear = jax.random.normal(jax.random.key(SEED), (64, 32)) / 8
    weights = jax.device_put({"linear": linear}, whole)
    with ocp.CheckpointManager((options.out / "saves").resolve()) as saves:
        weights = train(loader, weights, saves, options.kill_after)
    share = recall_at_1(weights, evaluation, rows)
    print(f"{jax.device_count()} devices: recall@1 {share:.2%} of {len(evaluation)} images")


if __name__ == "__main__":
    main()
