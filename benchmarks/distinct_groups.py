"""Compare batches of distinct groups (`apart=`) with sentence-transformers' NO_DUPLICATES.

Records in groups of two, in batches of 64 (1 million) and 128 (10 million), and 1 million with one
group that is in 95 % of the batches. Each way runs in a process of its own. Seconds are of the CPU,
of the process and its children, so that they can be read on a shared machine. An epoch is drawn
once, from the sampler's first call on. Memory is the peak beyond what the process held before.

    pip install sentence-transformers datasets xxhash
    python benchmarks/distinct_groups.py --rounds 1
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from ways import Ways, main, timed


def cpu_seconds() -> float:
    """Return the seconds that this process and its children have computed."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def groups_of(records: int, large: int) -> np.ndarray:
    """Return the group of each record, int64[records]: one of `large` records, and pairs."""
    groups = np.arange(records) // 2
    groups[:large] = records
    return groups[np.random.default_rng(0).permutation(records)]


def measure(build: Callable[[], Any], groups: np.ndarray) -> dict[str, float]:
    """Measure construction, the first batch, an epoch and what it holds, and memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sampler, construction = timed(build, cpu_seconds)
    batches = iter(sampler)
    first, first_seconds = timed(lambda: next(batches), cpu_seconds)
    counts = np.zeros(len(groups), np.int8)
    counts[first] = 1
    sizes = [len(first)]

    def draw() -> None:
        for ids in batches:
            sizes.append(len(ids))
            counts[ids] += 1

    _, rest = timed(draw, cpu_seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "construction s": construction,
        "first batch ms": first_seconds * 1e3,
        "epoch s": construction + first_seconds + rest,
        "records": int(np.count_nonzero(counts)),
        "len": len(sampler),
        "batches": len(sizes),
        "smaller batches": int(np.count_nonzero(np.array(sizes) < max(sizes))),
        "extra memory MB": (peak - before) / 1024,
    }


def twinfeed(records: int, batch_size: int, large: int) -> dict[str, float]:
    """This library."""
    from twinfeed import BatchSampler, RandomSampler

    groups = groups_of(records, large)
    build = partial(BatchSampler, RandomSampler(records, seed=0), batch_size=batch_size)
    next(iter(BatchSampler(RandomSampler(9, seed=0), batch_size=2, apart=[-1] * 9)))  # imports
    return measure(lambda: build(apart=groups), groups)


def peer(records: int, batch_size: int, large: int, hashes: bool) -> dict[str, float]:
    """NoDuplicatesBatchSampler of sentence-transformers, over a column of the groups."""
    import torch
    from datasets import Dataset
    from sentence_transformers.base.sampler import NoDuplicatesBatchSampler

    groups = groups_of(records, large)
    data = Dataset.from_dict({"group": groups})
    options = {"batch_size": batch_size, "drop_last": False, "seed": 0}
    generator = torch.Generator()
    return measure(
        lambda: NoDuplicatesBatchSampler(
            data, **options, generator=generator, precompute_hashes=hashes
        ),
        groups,
    )


CASES = {
    "1 million in pairs": (10**6, 64, 2),
    "1 million, one large group": (10**6, 64, 14_844),
    "10 million in pairs": (10**7, 128, 2),
}
WAYS: Ways = {
    f"{case}: {name}": (partial(way, *sizes), needed)
    for case, sizes in CASES.items()
    for name, way, needed in (
        ("twinfeed", twinfeed, None),
        ("NO_DUPLICATES", partial(peer, hashes=False), "sentence_transformers"),
        ("NO_DUPLICATES, hashes", partial(peer, hashes=True), "sentence_transformers"),
    )
    if (case, name) != ("10 million in pairs", "NO_DUPLICATES")
}

if __name__ == "__main__":
    main(__file__, __doc__, WAYS)
