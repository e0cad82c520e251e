"""Measure batches of one budget, several labels a record, and the results of an exact pass.

A million records each: lognormal lengths for `BucketBatchSampler`, one to three of 1,000 and of
100,000 classes for `PKBatchSampler`, and 128 numbers a record from 8 ranks for `Results`.

    python benchmarks/budgets.py
"""

from __future__ import annotations

import time

import numpy as np
from ways import timed

from twinfeed import BucketBatchSampler, ExactOnceBatchSampler, PKBatchSampler, Results

N = 10**6


def bucket(n: int, budget: int) -> None:
    """Say what budget batches cost, and how much of a batch meets again."""
    lengths = np.random.default_rng(0).lognormal(4.8, 0.7, n).astype(int).clip(1, 1024)
    sampler, made = timed(lambda: BucketBatchSampler(lengths, budget=budget, multiple=8, seed=0))
    epochs = [sampler.batches(epoch, 0, len(sampler)) for epoch in (0, 1)]
    padded = sum(int(lengths[ids].max()) * len(ids) for ids in epochs[0]) / lengths.sum() - 1
    more = len(sampler) * budget / lengths.sum() - 1
    batch_of = np.empty((2, n), np.int64)
    for numbers, batches in zip(batch_of, epochs, strict=True):
        for number, ids in enumerate(batches):
            numbers[ids] = number
    both = pairs(batch_of[0] * len(sampler) + batch_of[1]) / pairs(batch_of[0])
    ranks = [sampler.shard(rank, 8).batches(0, 0, len(sampler)) for rank in range(8)]
    loads = np.array([[lengths[ids].sum() for ids in step] for step in zip(*ranks, strict=True)])
    apart = loads.max(1) / loads.mean(1)
    print(
        f"bucket, {n:,} records, budget {budget:,}: made in {made:.2f} s, {n / len(sampler):.0f} "
        f"records a batch, padding {padded:.1%}, {more:.1%} more batches than the costs fill,\n"
        f"  {both:.1%} of batchmates meet again, the costliest of 8 ranks has "
        f"{apart.mean():.3f} of the mean cost, at worst {apart.max():.2f}"
    )


def pairs(numbers: np.ndarray) -> float:
    """Return how many pairs of records have the same number."""
    return float(
        (np.unique(numbers, return_counts=True)[1].astype(float) ** 2).sum() - len(numbers)
    )


def several_labels(classes: int) -> None:
    """Say how long P x K batches of records with several labels take."""
    random = np.random.default_rng(0)
    record = np.repeat(np.arange(N), random.integers(1, 4, N))
    record, label = np.divmod(
        np.unique(record * classes + random.integers(0, classes, len(record))), classes
    )
    lists = np.split(label, np.searchsorted(record, np.arange(1, N)))
    sampler, made = timed(lambda: PKBatchSampler(lists, p=16, k=4, seed=0, small="drop"))
    together = timed(lambda: sampler.batches(0, 0, 1000))[1]
    single = []  # milliseconds of processor time: other programs take no part in them
    for step in range(300):
        begun = time.process_time()
        sampler.batch(0, step)
        single.append((time.process_time() - begun) * 1e3)
    print(
        f"several labels, {classes:,} classes: made in {made:.1f} s, {together:.3f} ms a batch, "
        f"{np.median(single):.2f} ms if drawn alone, at worst {max(single):.1f} ms"
    )


def collect() -> None:
    """Say how long the table of 8 ranks takes."""
    sampler, rows = ExactOnceBatchSampler(N, batch_size=4096), np.ones((4096, 128), np.float32)
    ranks = [Results(N) for _ in range(8)]
    for rank, one in enumerate(ranks):
        for ids in sampler.shard(rank, 8).batches(0, 0, len(sampler)):
            one.add(ids, embedding=rows[: len(ids)])
    parts = [one.part() for one in ranks]
    took = [timed(lambda: ranks[0].gather(lambda _: parts))[1] for _ in range(3)]
    print("collect, 128 float32 a record:", *(f"{each:.2f} s" for each in took))


if __name__ == "__main__":
    begun = time.perf_counter()
    for n, budget in ((N, 8192), (N, 65_536), (20_000, 8192), (2_000, 8192)):
        bucket(n, budget)
    for classes in (1_000, 100_000):
        several_labels(classes)
    collect()
    print(f"{time.perf_counter() - begun:.0f} s in all")
