"""Examine samplers that pip installs by `audit`, and write the table of docs/audit.md.

A library that is not installed is left out, and said to be. `--write` replaces the table.

    pip install torchdata pytorch-metric-learning open-metric-learning sentence-transformers
    pip install transformers accelerate lightning timm mmengine webdataset tensorflow keras
    python benchmarks/audit_facts.py --write
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from twinfeed.testing import Audit, audit

PAGE = Path(__file__).parent.parent / "docs" / "audit.md"
N = 103  # records, a prime
LABELS = np.repeat(np.arange(13), [3, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11, 11, 13])  # 96 of 13 classes
UNIFORM = "as in a uniform shuffle"
HIDDEN = {"gives", "cost", "ids"}  # questions whose answers are no column of the table


class Row(NamedTuple):
    """A sampler of a distribution, the function that builds it, and what is declared."""

    distribution: str
    name: str
    make: Callable[..., Any]
    options: dict[str, Any]


ROWS: list[Row] = []


def row(distribution: str, name: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Add a row whose sampler the decorated function builds."""

    def add(make: Callable[..., Any]) -> Callable[..., Any]:
        ROWS.append(Row(distribution, name, make, options))
        return make

    return add


def in_batches(order: Any, size: int = 8, **options: Any) -> Any:
    """Return a torch batch sampler of an order."""
    from torch.utils.data import BatchSampler

    return BatchSampler(order, size, drop_last=False, **options)


@row("torch", "RandomSampler", expect="training")
def _() -> Any:
    from torch.utils.data import RandomSampler

    return RandomSampler(range(N))


@row("torch", "RandomSampler(generator=…)", expect="training")
def _(seed: int = 0) -> Any:
    import torch
    from torch.utils.data import RandomSampler

    return RandomSampler(range(N), generator=torch.Generator().manual_seed(seed))


@row("torch", "WeightedRandomSampler", expect="with replacement")
def _() -> Any:
    from torch.utils.data import WeightedRandomSampler

    return WeightedRandomSampler([1.0] * N, N)


@row("torch", "SubsetRandomSampler", expect="training")
def _() -> Any:
    from torch.utils.data import SubsetRandomSampler

    return SubsetRandomSampler(range(N))


@row("torch", "DistributedSampler", expect="training", world_size=(1, 2, 4))
def _(rank: int, world_size: int, seed: int = 0) -> Any:
    from torch.utils.data import DistributedSampler

    return DistributedSampler(range(N), world_size, rank, seed=seed)


@row("torch", "DistributedSampler(drop_last=True)", expect="training", world_size=(1, 2, 4))
def _(rank: int, world_size: int, seed: int = 0) -> Any:
    from torch.utils.data import DistributedSampler

    return DistributedSampler(range(N), world_size, rank, seed=seed, drop_last=True)


@row("torch", "DistributedSampler(shuffle=False)", expect="evaluation", world_size=(1, 2, 4))
def _(rank: int, world_size: int) -> Any:
    from torch.utils.data import DistributedSampler

    return DistributedSampler(range(N), world_size, rank, shuffle=False)


@row("torch", "DataLoader(shuffle=True)", expect="training")
def _(workers: int = 0) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(range(N), batch_size=8, shuffle=True, num_workers=workers)


@row("torchdata", "StatefulDistributedSampler", expect="training")
def _(rank: int, world_size: int, seed: int = 0) -> Any:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    return StatefulDistributedSampler(range(N), world_size, rank, seed=seed)


@row("torchdata", "StatefulDataLoader(shuffle=True)", expect="training")
def _() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(range(N), batch_size=8, shuffle=True)


@row("pytorch-metric-learning", "MPerClassSampler", expect="pk")
def _() -> Any:
    from pytorch_metric_learning.samplers import MPerClassSampler

    return in_batches(MPerClassSampler(LABELS, m=4, batch_size=16, length_before_new_iter=96), 16)


