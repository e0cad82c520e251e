"""Bad arguments and states: refused early, with the rule, the name and what was given."""

from __future__ import annotations

from collections import UserList, deque
from collections.abc import Callable
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.refusals import Call, Refused

from twinfeed import DatasetSource, Feed, NumpyLoader, pack
from twinfeed.samplers import (
    BatchSampler,
    BucketBatchSampler,
    ExactOnceBatchSampler,
    IdSequence,
    MixtureSampler,
    PKBatchSampler,
    RandomSampler,
    ReuseSampler,
    Sampler,
    SamplerTraits,
    SequentialSampler,
    ShardShuffleSampler,
    SubsetSampler,
    ViewSampler,
    WeightedSampler,
    diagnose,
    replaced,
    simulate_shuffle_buffer,
    split,
    validate,
)

LABELS = [0] * 5 + [1] * 3 + [2] * 5 + [3] * 1


def pk(**options: Any) -> Callable[[], PKBatchSampler]:
    """Return a factory of P x K samplers with one thing wrong."""
    defaults: dict[str, Any] = {"p": 2, "k": 1, "seed": 0}
    labels = options.pop("labels", LABELS)
    return lambda: PKBatchSampler(labels, **{**defaults, **options})


def shuffle(**options: Any) -> Callable[[], ShardShuffleSampler]:
    """Return a factory of shard-aware shuffles with one thing wrong."""
    return lambda: ShardShuffleSampler(
        options.pop("lengths", [10, 10]), **{"seed": 0, "block": 5, "window": 64, **options}
    )


def reuse(**options: int) -> Callable[[], ReuseSampler]:
    """Return a factory of reuse samplers with one thing wrong."""
    defaults = {"reuse": 3, "live": 4, "seed": 0}
    return lambda: BatchSampler(ReuseSampler(10, **{**defaults, **options}), batch_size=2)


def mixture(**options: Any) -> Callable[[], MixtureSampler]:
    """Return a factory of mixtures with one thing wrong."""
    orders = options.pop("orders", [SequentialSampler(3), SequentialSampler(2)])
    defaults: dict[str, Any] = {
        "weights": [1, 2],
        "num_samples": 6,
        "seed": 0,
    }
    return lambda: MixtureSampler(orders, **{**defaults, **options})


def views(counts: list[int]) -> ViewSampler:
    """Return one view an epoch of each record."""
    return ViewSampler(SequentialSampler(len(counts)), counts, per_epoch="one", seed=0)


class Endless:
    """A dataset of seven items that never raises IndexError, as many of torch do."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, number: int) -> int:
        return number


class Unread(Endless):
    """A dataset whose items must not be read."""

    def __getitem__(self, number: int) -> int:
        raise AssertionError(number)


class Unsized:
    """A dataset without a length, as torch's `Dataset` has none."""

    def __getitem__(self, number: int) -> int:
        raise AssertionError(number)


class Unknown(Endless):
    """A dataset whose length is not known yet."""

    def __len__(self) -> int:
        raise RuntimeError("download it first")


class Computed(Sampler):
    """A sampler whose traits are computed, so that a copy cannot have others."""

    num_records, parameters = 9, {"n": 9}
    traits = property(lambda self: SamplerTraits())  # type: ignore[assignment]

    def draw(self, epoch: int, positions: Any) -> Any:
        return positions


MASKED = np.ma.masked_equal([1, 2, 3], 2)

LOADER = NumpyLoader(Feed({"x": np.arange(4)}, BatchSampler(SequentialSampler(4), batch_size=2)))

