"""The number of processes in TensorFlow's cluster, and how a strategy divides batches."""

from __future__ import annotations

import warnings

import tensorflow as tf

from twinfeed.samplers import BatchStream, PKBatchSampler
from twinfeed.samplers.processes import add_probe

_WHOLE = "use strategy.distribute_datasets_from_function(loader.dataset_for) with the whole feed"


def num_workers() -> int:
    """Return the number of workers and chiefs in `TF_CONFIG`; 1 without a cluster."""
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec().as_dict()
    return max(1, sum(len(cluster.get(job, ())) for job in ("chief", "worker")))


def policy_for(sampler: BatchStream, /) -> tf.data.experimental.AutoShardPolicy:
    """Return how a strategy divides batches: by records, or not at all if they are sharded."""
    policy = tf.data.experimental.AutoShardPolicy
    return policy.OFF if sampler.sharded else policy.DATA


def check_divisible(sampler: BatchStream, /) -> None:
    """Check that a strategy may divide the batches of a sampler for the processes of its cluster.

    Warns of an evaluation, and of a stream that the caller has declared to be sharded.

    Raises:
        ValueError: the strategy would cut one rank's part again, or the classes of a P×K batch.
    """
    number = num_workers()
    if number == 1:
        return
    if sampler.world_size > 1:
        rank = f"rank {sampler.rank} of {sampler.world_size}"
        raise ValueError(f"a strategy would cut the batches of {rank} once more: {_WHOLE}")
    if sampler.evaluation or sampler.sharded:
        part = "every batch of its own" if sampler.sharded else "a part of each batch"
        warnings.warn(
            f"each of {number} processes is given {part} of {sampler!r}: for exact sums {_WHOLE}",
            stacklevel=2,
        )
    elif isinstance(sampler, PKBatchSampler):
        raise ValueError(f"a strategy would cut the classes of {sampler!r}: {_WHOLE}")


add_probe(num_workers)
