"""Each kind of source and of sampler over the same 48 records, and a digest of what they give."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from twinfeed.loaders import DatasetSource, Feed, FromFolder, build_index, open_index, pack
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
)

RECORDS = 48
LABELS = np.arange(RECORDS) // 8
SOURCES = ("tar", "tfrecord", "files", "rows")


def _batches(order: Sampler, **options: Any) -> Callable[[], BatchStream]:
    return lambda: BatchSampler(order, **{"batch_size": 9, **options})


def _mixture() -> Sampler:
    orders = [RandomSampler(30, seed=0), SubsetSampler([1, 5, 8], of=18)]
    return MixtureSampler(orders, weights=[3, 1], num_samples=40, seed=4)


SAMPLERS: dict[str, Callable[[], BatchStream]] = {
    "sequential": _batches(SequentialSampler(RECORDS)),
    "random": _batches(RandomSampler(RECORDS, seed=1), last_batch="drop"),
    "random, padded": _batches(RandomSampler(RECORDS, seed=1), last_batch="pad"),
    "weighted": _batches(WeightedSampler(LABELS + 1.0, num_samples=30, seed=2)),
    "subset": _batches(SubsetSampler(np.arange(0, RECORDS, 3), of=RECORDS), batch_size=5),
    "shards": _batches(ShardShuffleSampler([20, 0, 28], block=5, window=3, seed=3)),
    "shards, stored": _batches(
        ShardShuffleSampler([8] * 6, block=8, window=2, order_within="stored", seed=3)
    ),
    "views": _batches(
        ViewSampler(RandomSampler(RECORDS, seed=1), LABELS + 1, per_epoch="one", seed=8)
    ),
    "mixture": _batches(_mixture()),
    "reuse": _batches(ReuseSampler(RECORDS, reuse=2, live=12, seed=7), batch_size=6),
    "bucket": lambda: BucketBatchSampler(LABELS + 1, budget=30, seed=9),
    "P x K": lambda: PKBatchSampler(LABELS, p=3, k={0: 2, 3: 3}, batches_per_epoch=5, seed=5),
    "P x K, all": lambda: PKBatchSampler(LABELS, p=4, k=2, coverage="all", seed=5),
    "P x K, stored": lambda: PKBatchSampler(LABELS, p=2, k=4, order_within="stored", seed=5),
    "exact once": lambda: ExactOnceBatchSampler(RECORDS, batch_size=9),
    "exact once, padded": lambda: ExactOnceBatchSampler(RECORDS, batch_size=9, last_batch="pad"),
    "a rank": lambda: ExactOnceBatchSampler(RECORDS, batch_size=20).shard(1, 3),
}


def image(number: int) -> bytes:
    """Return a file of six grey pixels."""
    return b"P5 3 2 255\n" + bytes([number, 1, 2, 3, 4, 5])


def write(folder: Path) -> None:
    """Write the records as loose files, and packed."""
    for number in range(RECORDS):
        path = folder / "files" / "loose" / f"class{LABELS[number]}" / f"{number:02}.pgm"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image(number))
    index = build_index(
        folder / "files" / "loose", folder / "files" / "data.index", label=FromFolder()
    )
    for container in ("tar", "tfrecord"):
        pack(index, folder / container, container=container, shards=6)  # type: ignore[arg-type]


def some(first: int, kind: str) -> list[str]:
    """Return a quarter of the samplers for a source, others for each, so that all are served."""
    return [name for n, name in enumerate(SAMPLERS) if SOURCES[(first + n) % 4] == kind]


@cache
def source(folder: Path, kind: str) -> Any:
    if kind == "rows":
        data = [{"image": image(n), "label": int(LABELS[n])} for n in range(RECORDS)]
        return DatasetSource(data, label="label", digest="48 grey images")
    return open_index(folder / kind / "data.index")


def pixels(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.frombuffer(sample["image"], np.uint8)[-6:].astype(np.float32)}


def brighter(sample: dict[str, Any]) -> dict[str, Any]:
    """An augmentation that draws from the sample's seed."""
    return {"x": sample["x"] + np.random.default_rng(sample["seed"]).random(6, np.float32)}


def feed(folder: Path, kind: str, sampler: str) -> Feed:
    return Feed(source(folder, kind), SAMPLERS[sampler](), decode=pixels, transform=brighter)


def digest(batches: Iterable[Mapping[str, Any]]) -> str:
    """Return a SHA-256 of the names, types, shapes and bytes of all arrays of all batches."""
    content = hashlib.sha256()
    for batch in batches:
        for name in sorted(batch):
            array = np.asarray(batch[name])
            content.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return content.hexdigest()