REFUSED: Refused = [
    (lambda: SequentialSampler(-1), ValueError, "dataset must be at least 0, got -1"),
    (lambda: RandomSampler(-1, seed=0), ValueError, "dataset must be at least 0, got -1"),
    (lambda: SequentialSampler(2.0), TypeError, "dataset must be an integer, got 2.0"),
    (lambda: SequentialSampler(True), TypeError, "dataset must be an integer, got True"),
    (lambda: RandomSampler(np.array([4, 7]), seed=0), TypeError, "SubsetSampler(ids, of="),
    (lambda: ExactOnceBatchSampler([4, 7], batch_size=2), TypeError, "len(index), records=ids"),
    # What is no data source.
    *(
        (partial(RandomSampler, wrong, seed=0), TypeError, word)
        for wrong, word in [
            (
                [4.0, 7.0],
                "or a dataset, got list of numbers: to draw only these records, use SubsetSampler",
            ),
            ((4,), "got tuple of numbers"),
            (range(5), "got range of numbers"),
            (b"abc", "got bytes"),
            (bytearray(3), "got bytearray"),
            ("abc", "got str"),
            ({"x": [1, 2]}, "__getitem__, got dict: write len(data['label'])"),
            ({1, 2}, "got set"),
            (np.array([True, False]), "got ndarray of numbers"),
            (deque([3]), "got deque of numbers"),
            (IdSequence(SequentialSampler(3), epochs=2), "got IdSequence of numbers"),
            (SequentialSampler(3), "__getitem__, got SequentialSampler"),
            (ExactOnceBatchSampler(3, batch_size=1), "got ExactOnceBatchSampler"),
            (Feed({"x": np.arange(3)}, ExactOnceBatchSampler(3, batch_size=1)), "got Feed"),
            (iter([1]), "dataset with __len__ and __getitem__, got list_iterator"),
            (Endless, "dataset with __len__ and __getitem__, got type"),
            (Unsized(), "dataset with __len__ and __getitem__, got Unsized"),
        ]
    ),
    *(
        (partial(replaced, BatchSampler(RandomSampler(8, seed=0), batch_size=4), given), *refused)
        for given, *refused in [
            ({}, TypeError, "the schedule must be {step: {bad: good}}, got {}"),
            ([1, 2], TypeError, "the schedule must be {step: {bad: good}}, got [1, 2]"),
            ({1: 2}, TypeError, "{bad: good}, got 2: write replaced(sampler, {step: {bad: good}})"),
            ({3: {8: 1}}, ValueError, "an id of replaced() must be below 8, got 8"),
            ({3: {1: [2, 8]}}, ValueError, "an id of replaced() must be below 8, got 8"),
            ({3: {-1: 1}}, ValueError, "an id of replaced() must be at least 0, got -1"),
            ({3: {1: []}}, ValueError, "id 1 must have an id in its place, got []"),
            ({3: {1: 2.0}}, TypeError, "an id of replaced() must be an integer, got 2.0"),
            ({3: {1: {2}}}, TypeError, "an id of replaced() must be an integer, got {2}"),
            ({3: {1: "23"}}, TypeError, "an id of replaced() must be an integer, got '2'"),
            ({3: {1: None}}, TypeError, "an id of replaced() must be an integer, got None"),
            ({3: {1: 2, "1": 3}}, ValueError, "an id of replaced() comes twice in {1: 2, '1': 3}"),
            ({3: {1: 1}}, ValueError, "id 1 must not come in the place of 1: id 1 is replaced i"),
            ({3: {1: 2}, 9: {2: 3}}, ValueError, "of 1: id 2 is replaced itself"),
            ({-3: {1: 2}}, ValueError, "a step of replaced must be at least 0, got -3"),
            ({"-3": {1: 2}}, TypeError, "a step of replaced must be an integer, got '-3'"),
        ]
    ),
    *(
        (lambda make=make, given=given: replaced(make(), {3: given}), *refused)
        for make, given, *refused in [
            (pk(), {0: 13}, ValueError, "of 0: id 13 is of another class, group, data set or cost"),
            (pk(records=range(12)), {0: 13}, ValueError, "in the place of 0: id 13 never comes"),
            (pk(labels=[[0, 1], [1]] * 4, p=1, k=2), {0: 1}, ValueError, "1 is of another class"),
            (lambda: BucketBatchSampler([1, 2], budget=4, seed=0), {0: 1}, ValueError, "or cost"),
            (lambda: BatchSampler(mixture()(), batch_size=3), {0: 4}, ValueError, "data set"),
            (
                lambda: BatchSampler(SubsetSampler([1, 2], of=9), batch_size=2),
                {1: 0},
                ValueError,
                "id 0 never comes",
            ),
            (
                lambda: BatchSampler(SubsetSampler([1, 2], of=9), batch_size=2),
                {0: 1},
                ValueError,
                "id 0 never comes, so nothing can come in its place",
            ),
            *(
                (lambda order=order: BatchSampler(order, batch_size=2), {1: 0}, ValueError, never)
                for never in ["id 0 never comes"]
                for subset in [SubsetSampler([1, 2], of=3)]
                for order in [
                    WeightedSampler([0, 1, 2], seed=0),
                    ViewSampler(SubsetSampler([1, 2, 3], of=6), [2, 4], per_epoch="all", seed=0),
                    ViewSampler(SubsetSampler([1], of=2), [1, 2], per_epoch="one", seed=0),
                    MixtureSampler([subset], weights=[1], num_samples=4, seed=0),
                    SubsetSampler([2, 0, 1], of=4, order=WeightedSampler([1, 0, 2], seed=0)),
                ]
            ),
            (pk(labels=[0, 0, 1], p=1, k=2, small="drop"), {2: 0}, ValueError, "id 2 never comes"),
            (pk(labels=[[0], [0], []], p=1, k=2), {2: 0}, ValueError, "id 2 never comes"),
            *(
                (lambda order=order: BatchSampler(order, batch_size=2), {0: id_}, ValueError, "set")
                for inner in [mixture()()]
                for order, id_ in [
                    (ViewSampler(inner, [2] * 5, per_epoch="one", seed=0), 7),
                    (SubsetSampler(range(5), of=9, order=inner), 3),
                    (MixtureSampler([inner], weights=[1], num_samples=8, seed=0), 3),
                ]
            ),
            (reuse(), {1: 0}, ValueError, "reuses records, of which some are kept"),
            (
                lambda: ExactOnceBatchSampler(9, batch_size=4),
                {1: 0},
                ValueError,
                "gives every record once: records= leaves some out",
            ),
            (lambda: pk()().shard(0, 1), {1: 0}, ValueError, "call shard on what replaced()"),
            (
                lambda: replaced(BatchSampler(SequentialSampler(9), batch_size=2), {1: {2: 3}}),
                {1: 0},
                ValueError,
                "has replacements already: give one schedule of all",
            ),
            (lambda: SequentialSampler(9).shard(0, 1), {1: 0}, ValueError, "is of one rank: call"),
            (
                lambda: WeightedSampler({0: [1, 1], 4: [2, 1]}, seed=0),
                {1: 0},
                TypeError,
                "changes at training steps, which depend on the batch size: take BatchSampler",
            ),
            (
                Computed,
                {1: 0},
                TypeError,
                "Computed.traits must not be a property: set",
            ),
            (lambda: [0, 1], {1: 0}, TypeError, "must be one of twinfeed.samplers, got a list: wr"),
        ]
    ),
    *(
        (partial(make, replaced(SequentialSampler(9), {3: {1: 0}})), TypeError, "must not have re")
        for make in (
            lambda order: BatchSampler(order, batch_size=2),
            lambda order: SubsetSampler([1], of=9, order=order),
            lambda order: MixtureSampler([order], weights=[1], num_samples=9, seed=0),
        )
    ),
    (lambda: RandomSampler(Unknown(), seed=0), RuntimeError, "download it first"),
    (
        lambda: ReuseSampler([], reuse=1, live=1, seed=0),
        ValueError,
        "dataset must be at least 1, got 0",
    ),
    (lambda: SubsetSampler([7], of=Unread()), ValueError, "of must be at least 8, got 7"),
    (lambda: SubsetSampler(Endless(), of=7), TypeError, "records must be a list or an array, got"),
    (lambda: SubsetSampler(SequentialSampler(3), of=7), ValueError, "must be one-dimensional"),
    (
        lambda: PKBatchSampler(Endless(), p=1, k=1, seed=0),
        TypeError,
        "dataset.targets, got Endless",
    ),
    (
        lambda: PKBatchSampler(DatasetSource([{"x": 1}]), p=1, k=1, seed=0),
        ValueError,
        "labels must be given, but this DatasetSource has none: create it with label=",
    ),
    (lambda: RandomSampler(2**62 + 1, seed=0), ValueError, "dataset must be below"),
    (lambda: SequentialSampler(2**64), ValueError, "dataset must be below"),
    (lambda: RandomSampler(3, seed=None), TypeError, "seed must be an integer"),
    (lambda: RandomSampler(3, seed=1.5), TypeError, "seed must be an integer"),
    (lambda: RandomSampler(3, seed=-1), ValueError, "seed must be at least 0"),
    (lambda: RandomSampler(3, seed=2**64), ValueError, "seed must be below"),
    (lambda: BatchSampler(SequentialSampler(3), batch_size=0), ValueError, "at least 1, got 0"),
    (
        lambda: BatchSampler(SequentialSampler(3), batch_size=2**64),
        ValueError,
        f"batch_size must be below {2**62}, got {2**64}",
    ),
    (lambda: BatchSampler(3, batch_size=1), TypeError, "sampler must be a Sampler"),
    (lambda: BatchSampler([0, 1], batch_size=1), TypeError, "got a list"),
    *(
        (partial(BatchSampler, *given, batch_size=8, **options), ValueError, "one batch, got 0 of")
        for given, options in [
            ([SequentialSampler(7)], {"last_batch": "drop"}),
            ([SequentialSampler(7)], {"last_batch": "drop", "batches_per_epoch": 3}),
            ([SequentialSampler(0)], {}),
            ([ShardShuffleSampler([], seed=0, block=1, window=1)], {"last_batch": "pad"}),
            ([WeightedSampler([1, 2], num_samples=0, seed=0)], {}),
        ]
    ),
    (lambda: BucketBatchSampler([], budget=4, seed=0), ValueError, "batch, got 0 of 0 records"),
    (
        lambda: BucketBatchSampler([1, 2], budget=2**40, window=2**22, seed=0),
        ValueError,
        f"window * budget must be below {2**62}",
    ),
    *(
        (partial(call, MASKED), ValueError, "got one at 1: fill")
        for call in (
            lambda weights: WeightedSampler(weights / 2, seed=0),
            lambda records: ExactOnceBatchSampler(9, batch_size=1, records=records),
            lambda positions: SequentialSampler(9).ids(0, positions),
        )
    ),
    (lambda: BatchSampler(pk()(), batch_size=1), TypeError, "sampler must be a Sampler such as"),
    # Calls that are guessed: the error shows the call.
    *(
        (call, TypeError, "write PKBatchSampler(labels, p=8, k=4, seed=0)")
        for call in (
            lambda: PKBatchSampler(labels=LABELS, p=2, k=2),
            lambda: PKBatchSampler(LABELS, P=2, K=2, seed=0),
            lambda: PKBatchSampler(LABELS, p=2, k=2, K=2, seed=0),
            lambda: PKBatchSampler(LABELS, 2, 2),
        )
    ),
    # torch's name for a sampler's dataset, and what the argument was called before.
    *(
        (partial(call, **{name: 5}, **options), TypeError, f"takes no {name}=: write ")
        for name in ("data_source", "n")
        for call, options in [
            (SequentialSampler, {}),
            (RandomSampler, {"seed": 0}),
            (ReuseSampler, {"reuse": 2, "live": 2, "seed": 0}),
            (ExactOnceBatchSampler, {"batch_size": 2}),
        ]
    ),
    (lambda: RandomSampler(n=5, seed=0), TypeError, "takes no n=: write RandomSampler(dataset, "),
    (lambda: RandomSampler(5), TypeError, "write RandomSampler(dataset, seed=0)"),
    (SequentialSampler, TypeError, "write SequentialSampler(dataset)"),
    (lambda: WeightedSampler([1]), TypeError, "write WeightedSampler(weights, seed=0)"),
    (lambda: MixtureSampler([], seed=0), TypeError, "'weights': write MixtureSampler([a, b], "),
    (lambda: SubsetSampler([1]), TypeError, "write SubsetSampler(ids, of=len(index))"),
    (lambda: ViewSampler([1]), TypeError, "write ViewSampler(order, views, per_epoch='one', "),
    (lambda: ReuseSampler(5, seed=0), TypeError, "'reuse': write ReuseSampler(dataset, reuse=4, "),
    (
        lambda: BucketBatchSampler([1], budget=1, seed=0, last_batch="drop"),
        TypeError,
        "takes no last_batch=: write BucketBatchSampler(",
    ),
    (lambda: ShardShuffleSampler([1]), TypeError, "write ShardShuffleSampler(index.shard_lengths"),
    (lambda: split(5), TypeError, "write split(len(index), fraction=0.1, seed=0)"),
    (
        lambda: BatchSampler(SequentialSampler(3), batch_size=1, final="drop"),
        TypeError,
        "write BatchSampler(sampler, batch_size=32, last_batch='drop')",
    ),
    (lambda: ExactOnceBatchSampler(5, 2), TypeError, "write ExactOnceBatchSampler(len(index), b"),
    (
        lambda: BatchSampler(SequentialSampler(3), batch_size=1, last_batch=True),
        ValueError,
        "last_batch must be one of 'smaller', 'pad', 'drop', got True",
    ),
    (lambda: ExactOnceBatchSampler(3, batch_size=1, last_batch="wrap"), ValueError, "got 'wrap'"),
    *(
        (partial(ExactOnceBatchSampler(9, **options).shard, 0, 4, empty=empty), ValueError, word)
        for options, empty, word in [
            ({"batch_size": 4, "last_batch": "pad"}, "skip", "is for last_batch='smaller'"),
            ({"batch_size": 3}, "skip", "a batch_size of at least the 4 ranks, got 3: most"),
            ({"batch_size": 4}, "drop", "empty must be one of 'keep', 'skip', got 'drop'"),
            ({"batch_size": 4}, True, "empty must be one of 'keep', 'skip', got True"),
        ]
    ),
    (pk(p=5), ValueError, "p must be at most the number of classes in the data, 4"),
    (pk(k=4), ValueError, "2 of 4 classes have fewer than k=4 records (the smallest has 1): pass"),
    (pk(k=4), ValueError, "small='drop' or min_class_size=4"),
    (pk(k=lambda step: 2), TypeError, "k must be a number, or a schedule by global step"),
    (pk(k=4, coverage="once"), ValueError, "(the smallest has 1): pass small="),
    (pk(k={0: 1, 9: 4}, batches_per_epoch=3), ValueError, "fewer than k=4"),
    (pk(k=9, small="drop"), ValueError, "p must be at most"),
    (pk(labels=[]), ValueError, "p must be at most"),
    (pk(records=[], apart=LABELS), ValueError, "classes in the data, 0 of those kept"),
    (pk(labels=[UserList([0, 1]), UserList([0])]), TypeError, "of arrays, give lists"),
    (
        lambda: BatchSampler(RandomSampler(0, seed=0), batch_size=2, apart=[]),
        ValueError,
        "an epoch must have at least one batch, got 0 of 0 records",
    ),
    (pk(small="pad"), ValueError, "small must be one of"),
    (pk(labels=[0.5, 1]), TypeError, "labels must be integers or strings"),
    (pk(labels=[0, np.nan]), TypeError, "got dtype float64 with NaN at 1"),
    (pk(labels=["cat", *[np.nan] * 6, "dog"]), TypeError, "6 of 8 are not, nan at 1, nan at 2"),
    (pk(labels=["a", None]), TypeError, "1 of 2 are not, None at 1"),
    (pk(labels=[1, None, 3]), TypeError, "1 of 3 are not, None at 1"),
    (pk(labels=[1, "1"]), TypeError, "1 of 2 are not, 1 at 0"),
    (pk(labels=np.ma.masked_array([1, 1, 2, 2], mask=[0, 0, 1, 1])), TypeError, "2 of 4 are"),
    (pk(labels=["a\0", "a"]), ValueError, "must not end in NUL"),
    (pk(labels=[2**70, 1]), TypeError, "got dtype object"),
    (pk(labels=np.array([[0, 1]])), ValueError, "labels must be one-dimensional"),
    (pk(labels=np.array([0, "a"], object)), TypeError, "labels must be integers or strings"),
    (pk(p=0), ValueError, "p must be at least 1, got 0"),
    (pk(k=len), TypeError, "or a schedule by global step such as k={0: 2, 1000: 3}"),
    (pk(k=1.0), TypeError, "k must be an integer, got 1.0"),
    (pk(k=(3, 2)), ValueError, "k must be a range (low, high) with low at most high"),
    (pk(k=(1, 2, 3)), ValueError, "k must be a range (low, high)"),
    (pk(k={5: 1}), ValueError, "must have a value at step 0"),
    (pk(k={0: 1, -1: 1}), ValueError, "a step of k must be at least 0"),
    (pk(p={0: 1, 2: 2}), ValueError, "batches_per_epoch must be given"),
    (pk(k=(1, 1)), ValueError, "batches_per_epoch must be given"),
    (pk(batches_per_epoch=0), ValueError, "batches_per_epoch must be at least 1"),
    (
        pk(batches_per_epoch=2**61),
        ValueError,
        f"samples of an epoch must be below {2**62}, got {2**62}",
    ),
    (pk(coverage="some"), ValueError, "coverage must be one of 'once', 'all'"),
    (pk(coverage="once", batches_per_epoch=3), ValueError, "must not be given with coverage="),
    (pk(coverage="once", small="repeat"), ValueError, "small must be 'raise' or 'drop' with"),
    (pk(coverage="all", p={0: 1, 3: 2}), ValueError, "must be plain"),
    (pk(super_labels=[0]), ValueError, "super_labels must have 14 entries, got 1"),
    (
        pk(super_labels=[0, 1] * 7),
        ValueError,
        "must be equal for all records of a class, but records 0",
    ),
    (pk(super_labels=[0] * 5 + [1] * 9), ValueError, "classes in every super-class, 1"),
    (lambda: pk()().shard(0, 3), ValueError, "got world_size=3, p=2"),
    (
        lambda: pk(p={0: 4, 5: 2}, batches_per_epoch=3)().shard(0, 4),
        ValueError,
        "world_size=4, p=2",
    ),
    (
        lambda: RandomSampler(3, seed=0).shard(0, 4, uneven="drop"),
        ValueError,
        "uneven='drop' would leave out all: 3 ids on 4 ranks",
    ),
    (lambda: IdSequence(SequentialSampler(3)), TypeError, "write IdSequence(sampler, epochs=90)"),
    (lambda: IdSequence(Endless(), epochs=1), TypeError, "twinfeed.RandomSampler, got a Endless"),
    (lambda: pk()().shard(2, 2), ValueError, "rank must be below 2, got 2"),
    (lambda: pk()().shard(-1, 2), ValueError, "rank must be at least 0"),
    (lambda: pk()().shard(0, 0), ValueError, "world_size must be at least 1"),
    (lambda: pk()().explain(world_size=0), ValueError, "world_size must be at least 1, got 0"),
    (lambda: pk()().shard(1, 2).shard(0, 2), ValueError, "already rank 1 of 2"),
    (
        lambda: RandomSampler(30, seed=0).ids(2**58, [0]),
        ValueError,
        f"epoch must be below {2**62 // 30}, got {2**58}",
    ),
    (
        lambda: reuse()().set_epoch(2**58),
        ValueError,
        f"epoch must be below {2**62 // 30}, got {2**58}",
    ),
    (
        lambda: reuse()().load_state_dict({**reuse()().state_dict(), "epoch": 2**58}),
        ValueError,
        f"epoch of the state must be below {2**62 // 30}, got {2**58}",
    ),
    (lambda: pk()().set_epoch(-1), ValueError, "epoch must be at least 0"),
    (shuffle(window=6, sections=4), ValueError, "window must be divisible by sections"),
    (shuffle(window=8, sections=8), ValueError, "sections must be at most the number of blocks,"),
    (
        lambda: BatchSampler(shuffle(window=4, sections=4)(), batch_size=6),
        ValueError,
        "batch_size must be divisible by the order's sections=4, got 6",
    ),
    (shuffle(lengths=[3, -1]), ValueError, "at least 0, got -1 at 1"),
    (shuffle(lengths=[0.5]), TypeError, "shard_lengths must hold integers"),
    (shuffle(lengths=[[3]]), ValueError, "must be one-dimensional"),
    (
        shuffle(lengths=np.array([2**63], np.uint64)),
        ValueError,
        f"shard_lengths must be below {2**62}, got {2**63} at 0",
    ),
    (
        shuffle(lengths=[2**61] * 3),
        ValueError,
        f"shard_lengths must sum to less than {2**62}, got about 6.92e+18",
    ),
    (shuffle(block=0), ValueError, "block must be at least 1"),
    (shuffle(order_within="sorted"), ValueError, "order_within must be one of"),
    (reuse(live=5), ValueError, "a batch holds no record twice: got live=5, batch_size=2"),
    (reuse(live=12), ValueError, "live must be at most the number of records, 10, got 12"),
    (reuse(reuse=2**60), ValueError, "samples of an epoch must be below"),
    (
        lambda: BatchSampler(
            ReuseSampler(4, reuse=3, live=4, seed=0), batch_size=4, last_batch="drop"
        ),
        ValueError,
        "last_batch must be 'smaller' or 'pad' for a sampler that reuses records",
    ),
    *(
        (
            lambda batches=batches: BatchSampler(
                ReuseSampler(400, reuse=4, live=8, seed=0), batch_size=4, batches_per_epoch=batches
            ),
            ValueError,
            "batches_per_epoch must divide the 400 batches of the epoch of a sampler that reuses",
        )
        for batches in (3, 800)
    ),
    (reuse(reuse=0), ValueError, "reuse must be at least 1"),
    (lambda: WeightedSampler([], seed=0), ValueError, "one number for each record"),
    (lambda: WeightedSampler([0, 0], seed=0), ValueError, "not all be 0"),
    (lambda: WeightedSampler([0.0], seed=0), ValueError, "not all be 0"),
    (lambda: WeightedSampler([1, np.nan], seed=0), ValueError, "got nan at 1"),
    (lambda: WeightedSampler([1, -2], seed=0), ValueError, "got -2 at 1"),
    (lambda: WeightedSampler([-0.5], seed=0), ValueError, "got -0.5"),
    (lambda: WeightedSampler(["a"], seed=0), TypeError, "weights must be numbers"),
    (lambda: WeightedSampler(MASKED, seed=0), ValueError, "weights must have no masked entry"),
    (
        lambda: BucketBatchSampler(MASKED, budget=9, seed=0),
        ValueError,
        "costs must have no masked entry",
    ),
    (lambda: SubsetSampler(MASKED, of=4), ValueError, "records must have no masked entry"),
    (
        lambda: WeightedSampler({3: [1]}, seed=0),
        ValueError,
        "weights as a schedule must have a value",
    ),
    (
        lambda: WeightedSampler({0: [1, 2], 3: [1]}, seed=0),
        ValueError,
        r"weights must have the same length at every step, got [2, 1]",
    ),
    (lambda: WeightedSampler({0: [1], 3: [0]}, seed=0), ValueError, "not all be 0, got 1 zeros"),
    (
        lambda: WeightedSampler({0: [1, 2], 3: [1, 0]}, num_samples=2, replacement=False, seed=0),
        ValueError,
        "num_samples must be at most the number of weights above 0, 1",
    ),
    (
        lambda: BatchSampler(
            WeightedSampler({0: [1, 2, 3], 4: [1, 1, 1]}, replacement=False, seed=0), batch_size=1
        ),
        ValueError,
        "only at the start of an epoch, every 3 steps, got a change at step 4",
    ),
    (lambda: WeightedSampler([2**61] * 2, seed=0), ValueError, "sum to less than"),
    (lambda: WeightedSampler([1], num_samples=2**64, seed=0), ValueError, "num_samples must be"),
    (
        lambda: WeightedSampler([1, 0], num_samples=2, replacement=False, seed=0),
        ValueError,
        "num_samples must be at most the number of weights above 0, 1",
    ),
    (lambda: SubsetSampler([1, 1], of=2), ValueError, "got 1 more than once"),
    (lambda: SubsetSampler([5], of=5), ValueError, "of must be"),
    (lambda: SubsetSampler(of=5), TypeError, "SubsetSampler takes records or ranges"),
    (lambda: SubsetSampler([1], ranges=[(1, 2)], of=5), TypeError, "takes records or ranges"),
    (
        lambda: SubsetSampler(ranges=[(1, 2, 3)], of=5),
        ValueError,
        "(start, stop) of each, got",
    ),
    (lambda: SubsetSampler(ranges=[], of=5), ValueError, "(start, stop) of each, got"),
    (
        lambda: SubsetSampler(ranges=[(2, 2)], of=5),
        ValueError,
        "a range must have a record",
    ),
    (lambda: SubsetSampler(ranges=[(3, 5), (0, 4)], of=5), ValueError, "overlap, got [0, 4] and ["),
    (lambda: SubsetSampler(ranges=[(0, 6)], of=5), ValueError, "of must be at least 6, got 5"),
    (
        lambda: SubsetSampler(ranges=[(-1, 3)], of=5),
        ValueError,
        "ranges must be at least 0",
    ),
    (lambda: SubsetSampler(ranges=[(0.0, 3.0)], of=5), TypeError, "ranges must hold integers"),
    (
        lambda: IdSequence(BatchSampler(SequentialSampler(5), batch_size=2), epochs=1),
        ValueError,
        "one size, got sizes [1, 2]",
    ),
    (lambda: SubsetSampler([], of=9), ValueError, "records must hold an id, got none of 9"),
    (
        lambda: SubsetSampler(np.zeros(0, bool), of=9, order=RandomSampler(0, seed=0)),
        ValueError,
        "got none of 9",
    ),
    (lambda: split(9, fraction=0.1, seed=3), ValueError, "none of 9 records fell into part 1"),
    (
        lambda: split(3, fraction=0.1, seed=0, by=[1, 2, 2]),
        ValueError,
        "none of 3 records fell into part 1: pass another seed",
    ),
    (
        lambda: split(9, fraction=0.1, seed=3, stratify=[1] * 9),
        TypeError,
        "takes no stratify=: by=labels divides each class so: write split(len(index), fraction=0",
    ),
    (
        lambda: SubsetSampler([5], of=6, order=SequentialSampler(2)),
        ValueError,
        "order must be a sampler of len(records)=1 positions",
    ),
    (lambda: SubsetSampler([5], of=6, order=[0]), TypeError, "got a list"),
    (lambda: SubsetSampler(range(5), of=5, order=pk()()), TypeError, "order must be a Sampler"),
    (lambda: SubsetSampler([7, 8], of=9, order=views([1, 2])), ValueError, "take views after"),
    *(
        (
            lambda wrap=wrap: wrap(ReuseSampler(2, reuse=2, live=2, seed=0)),
            ValueError,
            "and reuse without either",
        )
        for wrap in (
            lambda order: ViewSampler(order, [1, 2], per_epoch="one", seed=0),
            lambda order: SubsetSampler([7, 8], of=9, order=order),
        )
    ),
    (pk(p={0: 4, "0": 2}, batches_per_epoch=3), ValueError, "p has two values for step 0"),
    (lambda: split(3, fraction=1.5, seed=0), ValueError, "fraction must be in"),
    (lambda: split(3, fraction="0.5", seed=0), TypeError, "got '0.5'"),
    (lambda: split(3, fraction=None, seed=0), TypeError, "got None"),
    (lambda: split(3, fraction=True, seed=0), TypeError, "got True"),
    (lambda: split(3, fraction=np.nan, seed=0), ValueError, "got nan"),
    *(
        (lambda wrong=wrong: split(3, fraction=wrong, seed=0), ValueError, "that sum to 1, got")
        for wrong in ([], [0.8, 0.1], [0.5, 0.5 + 1e-8], [0.75, 0.75, -0.5], [1e308, 1e308])
    ),
    *(
        (lambda wrong=wrong: split(3, fraction=wrong, seed=0), ValueError, "a sequence of finite")
        for wrong in ([True, False], ["0.5", "0.5"], [np.nan, 1], [[0.5], [0.5]], {"train": 1})
    ),
    (
        lambda: split(2, fraction=[0.5, 0.5, 0], seed=0, groups=[1, 1]),
        ValueError,
        "fell into part",
    ),
    (lambda: split(["a", 2], fraction=0.5, seed=0), TypeError, "records must be their number, or"),
    (lambda: split([2, 3], fraction=0.5, seed=0), TypeError, "records must be their number, or a"),
    (lambda: SubsetSampler([True, False], of=2), TypeError, "records must hold integers, got a"),
    (lambda: split(iter(["a", "b"]), fraction=0.5, seed=0), TypeError, "records must be their"),
    (lambda: split(None, fraction=0.5, seed=0), TypeError, "of keys, got None"),
    (lambda: split(np.float64(5), fraction=0.5, seed=0), TypeError, "of keys, got "),
    (lambda: split(5.0, fraction=0.5, seed=0), TypeError, "of keys, got 5.0"),
    (lambda: split("abc", fraction=0.5, seed=0), TypeError, "records must be"),
    (
        lambda: split(3, fraction=0.5, seed=0, by=[0, 1, 1], groups=[0, 0, 0]),
        ValueError,
        "none of 1 group fell into",
    ),
    (lambda: split(2, fraction=0.5, seed=0, by=[0, 1], groups=[0]), ValueError, "groups must have"),
    (lambda: split(2, fraction=0.5, seed=0, by=[0], groups=[0, 1]), ValueError, "by must have one"),
    (lambda: split(3, fraction=0.5, seed=0, by=[0, 1]), ValueError, "by must have one entry"),
    (lambda: split(3, fraction=0.5, seed=0, groups=["a"]), ValueError, "groups must have one"),
    (lambda: split(2, fraction=0.5, seed=0, groups=[0.5, 1.0]), TypeError, "groups must be"),
    (lambda: split(2, fraction=0.5, seed=0, groups=[b"a", b"b"]), TypeError, "got dtype |S1"),
    (lambda: split(3, fraction=0.5, seed=0, groups=["a", None, "b"]), TypeError, "None at 1"),
    (
        lambda: split(2, fraction=0.5, seed=0, groups=[1, 1]),
        ValueError,
        "none of 1 group fell into",
    ),
    (
        lambda: ViewSampler(SequentialSampler(2), [1, 0], per_epoch="one", seed=0),
        ValueError,
        "views must be at least 1, got 0 at 1",
    ),
    (
        lambda: ViewSampler(SequentialSampler(2), [2, 2], per_epoch="all", seed=0),
        ValueError,
        "order must be a sampler of 4 (record, view) pairs",
    ),
    (lambda: views([2**61] * 2), ValueError, "views must sum to less than"),
    (
        lambda: ViewSampler(
            BatchSampler(SequentialSampler(2), batch_size=1), [1, 1], per_epoch="one", seed=0
        ),
        TypeError,
        "order must be a Sampler such as twinfeed.RandomSampler, got a BatchSampler",
    ),
    (
        lambda: ViewSampler(views([2, 2]), [1, 2], per_epoch="one", seed=0),
        ValueError,
        "take views after the subset, as ViewSampler(SubsetSampler(…), …)",
    ),
    (mixture(orders=[[1], [2]]), TypeError, "each of orders must be a Sampler"),
    (mixture(orders=[pk()()], weights=[1]), TypeError, "each of orders must be a Sampler such as"),
    (
        mixture(orders=[ReuseSampler(4, reuse=2, live=2, seed=0)], weights=[1]),
        ValueError,
        "orders must not reuse records, since samples of other samplers would come between",
    ),
    (mixture(num_samples=0), ValueError, "num_samples must be at least 1, got 0"),
    (mixture(orders=[SequentialSampler(2**61)] * 2), ValueError, "sizes of orders must sum to"),
    (mixture(weights=[1]), ValueError, "weights must be 2, one for each sampler, got 1"),
    *(
        (mixture(weights=weights), error, words)
        for weights, error, words in [
            (
                [1, 0],
                ValueError,
                "got 0 for sampler 1: a sampler that joins later needs a schedule",
            ),
            ([0.0, 1], ValueError, "above 0 for each sampler, got 0 for sampler 0"),
            ([-1, 1], ValueError, "weights must be at least 0, got -1"),
            ([-0.5, 1], ValueError, "weights must be at least 0, and not all 0, got"),
            ([0, 0], ValueError, "weights must be at least 0, and not all 0, got"),
            ({}, ValueError, "weights as a schedule must have a value at step 0, got steps []"),
            ({1: [1, 1]}, ValueError, "weights as a schedule must have a value at step 0"),
            ({0: [1, 1], -1: [1, 1]}, ValueError, "a step of weights must be at least 0, got -1"),
            ({0: [1, 1], 2.5: [1, 2]}, TypeError, "a step of weights must be an integer, got 2.5"),
            ({0: [1, 1], True: [1, 2]}, TypeError, "a step of weights must be an integer"),
            ({0: [1, 1], 9: [1]}, ValueError, "weights must be 2, one for each sampler, got 1"),
            ({0: [1, 1], 9: [0, 0]}, ValueError, "not all 0, got [0, 0]"),
        ]
    ),
    (mixture(weights=[0.1 + 0.2, 0.7]), ValueError, "got 25,000,000,000,000,001: round them"),
    (mixture(weights=[np.inf, 1]), ValueError, "weights must be a sequence of finite numbers"),
    (mixture(weights=[2 * 10**9, 10**9 + 2]), ValueError, "got 1,500,000,001: round them"),
    (
        mixture(orders=[SequentialSampler(0)]),
        ValueError,
        "each of orders must not be empty, got SequentialSampler(0",
    ),
    (mixture(orders=[], weights=[]), ValueError, "orders must be a list of at least one sampler"),
    (mixture(orders={SequentialSampler(4)}, weights=[1]), ValueError, "orders must be a list"),
    (lambda: diagnose([0, 1]), ValueError, "batch_size must be given"),
    (
        lambda: diagnose(BatchSampler(SequentialSampler(4), batch_size=2), batch_size=4),
        ValueError,
        "but not for a batch sampler, got 4",
    ),
    (lambda: diagnose([], batch_size=2), ValueError, "must have at least one record"),
    (lambda: diagnose(iter([1]), batch_size=2), TypeError, "got a list_iterator: pass feed.s"),
    (lambda: diagnose(LOADER), TypeError, "got a NumpyLoader: pass feed.sampler"),
    (lambda: diagnose([0, 1], batch_size=2, labels=[0]), ValueError, "for 2 records, got 1"),
    (lambda: diagnose([0, 5], batch_size=2, num_records=3), ValueError, "num_records=3, got 5"),
    (lambda: diagnose([0], batch_size=1, num_records="2"), TypeError, "num_records must be an"),
    (lambda: simulate_shuffle_buffer(3, buffer_size=0, seed=0), ValueError, "buffer_size must be"),
]


