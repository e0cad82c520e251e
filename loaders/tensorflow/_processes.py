"""The number of processes in TensorFlow's cluster, and how a strategy divides batches."""

from __future__ import annotations

import warnings

import tensorflow as tf

from twinfeed.samplers import BatchStream, PKBatchSampler
from twinfeed.samplers.processes import add_probe

_ADVISE_DATASET_FOR = (
    "use strategy.distribute_datasets_from_function(loader.dataset_for) with the whole feed"
)


def num_workers() -> int:
    """Return the number of training processes, the workers and chiefs of `TF_CONFIG`, or 1."""
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec().as_dict()
    return max(1, sum(len(cluster.get(job, ())) for job in ("chief", "worker")))


def auto_shard_policy(sampler: BatchStream, /) -> tf.data.experimental.AutoShardPolicy:
    """Return how a `tf.distribute` strategy shall divide the batches of a sampler's dataset.

    Each process gets a part of the records of each batch, or, if the sampler is declared to be
    sharded, all batches as they are.
    """
    policy = tf.data.experimental.AutoShardPolicy
    return policy.OFF if sampler.sharded else policy.DATA


def check_auto_shard(sampler: BatchStream, /) -> None:
    """Check that a `tf.distribute` strategy may divide a sampler's batches among its processes.

    Warns if the processes' sums would not be exact: in an evaluation, and if the caller has
    declared the sampler to be sharded.

    Raises:
        ValueError: the batches are of one rank already, or their classes (P×K) would be divided.
    """
    number = num_workers()
    if number == 1:
        return
    if sampler.world_size > 1:
        rank = f"rank {sampler.rank} of {sampler.world_size}"
        raise ValueError(
            f"a strategy would cut the batches of {rank} once more: {_ADVISE_DATASET_FOR}"
        )
    if sampler.evaluation or sampler.sharded:
        part = "every batch of its own" if sampler.sharded else "a part of each batch"
        warnings.warn(
            f"each of {number} processes is given {part} of {sampler!r}: for exact sums "
            f"{_ADVISE_DATASET_FOR}",
            stacklevel=2,
        )
    elif isinstance(sampler, PKBatchSampler):
        raise ValueError(f"a strategy would cut the classes of {sampler!r}: {_ADVISE_DATASET_FOR}")


add_probe(num_workers)
