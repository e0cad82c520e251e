"""Sources without an index, in a module that worker processes can import."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from twinfeed.samplers import BatchSampler, ExactOnceBatchSampler, PKBatchSampler, RandomSampler

RECORDS = 24
WORDS = [b"x" * (number % 7) for number in range(RECORDS)]
LABELS = np.arange(RECORDS) % 4


class Words:
    """A list of words, as anybody would write it. It pickles, and reads from several threads."""

    fields = ("word",)
    columns: Mapping[str, Any] = {"label": LABELS}
    digests: Mapping[str, str] = {"word": "words-1"}

    def __init__(self, digest: str = "words-1") -> None:
        self.digests = {"word": digest}
        self.closed = 0

    def __len__(self) -> int:
        return RECORDS

    def describe(self, record: int) -> str:
        return f"word number {record}"

    def reader(self) -> "Words":
        return self

    def read(self, ids: Any, fields: Sequence[str]) -> dict[str, list[bytes]]:
        return {name: [WORDS[record] for record in ids] for name in fields}

    def close(self) -> None:
        self.closed += 1


def size(sample: dict[str, Any]) -> dict[str, Any]:
    return {"size": np.int32(len(sample["word"]))}


def noisy(sample: dict[str, Any]) -> dict[str, Any]:
    return {"noisy": np.float64(sample["size"] + sample["label"] + sample["seed"] / 2**64)}


def samplers() -> Iterator[Any]:
    yield BatchSampler(RandomSampler(RECORDS, seed=0), batch_size=5)
    yield ExactOnceBatchSampler(RECORDS, batch_size=7, last_batch="pad").shard(1, 2)
    yield PKBatchSampler(LABELS, p=2, k=3, seed=1, batches_per_epoch=4)