@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_samplers_refuse_bad_arguments(call: Call, kind: type[Exception], word: str) -> None:
    """The rule, the caller's own argument name, and what was given."""
    with pytest.raises(kind) as caught:
        call()
    assert word in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        np.array(7),
        Unread(),
        np.zeros((7, 2), int),
        np.array(["a.jpg"] * 7),
        ["a.jpg"] * 7,
        deque([{"x": 1}] * 7),
        [(1, 2)] * 7,
        [np.zeros(1)] * 7,
        DatasetSource([{"x": 1}] * 7),
    ],
)
def test_data_source_of_torch_is_used_for_its_length(data: Any) -> None:
    """Only the length is kept."""
    for make in (
        lambda n: RandomSampler(n, seed=1),
        SequentialSampler,
        lambda n: ReuseSampler(n, reuse=2, live=3, seed=1),
        lambda n: SubsetSampler([4, 6], of=n),
        lambda n: ExactOnceBatchSampler(n, batch_size=2, records=[3, 4]),
    ):
        assert make(data).fingerprint == make(7).fingerprint
        assert make(data).num_records == 7
    if "a.jpg" not in repr(data):  # these are keys
        sides, expected = split(data, fraction=0.5, seed=0), split(7, fraction=0.5, seed=0)
        assert [side.tolist() for side in sides] == [side.tolist() for side in expected]


