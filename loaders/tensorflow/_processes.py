"""The number of processes in TensorFlow's cluster, and how a strategy divides batches."""

from __future__ import annotations

import warnings

import tensorflow as tf

from twinfeed.samplers import BatchStream, PKBatchSampler
from twinfeed.samplers.processes import add_probe

_ADVISE_DATASET_FOR = "use strategy.distribute_datasets_from_function(loader.dataset_for)"


def num_workers() -> int:
    """Return the number of training processes, the workers and chiefs of `TF_CONFIG`, or 1."""
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec().as_dict()
    return max(1, sum(len(cluster.get(job, ())) for job in ("chief", "worker")))


def auto_shard_policy(sampler: BatchStream, /) -> tf.data.experimental.AutoShardPolicy:
    """Return how a `tf.distribute` strategy shall divide the batches of a sampler's dataset."""
    policy = tf.data.experimental.AutoShardPolicy
    return policy.OFF if sampler.sharded else policy.DATA


def check_auto_shard(sampler: BatchStream, /) -> None:
    """Raise ValueError, or warn, if a strategy may not divide batches among its processes."""
    processes = num_workers()
    if processes == 1:
        return
    if sampler.world_size > 1:
        raise ValueError(
            f"a strategy would divide the batches of rank {sampler.rank} of {sampler.world_size} "
            f"again: {_ADVISE_DATASET_FOR}, and give the loader the feed of all ranks"
        )
    if sampler.evaluation or sampler.sharded:
        batches = "batches of its own" if sampler.sharded else "a part of each batch"
        warnings.warn(
            f"each of {processes} processes gets {batches} of {sampler!r}, so a metric over all "
            f"processes is not exact: {_ADVISE_DATASET_FOR}",
            stacklevel=2,
        )
    elif isinstance(sampler, PKBatchSampler):
        raise ValueError(f"a strategy would divide classes of {sampler!r}: {_ADVISE_DATASET_FOR}")


add_probe(num_workers)
