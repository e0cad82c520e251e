"""Decide which records make the next batch: pure, seekable numpy functions.

A batch sampler gives `batch(epoch, step)`, an array of ids, and is a torch batch sampler too:
iterating yields an epoch. `BatchStream` says what all batch samplers share: iteration, ranks,
state, seeds. A `Sampler` gives ids by position, and `BatchSampler` divides them into batches.
Iterating over a `Sampler` yields the ids of an epoch, as torch's samplers do. `Cursor` is a
position between two batches.

======================================================  ==========================================
for                                                     take
======================================================  ==========================================
metric learning: P classes by K records                 `PKBatchSampler(labels, p=, k=, seed=)`
evaluation: every record once, over any ranks           `ExactOnceBatchSampler(n, batch_size=)`
training from memory or fast random reads               `BatchSampler(RandomSampler(n, seed=), …)`
contrastive training: no two of a group in a batch      `BatchSampler(…, apart=groups)`
training from shards larger than memory                 `BatchSampler(ShardShuffleSampler(…), …)`
crops of large images: decode once, use many times      `BatchSampler(ReuseSampler(…), …)`
one image, many captions                                `ViewSampler(order, counts, …)`
records of different lengths, in one budget a batch     `BucketBatchSampler(costs, budget=, …)`
rare records more often                                 `WeightedSampler(weights, seed=)`
several data sets in fixed proportion                   `MixtureSampler(orders, weights=, …)`
a bad record in a running training                      `replaced(sampler, {step: {bad: good}})`
part of the data; a stable train/validation split       `SubsetSampler(ids, of=n)`, `split(keys)`
a list of ids: `Subset`, `datasets.select`, Grain       `IdSequence(sampler, epochs=)`
stored order                                            `BatchSampler(SequentialSampler(n), …)`
======================================================  ==========================================

To look at a stream: `repr`, `sampler.explain()`, and `diagnose(sampler, …)` for numbers.

pk.py, exact_once.py, bucket.py, batch.py, orders.py, shard_shuffle.py, reuse.py, views.py,
weighted.py, mixture.py and subset.py are the samplers, and drawing/ is what they draw with. What
they declare of their ids is in traits.py. stream.py has what all of them share, and the position in
a stream, batch_stream.py what batch samplers share, iteration.py the iteration over single ids,
state.py the fingerprints of states, id_sequence.py the ids of all epochs, class_order.py the
records by class, label_lists.py several labels a record, label_arrays.py checks labels, mapped.py
has arrays in files, step_schedule.py values that change with the training step, and replacement.py
records that are replaced from a step on. distinct_groups.py keeps records of a group in different
batches. _fair_batches.py and _coverage.py draw P x K batches. types.py has the types of arrays,
validate.py checks arguments, processes.py counts the processes of a framework, batch_table.py and
diagnostics.py show a stream, and verdict.py is the base of results of examinations.
"""

try:
    from twinfeed.lazy import attach
except ModuleNotFoundError as error:
    raise ImportError(
        "a folder named twinfeed, beside which Python was started, hides the installed library: "
        "start Python elsewhere"
    ) from error

__getattr__, __dir__, __all__ = attach(__name__, __file__)
