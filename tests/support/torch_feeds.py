"""What the tests of the torch backend share; importable by the workers they start."""

from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from twinfeed.loaders import Feed, Index, pack
from twinfeed.loaders.torch import RecordDataset, RequestSampler, as_tensors
from twinfeed.samplers import BatchStream

RECORDS = 24


def pack_words(folder: Path, records: int = RECORDS) -> Index:
    """Records of growing length, up to a hundred, in four classes."""
    samples = [{"word": b"x" * (number % 100), "label": number % 4} for number in range(records)]
    return pack(samples, folder)["data"]


def lengths(sample: dict[str, Any]) -> dict[str, Any]:
    """Decode a word to its length."""
    return {"length": np.int32(len(sample["word"]))}


def noisy(sample: dict[str, Any]) -> dict[str, Any]:
    """Add to the length what the sample's seed gives."""
    noise = np.float32(sample["seed"] >> 40) / 2**24
    return {"noisy": sample["length"] + noise, "sample": np.array([sample["id"], sample["view"]])}


OPTIONS: dict[str, Any] = {"decode": lengths, "transform": noisy}


def plain(index: Index, sampler: BatchStream, **options: Any) -> DataLoader[Any]:
    """A DataLoader as a user of torch writes it."""
    feed = Feed(index, sampler, **OPTIONS)
    return DataLoader(
        RecordDataset(feed), batch_sampler=RequestSampler(feed), collate_fn=as_tensors, **options
    )
