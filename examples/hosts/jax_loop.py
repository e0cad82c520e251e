"""A loop of one's own in JAX: the n-th batch is a function of n, so a step number is the state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from same_ids import report

from twinfeed import PKBatchSampler

LABELS = np.repeat(np.arange(17), 40)
POINTS = np.random.default_rng(0).normal(LABELS[:, None], 1, (680, 8)).astype(np.float32)
SAMPLER = PKBatchSampler(LABELS, p=8, k=4, seed=0)


@jax.jit
def update(weights: jax.Array, points: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the weights after a step."""

    def loss(weights: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(points @ weights)
        return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()

    return weights - 0.01 * jax.grad(loss)(weights)


def train(weights: jax.Array, start: int, stop: int) -> jax.Array:
    """Train from one global step up to another."""
    for step in range(start, stop):
        ids = SAMPLER.batch(*divmod(step, len(SAMPLER)))
        weights = update(weights, POINTS[ids], LABELS[ids])
        delivered.append(ids)
    return weights


if __name__ == "__main__":
    delivered: list[np.ndarray] = []
    weights = train(jnp.zeros((8, 17)), 0, 25)
    np.savez("saved.npz", weights=weights, step=25)

    saved = np.load("saved.npz")
    train(jnp.asarray(saved["weights"]), int(saved["step"]), 63)
    report(delivered, SAMPLER)
