"""Read pages that are not in memory: shuffles against the same loader in stored order.

Pages are dropped before each pass (`POSIX_FADV_DONTNEED`). Each way alternates with the loader in
order; the ratio is the median of the pairs, and its range stands in brackets: by the clock, then by
the processor time of the process. By the clock the machine must be quiet. The folder must be on the
disk that is measured.

    python benchmarks/cold.py --folder /data/scratch
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from twinfeed import (
    BatchSampler,
    Feed,
    Index,
    NumpyLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    ShardShuffleSampler,
    pack,
    shuffled,
)

BATCH, SHARDS = 128, 8
BACKENDS = ("numpy", "torch", "tensorflow")


def written(folder: Path, megabytes: int, record_bytes: int) -> Index:
    """Write records of random bytes."""
    count = megabytes * 1_000_000 // record_bytes
    noise = np.random.default_rng(0).bytes(1 << 20)
    starts = np.random.default_rng(1).integers(0, len(noise) - record_bytes, count).tolist()
    samples = ({"data": noise[start : start + record_bytes]} for start in starts)
    return pack(samples, folder, shard_records=-(-count // SHARDS))["data"]


def drop(index: Index) -> None:
    """Have the shards' pages dropped."""
    for path in index.shard_paths.tolist():
        fd = os.open(f"{index.root}/{path}", os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def loader(backend: str, feed: Feed, **options: Any) -> Any:
    """Carry the feed to a framework."""
    if backend == "torch":
        from twinfeed import TorchLoader

        return TorchLoader(feed, device="cpu", **options)
    if backend == "tensorflow":
        from twinfeed import TensorFlowLoader

        return TensorFlowLoader(feed, device="/CPU:0", **options)
    return NumpyLoader(feed, **options)


def seconds(made: Any, index: Index, records: int) -> np.ndarray:
    """Time so many records of a new epoch, from cold pages on: by the clock and the processor."""
    made.set_epoch(made.epoch + 1)
    drop(index)
    begin = np.array([time.perf_counter(), time.process_time()])
    for step, _ in enumerate(made, 1):
        if step * BATCH >= records:
            break
    return np.array([time.perf_counter(), time.process_time()]) - begin


def compared(index: Index, backend: str, pairs: int, only: str) -> None:
    """Print the ratio of each way to the loader in order."""
    count, seed = len(index), 0
    random = RandomSampler(count, seed=seed)
    ways: dict[str, tuple[Sampler, dict[str, Any]]] = {
        "shuffled(index)": (shuffled(index, seed=seed), {}),
        "shuffled(index), not told": (shuffled(index, seed=seed), {"readahead": 0}),
        **{
            f"block {block}, window {window}": (
                ShardShuffleSampler(index.shard_lengths, seed=seed, block=block, window=window),
                {},
            )
            for block, window in ((64, 16), (256, 16), (64, 512), (1024, 64))
        },
        "random": (random, {}),
        "random, 16 MiB": (random, {"readahead": 1 << 24}),
        "random, 256 MiB": (random, {"readahead": 1 << 28}),
        "random, not told": (random, {"readahead": 0}),
    }

    def made(order: Sampler, **options: Any) -> Any:
        return loader(backend, Feed(index, BatchSampler(order, batch_size=BATCH)), **options)

    in_order = made(SequentialSampler(count))
    seconds(in_order, index, count)
    for name, (order, options) in ways.items():
        if only not in name:
            continue
        way, ratios, rates = made(order, **options), [], []
        records = count if "not told" not in name else count // 4
        for _ in range(pairs):
            base = seconds(in_order, index, count) / count
            own = seconds(way, index, records) / records
            ratios.append(base / own)
            rates.append((1 / base[0], 1 / own[0]))
        base, own = (statistics.median(part) for part in zip(*rates, strict=True))
        by_clock, by_processor = (
            f"{statistics.median(part):.2f} ({min(part):.2f} to {max(part):.2f})"
            for part in zip(*ratios, strict=True)
        )
        print(
            f"| {backend} | {name} | {own:,.0f} of {base:,.0f} | {by_clock} | {by_processor} |",
            flush=True,
        )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--record-bytes", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--only", default="", help="ways whose name contains this")
    parser.add_argument("--folder", help="where to write the shards")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        index = written(Path(folder), options.megabytes, options.record_bytes)
        print("| loader | order | records/s, of in order | ratio | by the processor |")
        print("|---|---|---|---|---|")
        for backend in options.backends:
            compared(index, backend, options.pairs, options.only)


if __name__ == "__main__":
    main()