def test_first_arguments_have_names() -> None:
    """Configurations (mmengine, Hydra) pass nothing by position."""
    order = RandomSampler(dataset=[{}] * 4, seed=0)
    some = {"batches_per_epoch": 4, "small": "drop"}
    for made, same in (
        (order, RandomSampler(4, seed=0)),
        (SequentialSampler(dataset=4), SequentialSampler(4)),
        (
            ReuseSampler(dataset=4, reuse=2, live=2, seed=0),
            ReuseSampler(4, reuse=2, live=2, seed=0),
        ),
        (ExactOnceBatchSampler(dataset=4, batch_size=2), ExactOnceBatchSampler(4, batch_size=2)),
        (BatchSampler(sampler=order, batch_size=2), BatchSampler(order, batch_size=2)),
        (PKBatchSampler(labels=LABELS, p=2, k=1, seed=0), pk()()),
        # A configuration has lists of its own, and no tuples.
        (pk(k=UserList([1, 2]), **some)(), pk(k=(1, 2), **some)()),
        (
            BucketBatchSampler(costs=[1, 2], budget=4, seed=0),
            BucketBatchSampler([1, 2], budget=4, seed=0),
        ),
        (WeightedSampler(weights=[1, 2], seed=0), WeightedSampler([1, 2], seed=0)),
        (SubsetSampler(records=[1, 2], of=4), SubsetSampler([1, 2], of=4)),
        (
            ShardShuffleSampler(shard_lengths=[4], block=1, window=2, seed=0),
            ShardShuffleSampler([4], block=1, window=2, seed=0),
        ),
        (
            MixtureSampler(orders=[order], weights=[1], num_samples=3, seed=0),
            MixtureSampler([order], weights=[1], num_samples=3, seed=0),
        ),
        (
            ViewSampler(order=order, views=[1] * 4, per_epoch="one", seed=0),
            ViewSampler(order, [1] * 4, per_epoch="one", seed=0),
        ),
    ):
        assert made.fingerprint == same.fingerprint
    assert list(IdSequence(sampler=order, epochs=1)) == list(order)
    sampler = BatchSampler(sampler=order, batch_size=2)
    (batch, _) = NumpyLoader(feed=Feed(index={"x": np.arange(4)}, sampler=sampler))
    assert batch["id"].tolist() == next(iter(copy(sampler)))


