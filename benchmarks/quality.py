"""Count what an epoch of each sampler holds, beside its peers, all in one run.

Batches of 16 records, of 8 classes with 2 records each where a sampler can, over three sets of
labels. Each number is the mean of `--epochs` epochs, which follow one seed. Nothing is timed. A
peer that is not installed is left out, and said to be. detectron2 is on no package index: its
clone is put on PYTHONPATH.

    pip install pytorch-metric-learning open-metric-learning sentence-transformers torch
    python benchmarks/quality.py
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

P, K = 8, 2
BATCH = P * K
SEED = 0

Labels = np.ndarray
Epoch = Iterable[Sequence[int]]  # batches of record numbers
Way = Callable[[Labels], Iterator[Epoch]]


def endless(batches: Iterable[Sequence[int]]) -> Iterator[Epoch]:
    """Iterate over a batch sampler again and again."""
    while True:
        yield batches


def cut(ids: Iterable[int]) -> Iterator[list[int]]:
    """Cut single ids into batches, the last one smaller, as a DataLoader does."""
    stream = iter(ids)
    while batch := list(itertools.islice(stream, BATCH)):
        yield batch


def balanced(labels: Labels) -> np.ndarray:
    """Return weights with which every class is drawn equally often: float64[records]."""
    return 1 / np.bincount(labels)[labels]


def twinfeed_pk(labels: Labels) -> Iterator[Epoch]:
    """P x K, an epoch of as many records as there are."""
    from twinfeed import PKBatchSampler

    return endless(PKBatchSampler(labels, p=P, k=K, seed=SEED))


def twinfeed_pk_all(labels: Labels) -> Iterator[Epoch]:
    """P x K, every record at least once an epoch."""
    from twinfeed import PKBatchSampler

    return endless(PKBatchSampler(labels, p=P, k=K, coverage="all", seed=SEED))


def twinfeed_random(labels: Labels) -> Iterator[Epoch]:
    """A random order."""
    from twinfeed import BatchSampler, RandomSampler

    return endless(BatchSampler(RandomSampler(len(labels), seed=SEED), batch_size=BATCH))


def twinfeed_weighted(labels: Labels) -> Iterator[Epoch]:
    """Weights that balance the classes, with replacement."""
    from twinfeed import BatchSampler, WeightedSampler

    return endless(BatchSampler(WeightedSampler(balanced(labels), seed=SEED), batch_size=BATCH))


def pytorch_metric_learning(labels: Labels) -> Iterator[Epoch]:
    """MPerClassSampler, an epoch of as many records as there are."""
    from pytorch_metric_learning.samplers import MPerClassSampler

    sampler = MPerClassSampler(labels, K, batch_size=BATCH, length_before_new_iter=len(labels))
    while True:
        yield cut(sampler)


def open_metric_learning(labels: Labels) -> Iterator[Epoch]:
    """BalanceSampler, its laps over the classes joined to as many records as there are."""
    from oml.samplers.balance import BalanceSampler

    laps = itertools.cycle([BalanceSampler(labels.tolist(), n_labels=P, n_instances=K)])
    stream = itertools.chain.from_iterable(laps)
    while True:
        yield itertools.islice(stream, len(labels) // BATCH)


class Labelled(dict[str, list[int]]):
    """As much of a data set as sentence-transformers asks for."""

    column_names = ("label",)


def sentence_transformers(labels: Labels) -> Iterator[Epoch]:
    """GroupByLabelBatchSampler, as its trainer makes it."""
    import torch
    from sentence_transformers.base.sampler import GroupByLabelBatchSampler

    sampler = GroupByLabelBatchSampler(
        Labelled(label=labels.tolist()),
        batch_size=BATCH,
        drop_last=False,
        valid_label_columns=["label"],
        generator=torch.Generator(),
        seed=SEED,
    )
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield sampler


def detectron2(labels: Labels) -> Iterator[Epoch]:
    """RepeatFactorTrainingSampler: classes below the mean size are repeated, by a square root."""
    from detectron2.data.samplers import RepeatFactorTrainingSampler as Sampler

    boxes = [{"annotations": [{"category_id": label}]} for label in labels.tolist()]
    mean = 1 / len(np.unique(labels))
    factors = Sampler.repeat_factors_from_category_frequency(boxes, mean)
    stream = iter(Sampler(factors, seed=SEED))
    while True:
        yield cut(itertools.islice(stream, round(factors.sum().item())))


def torch_random(labels: Labels) -> Iterator[Epoch]:
    """A random order, as a DataLoader makes it."""
    from torch.utils.data import BatchSampler, RandomSampler

    return endless(BatchSampler(RandomSampler(range(len(labels))), BATCH, drop_last=False))


def torch_weighted(labels: Labels) -> Iterator[Epoch]:
    """Weights that balance the classes, with replacement."""
    from torch.utils.data import BatchSampler, WeightedRandomSampler

    order = WeightedRandomSampler(balanced(labels).tolist(), len(labels))
    return endless(BatchSampler(order, BATCH, drop_last=False))


WAYS: dict[str, tuple[Way, str]] = {
    "twinfeed `PKBatchSampler`": (twinfeed_pk, "twinfeed"),
    'twinfeed `PKBatchSampler(coverage="all")`': (twinfeed_pk_all, "twinfeed"),
    "sentence-transformers `GroupByLabelBatchSampler`": (
        sentence_transformers,
        "sentence_transformers",
    ),
    "pytorch-metric-learning `MPerClassSampler`": (
        pytorch_metric_learning,
        "pytorch_metric_learning",
    ),
    "open-metric-learning `BalanceSampler`": (open_metric_learning, "oml"),
    "detectron2 `RepeatFactorTrainingSampler`": (detectron2, "detectron2"),
    "twinfeed `WeightedSampler`": (twinfeed_weighted, "twinfeed"),
    "torch `WeightedRandomSampler`": (torch_weighted, "torch"),
    "twinfeed `RandomSampler`": (twinfeed_random, "twinfeed"),
    "torch `RandomSampler`": (torch_random, "torch"),
}


def sets() -> dict[str, Labels]:
    """Return the labels of each set, sorted: int64[records]."""
    zipf = (163 / np.arange(1, 41)).astype(int).clip(min=2)
    sizes = {"even": [40] * 50, "Zipf": zipf, "one large class": [488] + [8] * 24}
    return {name: np.repeat(np.arange(len(each)), each) for name, each in sizes.items()}


def counted(labels: Labels, epoch: Epoch) -> dict[str, float]:
    """Count what one epoch holds. Batches that are not full have no part in classes a batch."""
    batches = [np.asarray(batch) for batch in epoch]
    visits = np.bincount(np.concatenate(batches), minlength=len(labels))
    classes = [len(np.unique(labels[batch])) for batch in batches if len(batch) == BATCH]
    pairs = np.concatenate([positive(labels, batch) for batch in batches])
    return {
        "batches": len(batches),
        "records visited": np.count_nonzero(visits),
        "classes visited": len(np.unique(labels[visits > 0])),
        "classes a batch: least": min(classes),
        "mean": float(np.mean(classes)),
        "twice in a batch": sum(len(batch) - len(np.unique(batch)) for batch in batches),
        "records visited again": np.count_nonzero(visits > 1),
        "positive pairs": len(pairs),
        "distinct": len(np.unique(pairs)),
    }


def positive(labels: Labels, batch: np.ndarray) -> np.ndarray:
    """Return a number for each pair of different records of one class: int64[pairs]."""
    batch = np.unique(batch)
    one, other = np.triu_indices(len(batch), k=1)
    one, other = batch[one], batch[other]
    return (one * len(labels) + other)[labels[one] == labels[other]]


def table(labels: Labels, ways: dict[str, Way], epochs: int) -> None:
    """Print a row of means for each way."""
    for place, (name, way) in enumerate(ways.items()):
        seed_all()
        found = [counted(labels, epoch) for epoch in itertools.islice(way(labels), epochs)]
        if not place:
            print("| |", " | ".join(found[0]), "|\n|---|" + "---|" * len(found[0]))
        means = [float(np.mean([one[column] for one in found])) for column in found[0]]
        print(f"| {name} |", " | ".join(map(short, means)), "|")


def short(mean: float) -> str:
    """Write a mean with one decimal where that says something."""
    return f"{mean:,.0f}" if mean >= 100 else f"{mean:.1f}".removesuffix(".0")


def seed_all() -> None:
    """Seed the generators that peers share with the whole process."""
    random.seed(SEED)
    np.random.seed(SEED)
    if importlib.util.find_spec("torch"):
        import torch

        torch.manual_seed(SEED)


def main() -> None:
    """Print the versions, and a table for each set."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    peers = dict.fromkeys(peer for _, peer in WAYS.values())
    there = {peer for peer in peers if importlib.util.find_spec(peer)}
    for peer in peers:
        version = importlib.import_module(peer).__version__ if peer in there else "not installed"
        print(f"{peer}: {version}")
    ways = {name: way for name, (way, peer) in WAYS.items() if peer in there}
    for name, labels in sets().items():
        sizes = np.bincount(labels)
        print(f"\n{name}: {len(labels):,} records, {len(sizes)} classes of {sizes.min()}", end="")
        print(f" to {sizes.max()}\n")
        table(labels, ways, options.epochs)


if __name__ == "__main__":
    main()
