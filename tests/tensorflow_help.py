"""What the tests of the TensorFlow backend share."""

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import tensorflow as tf

from twinfeed.loaders import Feed, Index, Ragged, pack, request_of
from twinfeed.samplers import BatchStream

Noted = dict[str, Any]

# Two devices stand in for a host and an accelerator, and for two replicas. TensorFlow must be told
# before its first operation: here, while pytest collects.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


def word(record: int) -> bytes:
    """The bytes of a record."""
    return hashlib.sha256(b"%d" % record).digest()[: 5 + record % 20]


@lru_cache
def packed(records: int, container: str = "tfrecord", shards: int = 3) -> Index:
    """Records of different lengths in seven classes; of the same bytes in both containers."""
    samples = [{"word": word(n), "label": n % 7} for n in range(records)]
    folder = mkdtemp(prefix="twinfeed-tests-")
    return pack(samples, Path(folder), container=container, shards=shards)["data"]


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    """Decode a word to an array, and keep its bytes."""
    return {"first": np.frombuffer(sample["word"][:5], np.uint8), "word": sample["word"]}


def noted(batch: dict[str, Any]) -> Noted:
    """A batch as plain Python, with the dtypes and shapes of its arrays or tensors."""
    return {name: _plain(value) for name, value in batch.items()}


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


def ids_of(sampler: BatchStream, *epochs: int) -> list[list[int]]:
    """The ids of whole epochs."""
    return [ids.tolist() for epoch in epochs for ids in sampler.batches(epoch, 0, len(sampler))]


def _plain(value: Any) -> Any:
    if isinstance(value, Ragged):
        pieces = np.split(value.values, np.cumsum(value.lengths)[:-1])
        return [piece.tolist() for piece in pieces[: len(value.lengths)]]
    if isinstance(value, list):
        return value
    if hasattr(value, "to_list"):  # a ragged tensor
        return value.to_list()
    array = value.numpy() if hasattr(value, "numpy") else np.asarray(value)
    if array.dtype == object:
        return array.tolist()
    return str(array.dtype), array.shape, array.tolist()
