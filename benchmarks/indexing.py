"""Measure what an index costs: processor time for each record of a shard, beside a bare scan.

The shards have random images, a label of 1,000 classes and a key. The bare scan reads the shard by
chunks, and computes a checksum of as many bytes as a record has. Each figure is the least of
several runs, which take turns.

    python benchmarks/indexing.py --megabytes 100
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from twinfeed import TarWriter, TFRecordWriter, build_index
from twinfeed.loaders.formats import tar, tfrecord
from twinfeed.loaders.formats.example import encode
from twinfeed.loaders.support.checksum import crc32c_of_each

RUNS, CHUNK_BYTES = 5, 1 << 22


def write_shard(path: Path, count: int, record_bytes: int) -> None:
    """Write a shard of the container that its name ends with."""
    rng = np.random.default_rng(0)
    with TarWriter(path) if path.suffix == ".tar" else TFRecordWriter(path) as writer:
        for number in range(count):
            image, label, key = rng.bytes(record_bytes), number % 1000, f"{number:08d}"
            if isinstance(writer, TarWriter):
                writer.write(key, {"jpg": image, "cls": str(label).encode()})
            else:
                writer.write(encode({"image": image, "label": label, "key": key}))


def bare(path: Path, record_bytes: int) -> None:
    """Read a shard by chunks, and compute a checksum for every `record_bytes` bytes."""
    with open(path, "rb", buffering=0) as file:
        while data := file.read(CHUNK_BYTES):
            crc32c_of_each(data[at : at + record_bytes] for at in range(0, len(data), record_bytes))


def index(path: Path) -> None:
    """Build the index of a shard, with labels and keys."""
    is_tar = path.suffix == ".tar"
    label, key = ("cls", None) if is_tar else ("label", "key")
    build_index(path, path.with_suffix(".index"), label=label, key=key)


def scan(path: Path) -> None:
    """Scan a shard record by record."""
    module = tar if path.suffix == ".tar" else tfrecord
    for _ in module.scan(path):
        pass


def least(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the least processor time of each way."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(RUNS):
        for name, run in runs.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    return {name: min(each) for name, each in times.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100, help="size of each shard")
    parser.add_argument("--record-bytes", type=int, nargs="+", default=[1000, 10_000])
    arguments = parser.parse_args()
    print("| µs of the processor a record | bare | scan | index | index against bare |")
    print("|---|---|---|---|---|")
    for suffix in (".tfrecord", ".tar"):
        for record_bytes in arguments.record_bytes:
            count = arguments.megabytes * 1_000_000 // record_bytes
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, f"a{suffix}")
                write_shard(path, count, record_bytes)
                ways = {"bare": partial(bare, path, record_bytes)}
                took = least(ways | {"scan": partial(scan, path), "index": partial(index, path)})
                cells = [f"{seconds / count * 1e6:.1f}" for seconds in took.values()]
                ratio = f"{took['index'] / took['bare']:.1f}"
                print(f"| {suffix}, {record_bytes:,} bytes |", " | ".join([*cells, ratio]), "|")


if __name__ == "__main__":
    main()
