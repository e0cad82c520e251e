"""Six records of words and labels, and single batches of feeds over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from support.inside import Request, batcher_of
from twinfeed.loaders import Feed, Index, pack

WORDS = [b"to", b"be", b"or", b"not", b"to", b"be"]


def pack_six_words(folder: Path) -> Index:
    samples = [{"word": word, "label": number % 3} for number, word in enumerate(WORDS)]
    return pack(samples, folder)["data"]


def measure(sample: dict[str, Any]) -> dict[str, Any]:
    """Decode a word to its length."""
    return {"size": np.int32(len(sample["word"]))}


def request_of(*ids: int, views: tuple[int, ...] | None = None) -> Request:
    """A request for these sample ids, each of the record of the same number."""
    array = np.array(ids, np.int64)
    seeds = np.arange(len(ids), dtype=np.uint64)
    return Request(0, 0, array, array, np.array(views or [0] * len(ids), np.int64), seeds)


def batch_of(feed: Feed, request: Request, threads: int = 0) -> dict[str, Any]:
    """The batch of a request, by a batcher of its own."""
    with batcher_of(feed, threads=threads) as batcher:
        return batcher(request)
