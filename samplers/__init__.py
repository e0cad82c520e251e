"""Decide which records make the next batch: pure, seekable numpy functions.

A batch sampler gives `batch(epoch, step)`, an array of ids, and is a torch batch sampler too:
iterating yields an epoch. `BatchStream` says what all batch samplers share: passes, ranks, state,
seeds. An order gives ids by position, and `BatchSampler` cuts an order into batches. `Cursor` is a
place between two batches.

======================================================  ==========================================
for                                                     take
======================================================  ==========================================
metric learning: P classes by K records                 `PKBatchSampler(labels, p=, k=, seed=)`
evaluation: every record once, over any ranks           `ExactOnceBatchSampler(n, batch_size=)`
training from memory or fast random reads               `BatchSampler(RandomSampler(n, seed=), …)`
training from shards larger than memory                 `BatchSampler(ShardShuffleSampler(…), …)`
crops of large images: decode once, use many times      `BatchSampler(ReuseSampler(…), …)`
one image, many captions                                `ViewSampler(order, counts, …)`
rare records more often                                 `WeightedSampler(weights, seed=)`
several data sets in fixed proportion                   `MixtureSampler(orders, weights=, …)`
part of the data; a stable train/validation split       `SubsetSampler(records)`, `split(keys)`
stored order                                            `BatchSampler(SequentialSampler(n), …)`
======================================================  ==========================================

To look at a stream: `repr`, `sampler.explain()`, and `diagnose(sampler, …)` for numbers.
"""

from twinfeed.samplers._cursor import Cursor
from twinfeed.samplers._schedule import PerStep
from twinfeed.samplers._state import StateMismatchError
from twinfeed.samplers._stream import BatchStream
from twinfeed.samplers.batch import BatchSampler
from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.diagnostics import Diagnosis, Measure, diagnose, simulate_shuffle_buffer
from twinfeed.samplers.exact_once import ExactOnceBatchSampler
from twinfeed.samplers.mixture import MixtureSampler
from twinfeed.samplers.orders import Order, RandomSampler, SequentialSampler
from twinfeed.samplers.pk import PKBatchSampler
from twinfeed.samplers.reuse import ReuseSampler
from twinfeed.samplers.shard_shuffle import ShardShuffleSampler
from twinfeed.samplers.subset import SubsetSampler, split
from twinfeed.samplers.views import ViewSampler
from twinfeed.samplers.weighted import WeightedSampler

__all__ = [
    "BatchSampler",
    "BatchStream",
    "ClassOrder",
    "Cursor",
    "Diagnosis",
    "ExactOnceBatchSampler",
    "Measure",
    "MixtureSampler",
    "Order",
    "PKBatchSampler",
    "PerStep",
    "RandomSampler",
    "ReuseSampler",
    "SequentialSampler",
    "ShardShuffleSampler",
    "StateMismatchError",
    "SubsetSampler",
    "ViewSampler",
    "WeightedSampler",
    "diagnose",
    "simulate_shuffle_buffer",
    "split",
]
