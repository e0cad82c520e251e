"""Every batch sampler with every option, small: one list for all who run them all.

``CASES`` is a list of (name, factory), ``FED`` the part of it that loaders are tested with. Record
ids lie in ``range(factory().num_records)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    BucketBatchSampler,
    ExactOnceBatchSampler,
    MixtureSampler,
    PKBatchSampler,
    RandomSampler,
    ReuseSampler,
    Sampler,
    SequentialSampler,
    ShardShuffleSampler,
    SubsetSampler,
    ViewSampler,
    WeightedSampler,
    replaced,
)

Case = tuple[str, Callable[[], BatchStream]]

CLASS_SIZES = [3, 9, 14, 5, 40, 7, 8, 2, 22, 6]
LABELS = np.repeat(np.arange(10), CLASS_SIZES)[np.argsort(np.arange(116) * 37 % 116)]
NAMES = np.array(["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibex", "jay"])[LABELS]
OF_4, OF_0 = np.flatnonzero(LABELS == 4), np.flatnonzero(LABELS == 0)
SUPER = np.where(np.isin(LABELS, [0, 2, 4, 9]), "odd", "even")
COSTS = np.arange(83) * 37 % 15 + 1
# Five groups of 11 records, and no group; a group of 13 records; groups of up to 639.
APART = np.where(np.arange(83) < 55, np.arange(83) % 5, -1)
APART_DROP = np.where(np.arange(83) < 13, 0, np.arange(83))
APART_LARGE = np.repeat(np.arange(8), [639, 637, 500, 321, 320, 319, 400, 64])[
    np.arange(3200) * 37 % 3200
]
SHARDS = [37, 0, 5, 100, 41]


def _pk(**options: Any) -> Callable[[], BatchStream]:
    """Return a factory of P x K samplers over the labels."""
    labels = options.pop("labels", LABELS)
    defaults: dict[str, Any] = {"p": 4, "k": 2, "seed": 5}
    return lambda: PKBatchSampler(labels, **{**defaults, **options})


def _plain(order: Callable[[], Sampler], **options: Any) -> Callable[[], BatchStream]:
    """Return a factory of batches of an order."""
    defaults: dict[str, Any] = {"batch_size": 8}
    return lambda: BatchSampler(order(), **{**defaults, **options})


def _shards(**options: Any) -> Callable[[], Sampler]:
    """Return a factory of shard-aware shuffles."""
    defaults: dict[str, Any] = {"seed": 3, "block": 7, "window": 8}
    return lambda: ShardShuffleSampler(SHARDS, **{**defaults, **options})


def _mixture() -> Sampler:
    """Return a mixture of an order, a subset and views."""
    orders = [
        RandomSampler(11, seed=0),
        SubsetSampler([1, 5, 8], of=9, order=RandomSampler(3, seed=1)),
        ViewSampler(RandomSampler(4, seed=2), [1, 2, 1, 3], per_epoch="one", seed=3),
    ]
    return MixtureSampler(orders, weights=[3, 1, 2], num_samples=63, seed=4)


CASES: list[Case] = [
    ("sequential", _plain(lambda: SequentialSampler(83))),
    ("sequential-drop-last", _plain(lambda: SequentialSampler(83), last_batch="drop")),
    ("random", _plain(lambda: RandomSampler(83, seed=1))),
    ("random-pad", _plain(lambda: RandomSampler(83, seed=1), last_batch="pad")),
    ("random-short-epochs", _plain(lambda: RandomSampler(83, seed=1), batches_per_epoch=4)),
    (
        # So many of so few that a batch has to take records twice.
        "random-replaced",
        lambda: replaced(
            BatchSampler(RandomSampler(21, seed=1), batch_size=16),
            {1: {3: 11, 20: [12, 13]}, 2: {bad: range(11, 19) for bad in range(4, 11)}, 9: {0: 1}},
        ),
    ),
    (
        "random-pad-long-epochs",
        _plain(lambda: RandomSampler(21, seed=1), last_batch="pad", batches_per_epoch=8),
    ),
    ("random-apart", _plain(lambda: RandomSampler(83, seed=1), apart=NAMES[:83], batch_size=2)),
    (
        "random-apart-drop",
        _plain(
            lambda: RandomSampler(83, seed=1), apart=APART_DROP, batch_size=7, last_batch="drop"
        ),
    ),
    (
        "random-apart-pad",
        _plain(lambda: RandomSampler(83, seed=1), apart=APART, batch_size=4, last_batch="pad"),
    ),
    (
        # Two windows of 320 batches, in epochs of 200.
        "random-apart-windows",
        _plain(
            lambda: RandomSampler(3200, seed=1),
            apart=APART_LARGE,
            batch_size=5,
            batches_per_epoch=200,
        ),
    ),
    (
        "subset-apart",
        _plain(
            lambda: SubsetSampler(np.arange(80, 0, -2), of=83, order=RandomSampler(40, seed=6)),
            apart=APART,
            batch_size=6,
            batches_per_epoch=4,
        ),
    ),
    (
        "views-all-apart",
        _plain(
            lambda: ViewSampler(RandomSampler(40, seed=1), [1, 3] * 10, per_epoch="all", seed=8),
            apart=np.arange(20),
        ),
    ),
    (
        "random-apart-replaced",
        lambda: replaced(
            BatchSampler(RandomSampler(83, seed=1), batch_size=5, apart=APART),
            {3: {bad: [82, 81] for bad in range(30)}, 20: {31: [36, 41]}},
        ),
    ),
    ("random-feistel", _plain(lambda: RandomSampler(40_000, seed=1), batch_size=500)),
    (
        "random-feistel-short-epochs",
        _plain(lambda: RandomSampler(33_000, seed=1), batch_size=500, batches_per_epoch=4),
    ),
    ("weighted", _plain(lambda: WeightedSampler([0.5, 0, 2.25, 1] * 9, num_samples=50, seed=2))),
    (
        "weighted-no-replacement",
        _plain(lambda: WeightedSampler(np.arange(40), num_samples=30, replacement=False, seed=2)),
    ),
    (
        "weighted-schedule",
        _plain(
            lambda: WeightedSampler(
                {0: [0.5, 0, 2.25, 1] * 9, 3: [1, 2, 0, 0] * 9, 23: [1] * 36},
                num_samples=50,
                seed=12,
            )
        ),
    ),
    (
        "weighted-no-replacement-schedule",
        _plain(
            lambda: WeightedSampler(
                {0: np.arange(40), 12: np.arange(40)[::-1]},
                num_samples=30,
                replacement=False,
                seed=12,
            )
        ),
    ),
    ("subset", _plain(lambda: SubsetSampler(np.arange(0, 90, 3), of=100))),
    (
        "subset-random",
        _plain(
            lambda: SubsetSampler([9, 2, 40, 7, 5], of=41, order=RandomSampler(5, seed=6)),
            batch_size=2,
        ),
    ),
    ("shards", _plain(_shards())),
    ("shards-stored", _plain(_shards(order_within="stored"))),
    ("shards-one-lane", _plain(_shards(window=1))),
    ("shards-uniform", _plain(_shards(block=1, window=64))),
    ("shards-sections", _plain(_shards(sections=4))),
    ("shards-sections-stored", _plain(_shards(sections=2, order_within="stored", block=5))),
    (
        "blocks-replaced",
        lambda: replaced(
            _plain(_shards(sections=4), batch_size=60)(),
            {5: {3: 4, 100: 20}, 30: {bad: [bad - 70, 181] for bad in range(91, 140)}},
        ),
    ),
    (
        "views-one",
        _plain(
            lambda: ViewSampler(RandomSampler(30, seed=1), [1, 2, 5] * 10, per_epoch="one", seed=8)
        ),
    ),
    (
        "views-replaced",
        lambda: replaced(
            _plain(
                lambda: ViewSampler(RandomSampler(20, seed=1), [1, 4] * 10, per_epoch="one", seed=8)
            )(),
            {4: {0: 1, 6: [7, 8]}},
        ),
    ),
    (
        "views-all",
        _plain(
            lambda: ViewSampler(RandomSampler(70, seed=1), [0, 2, 5] * 10, per_epoch="all", seed=8)
        ),
    ),
    ("mixture", _plain(_mixture, batch_size=7)),
    (
        "mix-schedule",
        _plain(
            lambda: MixtureSampler(
                [RandomSampler(15, seed=0), RandomSampler(9, seed=1), SequentialSampler(12)],
                weights={0: [3, 1, 0], 4: [1, 0, 2], 19: [0.5, 0.25, 0.25]},
                num_samples=61,
                seed=4,
            ),
            batch_size=7,
        ),
    ),
    ("exact-once", lambda: ExactOnceBatchSampler(83, batch_size=8)),
    ("exact-once-pad", lambda: ExactOnceBatchSampler(83, batch_size=8, last_batch="pad")),
    ("exact-once-few", lambda: ExactOnceBatchSampler(3, batch_size=8)),
    (
        "exact-once-records",
        lambda: ExactOnceBatchSampler(100, batch_size=8, records=np.arange(99, 0, -3)),
    ),
    ("exact-once-none", lambda: ExactOnceBatchSampler(0, batch_size=8)),
    ("reuse", _plain(lambda: ReuseSampler(25, reuse=3, live=12, seed=7), batch_size=4)),
    (
        "reuse-pad",
        _plain(lambda: ReuseSampler(25, reuse=3, live=12, seed=7), batch_size=4, last_batch="pad"),
    ),
    ("reuse-one-round", _plain(lambda: ReuseSampler(24, reuse=6, live=8, seed=7))),
    ("bucket", lambda: BucketBatchSampler(COSTS, budget=60, seed=9)),
    (
        "bucket-replaced",
        lambda: replaced(
            BucketBatchSampler(COSTS, budget=60, seed=9),
            {
                0: {0: np.flatnonzero(COSTS[0] == COSTS)[1:]},
                12: {7: np.flatnonzero(COSTS[7] == COSTS)[-1]},
            },
        ),
    ),
    ("bucket-multiple", lambda: BucketBatchSampler(COSTS, budget=60, multiple=4, window=2, seed=9)),
    ("pk", _pk()),
    ("pk-strings", _pk(labels=NAMES)),
    ("pk-repeat", _pk(k=6, small="repeat")),
    ("pk-drop", _pk(k=6, small="drop")),
    ("pk-min-class-size", _pk(k=6, min_class_size=6)),
    ("pk-every-class", _pk(p=10)),
    ("pk-most-classes", _pk(p=8)),
    ("pk-batches", _pk(batches_per_epoch=3)),
    ("pk-k-schedule", _pk(k={0: 2, 6: 1, 25: 2}, batches_per_epoch=9)),
    ("pk-p-schedule", _pk(p={0: 4, 13: 2}, k={0: 1, 7: 2, 20: 1}, batches_per_epoch=9)),
    ("pk-random-k", _pk(k=(1, 5), small="repeat", batches_per_epoch=12)),
    ("pk-once", _pk(coverage="once")),
    ("pk-once-drop", _pk(k=4, coverage="once", small="drop")),
    ("pk-all", _pk(coverage="all")),
    ("pk-all-repeat", _pk(k=6, coverage="all", small="repeat")),
    ("pk-stored", _pk(order_within="stored")),
    ("pk-apart", _pk(apart=np.arange(116) * 7 % 13, small="drop", k=3)),
    (
        "pk-apart-repeat",
        _pk(apart=NAMES[::-1], k={0: 4, 9: 5}, small="repeat", batches_per_epoch=7),
    ),
    ("pk-records", _pk(records=np.flatnonzero(LABELS % 3 < 2))),
    (
        "pk-replaced",
        lambda: replaced(
            _pk(k={0: 2, 17: 1}, batches_per_epoch=8)(),
            {
                0: {int(OF_4[0]): OF_4[30]},
                6: {int(bad): OF_4[20:] for bad in OF_4[1:20]},
                8: {int(OF_0[0]): OF_0[2], int(OF_0[1]): [OF_0[2]]},
            },
        ),
    ),
    ("pk-lists", _pk(labels=[[n % 7, 7 + n % 3][: n % 4] for n in range(116)])),
    ("pk-classes", lambda: PKBatchSampler.of_classes(10, p=4, k={0: 2, 2: 3}, seed=5)),
    ("pk-super", _pk(p=2, super_labels=SUPER)),
    (
        "pk-super-schedule",
        _pk(p=2, k={0: 2, 11: 1}, super_labels=SUPER, batches_per_epoch=8),
    ),
]

# What loaders are fed, for which no index is empty. They make no whole epoch of 40,000 records.
FED = [(name, make) for name, make in CASES if make().num_records and name != "random-feistel"]


def digest(sampler: BatchStream) -> str:
    """Return a hash of two epochs of ids and seeds."""
    content = hashlib.blake2b(digest_size=16)
    for epoch in (0, 3):
        for step, ids in enumerate(sampler.batches(epoch, 0, len(sampler))):
            content.update(ids.astype("<i8").tobytes())
            content.update(sampler.seeds(epoch, step).astype("<u8").tobytes())
            content.update(sampler.records(ids).astype("<i8").tobytes())
            content.update(sampler.views(ids).astype("<i8").tobytes())
    return content.hexdigest()


def digests() -> dict[str, str]:
    """Return the digest of every case."""
    return {name: digest(factory()) for name, factory in CASES}