def test_labels_may_be_an_index_or_a_source(tmp_path: Path) -> None:
    samples = [{"x": bytes([number]), "label": number % 3} for number in range(9)]
    index = pack(samples, tmp_path)["data"]
    expected = PKBatchSampler(index.labels, p=2, k=2, seed=0)
    for data in (index, index.class_order, DatasetSource(samples, label="label")):
        sampler = PKBatchSampler(data, p=2, k=2, seed=0)
        assert sampler.fingerprint == expected.fingerprint
        assert list(sampler) == list(copy(expected))


def test_error_in_a_schedule_names_the_step() -> None:
    order = SequentialSampler(3)
    for call, word in (
        (
            lambda: MixtureSampler([order], weights={0: [1], 7: [1, 1]}, num_samples=3, seed=0),
            "one for each sampler",
        ),
        (lambda: WeightedSampler({0: [1.5], 7: [0.0]}, seed=0), "not all be 0, got 1 zeros"),
    ):
        with pytest.raises(ValueError, match=word) as caught:
            call()
        assert caught.value.__notes__ == ["in the schedule of weights, from step 7 on"]


def test_type_has_its_article() -> None:
    class ArrayRecordDataSource:
        pass

    found = [validate.a_type(value) for value in (ArrayRecordDataSource(), 3, {}, np.uint8(1))]
    assert found == ["an ArrayRecordDataSource", "an int", "a dict", "a uint8"]
