"""Measure how long a loop waits at the seams: for the first batch of an epoch, and for another.

A batch's time is that between two batches, with a step that sleeps. The first epoch does not count.
With `--cold`, the pages of a record are dropped when the loop has received it, as of a set that is
larger than the memory: this takes no part of the time.

    python benchmarks/seams.py --rounds 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from twinfeed import (
    BatchSampler,
    Feed,
    Index,
    JaxLoader,
    NumpyLoader,
    SequentialSampler,
    TensorFlowLoader,
    TorchLoader,
    open_index,
    pack,
    shuffled,
)

BATCH = 64
LOADERS: dict[str, Callable[[Feed], Any]] = {
    "NumPy": NumpyLoader,
    "torch, threads": lambda feed: TorchLoader(feed, device="cpu", threads=2),
    "torch, 2 workers": lambda feed: TorchLoader(
        feed, device="cpu", num_workers=2, persistent_workers=True
    ),
    "JAX": JaxLoader,
    "TensorFlow": TensorFlowLoader,
}


def decode(sample: Any) -> dict[str, Any]:
    """Return the bytes as an array."""
    return {"data": np.frombuffer(sample["data"], np.uint8)}


def drop(index: Index, files: list[int], ids: np.ndarray) -> None:
    """Drop the pages of records."""
    for offset, length, file, _ in index.rows(["data"], ids).tolist():
        start = offset & -4096
        os.posix_fadvise(files[file], start, offset + length - start, os.POSIX_FADV_DONTNEED)


def times(loader: Any, epochs: int, step: float, index: Index, files: list[int]) -> Iterator[Any]:
    """Yield the seconds of the first batch, of the median of the others, and of each epoch."""
    for epoch in range(epochs):
        seconds, begin = [], time.perf_counter()
        for batch in loader:
            time.sleep(step)
            seconds.append(time.perf_counter() - begin)
            if files:
                drop(index, files, np.asarray(batch["id"]))
            begin = time.perf_counter()
        if epoch:
            yield seconds[0], statistics.median(seconds[1:]), sum(seconds)


def main() -> None:
    """Print a row for each loader and order."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", type=int, default=2048)
    parser.add_argument("--record-bytes", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step", type=float, default=0.0, help="seconds of a step")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--folder", help="where to write the shards")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        noise = np.random.default_rng(0).bytes(options.record_bytes)
        pack(({"data": noise} for _ in range(options.records)), folder, shard_records=512)
        index = open_index(Path(folder) / "data.index")
        paths = [f"{index.root}/{path}" for path in index.shard_paths.tolist()]
        files = [os.open(path, os.O_RDONLY) for path in paths] if options.cold else []
        for file in files:
            os.fsync(file)
        orders = {"in order": SequentialSampler(len(index)), "shuffled": shuffled(index, seed=0)}
        found: dict[tuple[str, str], list[Any]] = {}
        for _ in range(options.rounds):
            for way, make in LOADERS.items():
                for name, order in orders.items():
                    sampler = BatchSampler(order, batch_size=BATCH)
                    loader = make(Feed(index, sampler, decode=decode))
                    found.setdefault((way, name), []).extend(
                        times(loader, options.epochs, options.step, index, files)
                    )
                    loader.close()
        print("| loader | order | first batch, ms | another, ms | ratio | epoch, ms |")
        print("|---|---|---|---|---|---|")
        for (way, name), rows in found.items():
            first, other, epoch = (
                1e3 * statistics.median(part) for part in zip(*rows, strict=True)
            )
            row = f"{first:.2f} | {other:.2f} | {first / other:.2f} | {epoch:.0f}"
            print(f"| {way} | {name} | {row} |")


if __name__ == "__main__":
    main()
