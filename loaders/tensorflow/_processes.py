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
    """Return how a `tf.distribute` strategy shall divide the batches of a sampler's dataset.

    DATA: each process gets a part of the records of each batch. OFF, if the sampler is sharded:
    each process gets the whole batches of its dataset.
    """
    policy = tf.data.experimental.AutoShardPolicy
    return policy.OFF if sampler.sharded else policy.DATA


def check_auto_shard(sampler: BatchStream, /) -> None:
    """Check that a `tf.distribute` strategy may divide a sampler's batches among its processes.

    With 2 processes, each process gets half of the records of every batch. But if the sampler is
    sharded, a process gets the whole batches of its dataset. A user who has other files in each
    process calls `shard(0, 1)` for that: the sampler is then sharded, as rank 0 of 1.

    Warns if the sampler is sharded or is for an evaluation: nothing ensures then that all processes
    together have each record exactly once, so a metric over them is not exact.

    Raises:
        ValueError: the batches are divided already, for one of several ranks. Or they are those of
            a `PKBatchSampler`, P classes with K records each: some process would not get all K.
    """
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
