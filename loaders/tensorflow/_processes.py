"""The number of processes in TensorFlow's cluster, which a strategy may divide batches among."""

from __future__ import annotations

import tensorflow as tf

from twinfeed.samplers import BatchStream, PKBatchSampler
from twinfeed.samplers.processes import add_probe


def num_workers() -> int:
    """Return the number of training processes, the workers and chiefs of `TF_CONFIG`, or 1."""
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec().as_dict()
    return max(1, sum(len(cluster.get(job, ())) for job in ("chief", "worker")))


def check_auto_shard(sampler: BatchStream, /) -> None:
    """Raise ValueError if a strategy may not divide batches among its processes.

    A sharded sampler has batches that are divided already, a `PKBatchSampler` needs all K in one
    process, and an evaluation would not be exact.
    """
    if num_workers() > 1 and (
        sampler.sharded or sampler.evaluation or isinstance(sampler, PKBatchSampler)
    ):
        raise ValueError(
            f"a strategy would divide the batches of {sampler!r} among its processes: use "
            f"strategy.distribute_datasets_from_function(loader.dataset_for) and the feed of all "
            f"ranks, or without a strategy loop over loader.track(loader.dataset)"
        )


add_probe(num_workers)
