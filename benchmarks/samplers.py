"""Compare the samplers with their floor and their peers, all in one run.

P x K over 10 million labels of 100,000 classes (P=32, K=4), a random order of 10 million, restoring
a position, and what grows: ranks, orders, live records, weights, labels. Each way runs in a process
of its own; the numbers are medians of `--rounds` runs that take turns. A peer that is not installed
is left out, and said to be. Memory is the peak beyond what the process held when the data were
there.

    pip install pytorch-metric-learning open-metric-learning grain torch
    python benchmarks/samplers.py
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

N, CLASSES, P, K = 10_000_000, 100_000, 32, 4
BATCH = P * K
SECONDS, MOST_SECONDS = 2.0, 10.0  # of whole passes; after the first batch, then broken off


def labels() -> np.ndarray:
    """Return the labels, shuffled: int64[N], each class 100 times but for chance."""
    made = np.random.default_rng(0).integers(0, CLASSES, N)
    made[: 4 * CLASSES] = np.tile(np.arange(CLASSES), 4)  # no class below K
    return made


def timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a call gives, and its seconds."""
    begin = time.perf_counter()
    made = make()
    return made, time.perf_counter() - begin


def one_by_one(ids: Iterable[Any]) -> Iterator[list[Any]]:
    """Cut single ids into batches, as a DataLoader does."""
    stream = iter(ids)
    while batch := list(itertools.islice(stream, BATCH)):
        yield batch


def measure(build: Callable[[], Any], batches: Callable[[Any], Iterator[Any]]) -> dict[str, float]:
    """Measure construction, the first batch, whole passes from a cold start, and memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sampler, construction = timed(build)
    count, first, elapsed, begin = 0, 0.0, 0.0, time.perf_counter()
    while elapsed < SECONDS:
        for batch in batches(sampler):
            elapsed = time.perf_counter() - begin
            first = first or elapsed
            count += len(batch)
            if elapsed - first > MOST_SECONDS:
                break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "construction s": construction,
        "first batch ms": first * 1e3,
        "ids per s": count / elapsed,
        "extra memory MB": (peak - before) / 1024,
    }


def pk_argsort() -> dict[str, float]:
    """One stable argsort of the labels: the floor of any construction."""
    data = labels()
    return {"construction s": timed(lambda: np.argsort(data, kind="stable"))[1]}


def pk_twinfeed() -> dict[str, float]:
    """This library."""
    from twinfeed.samplers import PKBatchSampler

    data = labels()
    PKBatchSampler(data[:1000] % 10, p=2, k=2, seed=0).batch(0, 0)  # imports and first calls
    return measure(lambda: PKBatchSampler(data, p=P, k=K, seed=0), iter)


def pk_pytorch_metric_learning() -> dict[str, float]:
    """MPerClassSampler."""
    from pytorch_metric_learning.samplers import MPerClassSampler

    data = labels()
    build = partial(MPerClassSampler, data, m=K, batch_size=BATCH)  # draws 100,000 ids at a time
    return measure(build, one_by_one)


def pk_open_metric_learning() -> dict[str, float]:
    """BalanceSampler."""
    from oml.samplers.balance import BalanceSampler

    data = labels().tolist()
    return measure(lambda: BalanceSampler(data, n_labels=P, n_instances=K), iter)


def random_twinfeed() -> dict[str, float]:
    """This library, in batches."""
    from twinfeed.samplers import BatchSampler, RandomSampler

    BatchSampler(RandomSampler(10**6, seed=0), batch_size=2).batch(0, 0)
    return measure(lambda: BatchSampler(RandomSampler(N, seed=0), batch_size=BATCH), iter)


def random_torch() -> dict[str, float]:
    """torch's RandomSampler in its BatchSampler."""
    from torch.utils.data import BatchSampler, RandomSampler

    return measure(lambda: BatchSampler(RandomSampler(range(N)), BATCH, False), iter)


