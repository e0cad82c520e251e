"""A tf.data pipeline of one's own, which begins with ids, and resumes at any batch."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import numpy as np
import tensorflow as tf
from same_ids import report

from twinfeed import BatchSampler, IdSequence, RandomSampler

POINTS = tf.constant(np.random.default_rng(0).normal(size=(680, 8)).astype(np.float32))
SAMPLER = RandomSampler(680, seed=0)


def pipeline(start: int) -> tf.data.Dataset:
    """Return the batches of five epochs from one on, each a pair of ids and points."""
    ids = IdSequence(SAMPLER, epochs=5)[32 * start :]
    dataset = tf.data.Dataset.from_tensor_slices(np.asarray(ids))
    dataset = dataset.map(lambda n: (n, POINTS[n]), num_parallel_calls=2, deterministic=True)
    return dataset.batch(32).prefetch(2)


if __name__ == "__main__":
    delivered = [ids.numpy() for ids, points in pipeline(0).take(30)]
    delivered += [ids.numpy() for ids, points in pipeline(30)]
    report(delivered, BatchSampler(SAMPLER, batch_size=32))
