"""A program of a user, which strict type checkers pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from twinfeed.loaders import (
    DecodeImage,
    Feed,
    Index,
    NumpyLoader,
    build_index,
    open_index,
    pack,
    plan,
    shuffled,
)
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    SubsetSampler,
    split,
)


class Images(TypedDict):
    """The fields of a batch."""

    id: npt.NDArray[np.int64]
    label: npt.NDArray[np.int64]
    image: npt.NDArray[np.uint8]


def flipped(sample: dict[str, Any]) -> dict[str, Any]:
    random = np.random.default_rng(sample["seed"])
    image = sample["image"]
    return {"image": image[:, ::-1] if random.random() < 0.5 else image, "label": sample["label"]}


def prepared(folder: Path) -> Index:
    if not (folder / "data.index").exists():
        pack([{"image": b"...", "label": "cat"}], folder, container="tar", seed=0)
    fields = {"image": "jpg;png"}
    build_index(folder / "*.tar", folder / "all.index", label="cls", fields=fields)
    return open_index(folder / "all.index")


def train(index: Index) -> npt.NDArray[np.int64]:
    decode = DecodeImage("image", size=(64, 64), fit="crop")
    ids, held_out = split(len(index), fraction=0.1, seed=0, by=index.labels)
    sampler = PKBatchSampler(index.labels, p=8, k={0: 2, 1000: 4}, seed=0, batches_per_epoch=10)
    feed = Feed(index, sampler, decode=decode, transform=flipped, missing="late")
    seen = np.zeros(0, np.int64)
    with NumpyLoader[Images](feed, prefetch=2) as loader:
        for batch in loader:
            seen = np.append(seen, batch["label"])
            print(batch["image"].shape, loader.epoch, loader.state_dict())
    whole = ExactOnceBatchSampler(len(index), batch_size=64, records=held_out)
    for other in NumpyLoader(Feed(index, whole, decode=decode).shard(0, 2)):
        print(other["id"], other.keys())
    order = SubsetSampler(ids, of=len(index), order=RandomSampler(len(ids), seed=0))
    print(plan(Feed(index, BatchSampler(order, batch_size=32))).amplification)
    print(shuffled(index, seed=0).num_records)
    return seen