def random_grain() -> dict[str, float]:
    """Grain's MapDataset.shuffle."""
    import grain.python as grain

    return measure(
        lambda: grain.MapDataset.range(N).shuffle(seed=0),
        lambda shuffled: one_by_one(map(shuffled.__getitem__, range(N))),
    )


def restore_twinfeed() -> dict[str, float]:
    """Load a state of step 60,000 into a sampler that is there, and draw its batch."""
    from twinfeed.samplers import PKBatchSampler

    sampler = PKBatchSampler(labels(), p=P, k=K, seed=0)
    state = sampler.state_at(7, 60_000)
    sampler.batch(0, 0)

    def restored() -> Any:
        sampler.load_state_dict(state)
        return next(iter(sampler))

    return {"restored batch ms": timed(restored)[1] * 1e3}


def restore_torch_replay() -> dict[str, float]:
    """Draw and throw away 60,000 batches of torch's random sampler."""
    from torch.utils.data import BatchSampler, RandomSampler

    sampler = BatchSampler(RandomSampler(range(N)), BATCH, False)
    replayed = timed(lambda: next(itertools.islice(iter(sampler), 60_000, None)))[1]
    return {"restored batch ms": replayed * 1e3}


def draws(sampler: Any, *, steps: int = 300, lead: int = 1) -> dict[str, float]:
    """Measure single draws of an epoch, after `lead` of them."""
    sampler.batches(0, 0, lead)
    seconds = [timed(partial(sampler.batch, 0, lead + step))[1] for step in range(steps)]
    return {"draw ms": statistics.median(seconds) * 1e3, "slowest draw ms": max(seconds) * 1e3}


def one_rank(name: str) -> dict[str, float]:
    """Draw the 32 ids of one rank of 10,000."""
    from twinfeed import samplers as s

    ranks, rows = 10_000, 320_000
    if name == "P x K":
        classes = np.arange(10**6) // 10
        stream: Any = s.PKBatchSampler(classes, p=ranks, k=4, seed=0, batches_per_epoch=1000)
    else:
        orders: dict[str, Callable[[], s.Order]] = {
            "random": lambda: s.RandomSampler(10**9, seed=0),
            "shard shuffle": lambda: s.ShardShuffleSampler([10**5] * 10_000, seed=0),
            "1,000 parts": lambda: s.ShardShuffleSampler(
                [10**5] * 10_000, seed=0, window=10_000, parts=1000
            ),
            "weighted": lambda: s.WeightedSampler(np.arange(10**6), num_samples=10**9, seed=0),
        }
        stream = s.BatchSampler(orders[name](), batch_size=rows)
    return draws(stream.shard(77, ranks))


def mixture_of_many() -> dict[str, float]:
    """Draw 64 ids of 1,000 orders."""
    from twinfeed.samplers import BatchSampler, MixtureSampler, RandomSampler

    orders = [RandomSampler(10_000, seed=seed) for seed in range(1000)]
    mixture = MixtureSampler(orders, weights=[1] * 1000, num_samples=10**8, seed=0)
    return draws(BatchSampler(mixture, batch_size=64), steps=2000)


def reuse_of_many() -> dict[str, float]:
    """Draw 100 ids with 100,000 records live."""
    from twinfeed.samplers import BatchSampler, ReuseSampler

    order = ReuseSampler(10**6, reuse=10, live=10**5, seed=0)
    return draws(BatchSampler(order, batch_size=100), steps=2000)


