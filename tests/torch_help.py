"""What the tests of the torch backend share; importable by the workers they start."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from twinfeed.loaders import Feed, Index, Ragged, pack, request_of
from twinfeed.samplers import BatchStream

RECORDS = 24

Noted = dict[str, Any]


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
    return {"noisy": sample["length"] + noise, "told": np.array([sample["id"], sample["view"]])}


OPTIONS: dict[str, Any] = {"decode": lengths, "transform": noisy}


def noted(batch: dict[str, Any]) -> Noted:
    """A batch as plain Python, with the dtypes of its arrays or tensors."""
    return {name: _plain(value) for name, value in batch.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return value
    if isinstance(value, Ragged):
        pieces = np.split(value.values, np.cumsum(value.lengths)[:-1])
        return [piece.tolist() for piece in pieces[: len(value.lengths)]]
    if getattr(value, "is_nested", False):
        return [row.tolist() for row in value.unbind()]
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tolist()


def expected(
    index: Index, sampler: BatchStream, epochs: Iterable[int] = (0,), **options: Any
) -> list[Noted]:
    """The batches of whole epochs by a plain loop over the pure functions."""
    feed = Feed(index, sampler, **options)
    return [
        noted(feed(request_of(sampler, epoch=epoch, step=step)))
        for epoch in epochs
        for step in range(len(sampler))
    ]


def received(batches: Iterable[dict[str, Any]]) -> list[Noted]:
    """What a training loop gets."""
    return [noted(batch) for batch in batches]


def take(batches: Iterable[dict[str, Any]], count: int) -> Iterator[Noted]:
    """Break a pass off after `count` batches."""
    iterator = iter(batches)
    for _ in range(count):
        yield noted(next(iterator))
