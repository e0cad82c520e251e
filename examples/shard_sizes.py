"""Measure what the size of shards costs: in few large ones, and in many small ones.

You pack a data set, and have to say how large its shards are. Small shards mean many files to list,
to open and to copy; large ones leave workers idle while an index is built, and a damaged one takes
much with it. The same records are packed in several ways, and each way is measured:

    python shard_sizes.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from twinfeed import (
    BatchSampler,
    BatchStream,
    Feed,
    Index,
    NumpyLoader,
    RandomSampler,
    ShardShuffleSampler,
    build_index,
    open_index,
    pack,
)

BATCH = 128


def samples(records: int, size: int) -> Iterator[dict[str, Any]]:
    """Make records of random bytes."""
    random = np.random.default_rng(0)
    for _ in range(records):
        yield {"data": random.bytes(size)}


def seconds(function: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def forget(folder: Path) -> None:
    """Drop the shards from the system's page cache, so that they are read from the disk."""
    for path in folder.glob("*.tfrecord"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def rate(index: Index, sampler: BatchStream) -> float:
    """Return the records per second of an epoch."""
    feed = Feed(index, sampler)
    return len(index) / seconds(lambda: [None for _ in NumpyLoader(feed, readahead=4)])


def main() -> None:
    """Pack the same records in shards of several sizes, and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("shards-data"))
    parser.add_argument("--records", type=int, default=2048)
    parser.add_argument("--size", type=int, default=10_000, help="bytes of a record")
    parser.add_argument("--shards", type=int, nargs="+", default=[4, 64, 512])
    options = parser.parse_args()
    heads = (
        "shards",
        "a shard",
        "pack",
        "index",
        "random, cold",
        "warm",
        "by shards, cold",
        "warm",
    )
    widths = (6, 10, 8, 8, 14, 12, 17, 12)
    print("".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    for shards in options.shards:
        folder = options.out / str(shards)
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
        packing = seconds(
            lambda folder=folder, shards=shards: pack(
                samples(options.records, options.size), folder, shards=shards
            )
        )
        pattern, path = str(folder / "*.tfrecord"), folder / "again.index"
        indexing = seconds(lambda pattern=pattern, path=path: build_index(pattern, path))
        index = open_index(path)
        rates = []
        for order in (
            RandomSampler(len(index), seed=0),
            ShardShuffleSampler(index.shard_lengths, block=64, window=16, seed=0),
        ):
            sampler = BatchSampler(order, batch_size=BATCH)
            forget(folder)
            rates += [rate(index, sampler), rate(index, sampler)]
        cells = [
            f"{shards:,}",
            f"{options.records * options.size / shards / 1e6:.2f} MB",
            f"{packing:.1f} s",
            f"{indexing:.1f} s",
            *(f"{one:,.0f} /s" for one in rates),
        ]
        print("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))


if __name__ == "__main__":
    main()