def weighted_epochs() -> dict[str, float]:
    """Draw 10 million without replacement: the slowest draw is where an epoch begins."""
    from twinfeed.samplers import BatchSampler, WeightedSampler

    weights = np.random.default_rng(0).random(N)
    stream = BatchSampler(WeightedSampler(weights, replacement=False, seed=0), batch_size=1000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first = timed(lambda: stream.batch(0, 0))[1]
    seconds = [timed(partial(stream.batch, 0, step))[1] for step in range(len(stream))]
    seconds += [timed(partial(stream.batch, 1, step))[1] for step in range(100)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "first batch ms": first * 1e3,
        "draw ms": statistics.median(seconds) * 1e3,
        "slowest draw ms": max(seconds) * 1e3,
        "extra memory MB": (peak - before) / 1024,
    }


def pk_mapped() -> dict[str, float]:
    """P x K of 100 million labels from a class order that is mapped."""
    from twinfeed.samplers import ClassOrder, PKBatchSampler

    classes, size = 1_000_000, 100
    with tempfile.TemporaryDirectory() as folder:
        arrays: dict[str, Any] = {
            "records": np.arange(classes * size, dtype=np.int32),
            "starts": np.arange(classes) * size,
            "sizes": np.full(classes, size),
        }
        for name in arrays:
            np.save(Path(folder) / f"{name}.npy", arrays[name])
            arrays[name] = np.load(Path(folder) / f"{name}.npy", mmap_mode="r")
        order = ClassOrder.from_arrays(**arrays, digest="")
        sampler, construction = timed(lambda: PKBatchSampler(order, p=P, k=K, seed=0))
        found = {"construction s": construction, **draws(sampler)}
        return {**found, "pickled MB": len(pickle.dumps(sampler)) / 2**20}


def states() -> dict[str, float]:
    """Take a state with four million weights."""
    from twinfeed.samplers import BatchSampler, WeightedSampler

    sampler = BatchSampler(WeightedSampler(np.arange(4_000_000), seed=0), batch_size=64)
    sampler.state_dict()
    return {"draw ms": min(timed(sampler.state_dict)[1] for _ in range(100)) * 1e3}


SCALE = ("random", "shard shuffle", "1,000 parts", "P x K", "weighted")
WAYS: dict[str, tuple[Callable[[], dict[str, float]], str | None]] = {
    "P x K: one stable argsort": (pk_argsort, None),
    "P x K: twinfeed": (pk_twinfeed, None),
    "P x K: pytorch-metric-learning": (pk_pytorch_metric_learning, "pytorch_metric_learning"),
    "P x K: open-metric-learning": (pk_open_metric_learning, "oml"),
    "random order: twinfeed": (random_twinfeed, None),
    "random order: torch": (random_torch, "torch"),
    "random order: Grain": (random_grain, "grain"),
    "restore: twinfeed": (restore_twinfeed, None),
    "restore: torch, by replay": (restore_torch_replay, "torch"),
    **{f"a rank of 10,000: {name}": (partial(one_rank, name), None) for name in SCALE},
    "mixture of 1,000 orders": (mixture_of_many, None),
    "reuse, 100,000 live": (reuse_of_many, None),
    "weighted, no replacement, 10 million": (weighted_epochs, None),
    "P x K of 100 million, mapped": (pk_mapped, None),
    "a state, 4 million weights": (states, None),
}


def alone(name: str) -> dict[str, float]:
    """Run one way in a process of its own."""
    command = [sys.executable, __file__, "--way", name]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(result.stdout.splitlines()[-1]))


def main() -> None:
    """Run every way whose peer is installed, in turns, and print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(WAYS[options.way][0]()))
        return
    there = [n for n, (_, peer) in WAYS.items() if not peer or importlib.util.find_spec(peer)]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in there}
    for _ in range(options.rounds):
        for name in there:
            runs[name].append(alone(name))
    columns = list(dict.fromkeys(c for found in runs.values() for c in found[0]))
    print("| |", " | ".join(columns), "|\n|---|" + "---|" * len(columns))
    for name, found in runs.items():
        medians = {c: statistics.median(run[c] for run in found) for c in found[0]}
        print(
            f"| {name} |",
            " | ".join(f"{medians[c]:,.4g}" if c in medians else "" for c in columns),
            "|",
        )
    for name in WAYS.keys() - set(there):
        print(f"{name}: not installed")


if __name__ == "__main__":
    main()
