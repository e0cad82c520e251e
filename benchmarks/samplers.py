"""Compare the samplers with their floor and their peers, all in one run.

P x K over 10 million labels of 100,000 classes (P=32, K=4), a random order of 10 million, and
restoring a position. Each way runs in a process of its own; the numbers are medians of `--rounds`
runs that take turns. A peer that is not installed is left out, and said to be. Memory is the peak
beyond what the process held when the data were there.

    pip install pytorch-metric-learning open-metric-learning grain torch
    python benchmarks/samplers.py
"""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from ways import Ways, main, timed

N, CLASSES, P, K = 10_000_000, 100_000, 32, 4
BATCH = P * K
SECONDS, MOST_SECONDS = 2.0, 10.0  # of whole passes; after the first batch, then broken off


def labels() -> np.ndarray:
    """Return the labels, shuffled: int64[N], each class 100 times but for chance."""
    made = np.random.default_rng(0).integers(0, CLASSES, N)
    made[: 4 * CLASSES] = np.tile(np.arange(CLASSES), 4)  # no class below K
    return made


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
    from twinfeed import PKBatchSampler

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
    from twinfeed import BatchSampler, RandomSampler

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
    from twinfeed import PKBatchSampler

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


WAYS: Ways = {
    "P x K: one stable argsort": (pk_argsort, None),
    "P x K: twinfeed": (pk_twinfeed, None),
    "P x K: pytorch-metric-learning": (pk_pytorch_metric_learning, "pytorch_metric_learning"),
    "P x K: open-metric-learning": (pk_open_metric_learning, "oml"),
    "random order: twinfeed": (random_twinfeed, None),
    "random order: torch": (random_torch, "torch"),
    "random order: Grain": (random_grain, "grain"),
    "restore: twinfeed": (restore_twinfeed, None),
    "restore: torch, by replay": (restore_torch_replay, "torch"),
}


if __name__ == "__main__":
    main(__file__, __doc__, WAYS)
