"""What the tests of the TensorFlow backend share."""

import hashlib
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import tensorflow as tf

from support import batches
from twinfeed.loaders import Feed, Index, pack
from twinfeed.loaders.tensorflow import TensorFlowLoader
from twinfeed.samplers import BatchStream

# Two devices stand in for a host and an accelerator, and for two replicas. TensorFlow must be told
# before its first operation: here, while pytest collects.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)

RECORDS, CLASSES = 61, 7


def word(record: int) -> bytes:
    """The bytes of a record."""
    return hashlib.sha256(b"%d" % record).digest()[: 5 + record % 20]


@lru_cache
def packed(records: int, container: str = "tfrecord", shards: int = 3) -> Index:
    """Records of different lengths in seven classes; of the same bytes in both containers."""
    samples = [{"word": word(n), "label": n % 7} for n in range(records)]
    folder = mkdtemp(prefix="twinfeed-tests-")
    return pack(samples, Path(folder), container=container, shards=shards)["data"]


def loader(
    index: Index, sampler: BatchStream, /, *, prefetch: int = 2, **feed: Any
) -> TensorFlowLoader:
    """A loader of a feed on the first CPU, where TensorFlow keeps what it need not copy."""
    readahead = feed.pop("readahead", batches.readahead)
    made = Feed(index, sampler, **feed)
    return TensorFlowLoader(made, prefetch=prefetch, device="/CPU:0", readahead=readahead)


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    """Decode a word to an array, and keep its bytes."""
    return {"first": np.frombuffer(sample["word"][:5], np.uint8), "word": sample["word"]}


def numbers(sample: dict[str, Any]) -> dict[str, Any]:
    """Decode the first bytes of a word to what a network takes."""
    return {"x": np.frombuffer(sample["word"][:5], np.uint8).astype(np.float32) / 255}


def ids_of(sampler: BatchStream, *epochs: int) -> list[list[int]]:
    """The ids of whole epochs."""
    return [ids.tolist() for epoch in epochs for ids in sampler.batches(epoch, 0, len(sampler))]