@row("pytorch-metric-learning", "HierarchicalSampler", expect="pk")
def _() -> Any:
    from pytorch_metric_learning.samplers import HierarchicalSampler

    labels = np.stack([LABELS, LABELS // 7], axis=1)
    return HierarchicalSampler(labels, batch_size=16, samples_per_class=4)


@row("open-metric-learning", "BalanceSampler", expect="pk")
def _() -> Any:
    from oml.samplers.balance import BalanceSampler

    return BalanceSampler(LABELS.tolist(), n_labels=4, n_instances=4)


@row("sentence-transformers", "GroupByLabelBatchSampler", expect="training")
def _(seed: int = 0) -> Any:
    return sentence_sampler("GroupByLabelBatchSampler", seed, label=LABELS.tolist())


@row("sentence-transformers", "NoDuplicatesBatchSampler", expect="training")
def _(seed: int = 0) -> Any:
    texts = [str(n % 40) for n in range(N)]
    return sentence_sampler("NoDuplicatesBatchSampler", seed, text=texts)


def sentence_sampler(name: str, seed: int, **columns: Any) -> Any:
    """Return a batch sampler of sentence-transformers over a dataset of one column."""
    import torch
    from datasets import Dataset
    from sentence_transformers import sampler

    options: dict[str, Any] = {"generator": torch.Generator(), "seed": seed, "drop_last": False}
    if "label" in columns:
        options["valid_label_columns"] = ["label"]
    return getattr(sampler, name)(Dataset.from_dict(columns), batch_size=16, **options)


@row("transformers", "LengthGroupedSampler", expect="training")
def _() -> Any:
    from transformers.trainer_pt_utils import LengthGroupedSampler

    return LengthGroupedSampler(8, lengths=[n % 37 + 1 for n in range(N)])


@row("transformers", "DistributedLengthGroupedSampler", expect="training", world_size=(1, 2, 4))
def _(rank: int, world_size: int, seed: int = 0) -> Any:
    from transformers.trainer_pt_utils import DistributedLengthGroupedSampler

    lengths = [n % 37 + 1 for n in range(N)]
    return DistributedLengthGroupedSampler(
        8, lengths=lengths, num_replicas=world_size, rank=rank, seed=seed
    )


@row("accelerate", "SeedableRandomSampler", expect="training")
def _(seed: int = 0) -> Any:
    return seedable(seed)


@row("accelerate", "BatchSamplerShard", expect="training", world_size=(1, 2, 4))
def _(rank: int, world_size: int, seed: int = 0) -> Any:
    from accelerate.data_loader import BatchSamplerShard

    return BatchSamplerShard(in_batches(seedable(seed)), world_size, rank)


@row("accelerate", "BatchSamplerShard(even_batches=False)", expect="training")
def _(rank: int, world_size: int, seed: int = 0) -> Any:
    from accelerate.data_loader import BatchSamplerShard

    return BatchSamplerShard(in_batches(seedable(seed)), world_size, rank, even_batches=False)


@row("accelerate", "SkipBatchSampler", expect="training")
def _(epoch: int, start: int = 0) -> Any:
    from accelerate.data_loader import SkipBatchSampler

    sampler = seedable(0)
    sampler.set_epoch(epoch)
    return SkipBatchSampler(in_batches(sampler), start)


def seedable(seed: int) -> Any:
    """Return the seedable sampler of accelerate."""
    from accelerate.data_loader import SeedableRandomSampler

    return SeedableRandomSampler(range(N), data_seed=seed)


@row("lightning", "DistributedSamplerWrapper", expect="training")
def _(rank: int, world_size: int) -> Any:
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
    from torch.utils.data import RandomSampler

    return DistributedSamplerWrapper(RandomSampler(range(N)), num_replicas=world_size, rank=rank)


@row("timm", "OrderedDistributedSampler", expect="evaluation", world_size=(1, 2, 4))
def _(rank: int, world_size: int) -> Any:
    return timm_samplers().OrderedDistributedSampler(range(N), world_size, rank)


@row("timm", "RepeatAugSampler", world_size=(1, 2, 4), num_records=300)
def _(rank: int, world_size: int) -> Any:
    return timm_samplers().RepeatAugSampler(range(300), world_size, rank)


def timm_samplers() -> Any:
    """Return timm's module of samplers alone: the package needs torchvision."""
    (path,) = (file for file in files("timm") or () if file.name == "distributed_sampler.py")
    spec = importlib.util.spec_from_file_location("timm_samplers", path.locate())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@row("mmengine", "DefaultSampler", expect="training", world_size=(1, 2, 4))
def _(rank: int, world_size: int, seed: int = 0) -> Any:
    from mmengine.dataset import DefaultSampler

    return DefaultSampler(range(N), seed=seed)


@row("mmengine", "DefaultSampler(round_up=False)", expect="evaluation", world_size=(1, 2, 4))
def _(rank: int, world_size: int) -> Any:
    from mmengine.dataset import DefaultSampler

    return DefaultSampler(range(N), shuffle=False, seed=0, round_up=False)


@row("mmengine", "InfiniteSampler", expect="infinite", world_size=(1, 2, 4))
def _(rank: int, world_size: int, seed: int = 0) -> Any:
    from mmengine.dataset import InfiniteSampler

    return InfiniteSampler(range(N), seed=seed)


@row("webdataset", "shuffle(30)", expect="training")
def _() -> Any:
    return web_pipeline("shuffle", 30)


@row("webdataset", "detshuffle(30)", expect="training")
def _() -> Any:
    return web_pipeline("detshuffle", 30)


def web_pipeline(name: str, *arguments: Any) -> Any:
    """Return a pipeline of webdataset over the ids."""
    import webdataset

    return webdataset.DataPipeline(lambda: iter(range(N)), getattr(webdataset, name)(*arguments))


@row("tensorflow", "shuffle(n)", expect="training")
def _(seed: int = 0) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.range(N).shuffle(N, seed=seed).batch(8)


@row("tensorflow", "shuffle(n, reshuffle_each_iteration=False)", expect="training")
def _(seed: int = 0) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.range(N).shuffle(N, seed=seed, reshuffle_each_iteration=False).batch(8)


@row("tensorflow", "shuffle(10)", expect="training", num_records=1000)
def _(seed: int = 0) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.range(1000).shuffle(10, seed=seed).batch(8)


@row("keras", "fit(shuffle=True)", expect="training")
def _() -> Any:
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    adapter = ArrayDataAdapter(np.arange(N), batch_size=8, shuffle=True)
    return adapter.get_numpy_iterator()


@row("twinfeed", "RandomSampler", expect="training")
def _(seed: int = 0) -> Any:
    from twinfeed import RandomSampler

    return RandomSampler(N, seed=seed)


@row("twinfeed", "BatchSampler", expect="training", world_size=(1, 2, 4))
def _(rank: int, world_size: int, seed: int = 0) -> Any:
    from twinfeed import BatchSampler, RandomSampler

    return BatchSampler(RandomSampler(N, seed=seed), batch_size=8).shard(rank, world_size)


@row("twinfeed", "ShardShuffleSampler", expect="training", num_records=1000)
def _(seed: int = 0) -> Any:
    from twinfeed import ShardShuffleSampler

    return ShardShuffleSampler([250] * 4, block=5, window=32, seed=seed)


@row("twinfeed", "PKBatchSampler", expect="pk", world_size=(1, 2, 4))
def _(rank: int, world_size: int, seed: int = 0) -> Any:
    from twinfeed import PKBatchSampler

    sampler = PKBatchSampler(LABELS, p=4, k=4, small="repeat", seed=seed)
    return sampler.shard(rank, world_size)


@row("twinfeed", "ExactOnceBatchSampler", expect="evaluation", world_size=(1, 2, 4))
def _(rank: int, world_size: int) -> Any:
    from twinfeed import ExactOnceBatchSampler

    return ExactOnceBatchSampler(N, batch_size=8).shard(rank, world_size)


@row("twinfeed", "WeightedSampler", expect="with replacement")
def _(seed: int = 0) -> Any:
    from twinfeed import WeightedSampler

    return WeightedSampler([1] * N, seed=seed)


def examined(sampler: Row) -> Audit:
    """Return the audit of a row, with labels for P x K."""
    options = {"labels": LABELS} if sampler.options.get("expect") == "pk" else {"num_records": N}
    if sampler.name.startswith("GroupByLabel"):
        options = {"labels": LABELS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return audit(sampler.make, **{**options, **sampler.options})


def cells(report: Audit) -> tuple[str, str]:
    """Return the faults and the facts of a report, as two cells, without examples and advice."""
    cells: dict[bool, list[str]] = {True: [], False: []}
    for question, text, mark in report.answers:
        resumed = question in ("start", "state")
        if question not in HIDDEN and (mark != " " or resumed) and text != UNIFORM:
            short = re.sub(r" \(such as \d+\)|, such as \[.*?\]|: pass .*", "", text)
            cells[mark == "!"].append(f"{question}: {short}")
    return "; ".join(f"**{fault}**" for fault in cells[True]) or "none", "; ".join(cells[False])


def table() -> str:
    """Return the table, below a line that says when and where it was made."""
    today = f"{datetime.now(UTC):%d %B %Y}".lstrip("0")
    lines = [
        f"{today}, Python {platform.python_version()}, numpy {version('numpy')}, by "
        "`python benchmarks/audit_facts.py --write`:",
        "",
        "| sampler | declared | ranks | faults | facts |",
        "|---|---|---|---|---|",
    ]
    for sampler in ROWS:
        try:
            release = version(sampler.distribution)
        except PackageNotFoundError:
            try:
                release = version(f"{sampler.distribution}-cpu")
            except PackageNotFoundError:
                print(f"left out: {sampler.distribution} is not installed", file=sys.stderr)
                continue
        started = time.perf_counter()
        report = examined(sampler)
        seconds = time.perf_counter() - started
        print(f"{sampler.distribution} {sampler.name}: {seconds:.1f} s", file=sys.stderr)
        if "ModuleNotFoundError" in str(report):
            print(f"left out: {report.findings[0]}", file=sys.stderr)
            continue
        ranks = sampler.options.get("world_size", (1, 2))
        if any(name.endswith(" ranks") for name in report.not_asked):
            ranks = (1,)
        faults, facts = cells(report)
        expect = sampler.options.get("expect") or "–"
        name = f"{sampler.distribution} {release.partition('+')[0]} `{sampler.name}`"
        lines.append(f"| {name} | {expect} | {', '.join(map(str, ranks))} | {faults} | {facts} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, or write it to the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the table of docs/audit.md")
    options = parser.parse_args()
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    logging.disable(logging.WARNING)
    text = table()
    if not options.write:
        print(text)
        return
    between = re.compile(r"(<!-- facts -->\n).*(<!-- end of facts -->)", re.DOTALL)
    PAGE.write_text(between.sub(lambda found: f"{found[1]}{text}\n{found[2]}", PAGE.read_text()))


if __name__ == "__main__":
    main()
