"""Compare loaders with their floors by processor time, in pairs of one process.

Where other programs use the machine too, seconds by the clock mean nothing. Here each way takes
turns with its floor, the process's own time counts, and the ratio is the median of the pairs, with
its range. Pages are warm, and all is read and decoded in random order, in batches of 128.

    python benchmarks/processor.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from profile_batch import BATCH, written
from torch_loading import SIDE, photo

from twinfeed import (
    BatchSampler,
    DatasetSource,
    DecodeImage,
    Feed,
    Index,
    NumpyLoader,
    RandomSampler,
    Reader,
    TorchLoader,
    open_index,
    pack,
)

Work = Callable[[], object]


def compare(name: str, floor: Work, ways: dict[str, Work], records: int, pairs: int) -> None:
    """Print a row for each way: microseconds a record of the floor and of the way, their ratio."""

    def microseconds(work: Work) -> float:
        begin = time.process_time()
        work()
        return 1e6 * (time.process_time() - begin) / records

    for way, work in ways.items():
        times = np.array([(microseconds(floor), microseconds(work)) for _ in range(pairs + 1)][1:])
        ratios = sorted(times[:, 0] / times[:, 1])
        print(
            f"| {name}: {way} | {np.median(times[:, 0]):.2f} | {np.median(times[:, 1]):.2f} | "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |",
            flush=True,
        )


def epoch_of(loader: Any) -> Work:
    """Return a function that takes an epoch from a loader, and waits until its threads do.

    They make the first batches of the next epoch. So each epoch, but the first, is one of work.
    """

    def work() -> None:
        drain(loader)
        time.sleep(0.1)

    return work


def drain(batches: Iterable[Any]) -> None:
    """Take all batches, each of which lives until the next has come."""
    for _batch in batches:
        pass


def random_order(source: Any, **options: Any) -> Feed:
    """Return a feed of a source in random order."""
    order = RandomSampler(len(source), seed=0)
    sampler = BatchSampler(order, batch_size=BATCH, last_batch="drop")
    return Feed(source, sampler, **options)


def stored_bytes(index: Index, nbytes: int, pairs: int) -> None:
    """Compare random reads with a loop of `os.pread`, which drops each record at once."""
    batches = len(index) // BATCH
    ids = np.random.default_rng(0).permutation(len(index))[: batches * BATCH].reshape(-1, BATCH)
    paths = [f"{index.root}/{path}" for path in index.shard_paths.tolist()]
    descriptors = [os.open(path, os.O_RDONLY) for path in paths]
    rows = [
        [(descriptors[file], length, offset) for offset, length, file, _ in rows.tolist()]
        for rows in (index.rows(["data"], batch) for batch in ids)
    ]

    def floor() -> None:
        pread = os.pread
        for batch in rows:
            for descriptor, length, offset in batch:
                pread(descriptor, length, offset)

    def kept() -> None:
        pread = os.pread
        for batch in rows:
            _ = [pread(descriptor, length, offset) for descriptor, length, offset in batch]

    unchecked = open_index(index.path, checksums=False)
    readers = {"every CRC": Reader(index), "no CRC": Reader(unchecked)}
    ways: dict[str, Work] = {"the same loop, batches kept": kept}
    for name, reader in readers.items():
        ways[f"`Reader`, {name}"] = lambda reader=reader: drain(map(reader.read, ids))
    for prefetch in (0, 2):
        for name, reader in readers.items():
            loader: Any = TorchLoader(random_order(reader.index), prefetch=prefetch)
            ways[f"`TorchLoader`, {name}, `prefetch={prefetch}`"] = epoch_of(loader)
    compare(f"{nbytes:,} bytes", floor, ways, batches * BATCH, pairs)


def arrays(nbytes: int, pairs: int) -> None:
    """Compare a source of arrays with `x[ids]`."""
    x = np.random.default_rng(0).integers(0, 256, (20_000, nbytes), np.uint8)
    ids = np.random.default_rng(1).permutation(len(x) // BATCH * BATCH).reshape(-1, BATCH)
    loader: Any = NumpyLoader(random_order(DatasetSource(x)))
    ways = {"`NumpyLoader`": epoch_of(loader)}
    compare(
        f"array, {nbytes:,} bytes", lambda: drain(map(x.__getitem__, ids)), ways, ids.size, pairs
    )


def images(folder: Path, pairs: int) -> None:
    """Compare decoding of JPEG images with the decoder alone, into the same buffer."""
    files = [photo(number) for number in range(1024)]
    index = pack([{"image": file} for file in files], folder / "images", shards=4)["data"]
    buffer = np.empty((SIDE, SIDE, 3), np.uint8)
    feed = random_order(index, decode=DecodeImage())
    loaders: dict[str, Any] = {
        "`NumpyLoader`, no thread": NumpyLoader(feed, prefetch=0, threads=0),
        "`TorchLoader`, two threads": TorchLoader(feed, threads=2),
    }
    compare(
        f"JPEG of {SIDE} × {SIDE}",
        lambda: drain(simplejpeg.decode_jpeg(file, buffer=buffer) for file in files),
        {name: epoch_of(loader) for name, loader in loaders.items()},
        len(files),
        pairs,
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    pairs = parser.parse_args().pairs
    print("| | floor, µs | µs a record | ratio |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for nbytes in (1000, 10_000):
            stored_bytes(written(Path(folder, f"{nbytes}"), 150, nbytes), nbytes, pairs)
        for nbytes in (1024, 10_240):
            arrays(nbytes, pairs)
        images(Path(folder), pairs)


if __name__ == "__main__":
    main()
