"""Datasets of tf.data, from which a sampler chooses in exact proportion; stopped and resumed."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import tensorflow as tf
from same_ids import report

from twinfeed import BatchSampler, MixtureSampler, SequentialSampler, choose

LENGTHS = [480, 200]
ORDERS = [SequentialSampler(length) for length in LENGTHS]
MIXTURE = MixtureSampler(ORDERS, weights=[3, 2], num_samples=640, seed=0)
SAMPLER = BatchSampler(MIXTURE, batch_size=32)


def loader() -> Any:
    """Return a loader of two datasets of one's own, whose elements here are record ids."""
    datasets = [tf.data.Dataset.range(480), tf.data.Dataset.range(480, 680)]
    return choose(SAMPLER, [dataset.repeat() for dataset in datasets], replay=True)


if __name__ == "__main__":
    first = loader()
    delivered = [batch.numpy() for _, batch in zip(range(13), first, strict=False)]
    state = first.state_dict()

    resumed = loader()  # in another process
    resumed.load_state_dict(state)
    delivered += [batch.numpy() for _ in range(3) for batch in resumed]
    report(delivered, SAMPLER)
