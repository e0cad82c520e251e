"""Measure the index and the reader: building, opening, and random reads.

Random reads are compared with a bare loop of `os.pread` over the same ranges, alternating with it
in one process, since only ratios within one run mean something. Pages are warm, and times are of
the process's own CPU, so that neighbours disturb less. Each figure is the median of several runs.
For cold pages see cold.py.

    python benchmarks/reading.py --megabytes 400 --record-bytes 1000 10000 100000
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twinfeed import Reader, TFRecordWriter, build_index, open_index
from twinfeed.loaders import IndexOptions
from twinfeed.loaders.building.writer import index_writer
from twinfeed.loaders.formats.example import encode
from twinfeed.loaders.index.arrays import StringColumn, row_type
from twinfeed.loaders.index.index import SHARD, Index
from twinfeed.loaders.support.temporary import temporary_folder

RUNS = 7
BATCH = 128
SHARDS = 10

Batches = Sequence[Any]


def write_shards(folder: Path, count: int, record_bytes: int) -> list[Path]:
    """Write random images with a label and a key."""
    rng = np.random.default_rng(0)
    paths = []
    for shard in range(SHARDS):
        path = folder / f"d-{shard:05d}-of-{SHARDS:05d}.tfrecord"
        with TFRecordWriter(path) as writer:
            for number in range(count // SHARDS):
                sample = {"image": rng.bytes(record_bytes), "label": number % 1000}
                writer.write(encode(sample | {"key": f"{shard}/{number:06d}"}))
        paths.append(path)
    return paths


def rate(count: int, run: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return how many of `count` things a run does in a second."""
    start = clock()
    run()
    return count / (clock() - start)


def build(folder: Path, paths: list[Path]) -> Index:
    """Report the rate of indexing."""
    size = sum(path.stat().st_size for path in paths)

    def work() -> None:
        build_index(paths, folder / "x.index", label="label", key="key")

    rates = [rate(size, work, time.process_time) for _ in range(3)]
    index = open_index(folder / "x.index")
    speed = statistics.median(rates)
    print(
        f"  build_index, one core: {speed / 1e9:.2f} GB/s, "
        f"{speed * len(index) / size:,.0f} records/s"
    )
    return index


def bare(index: Index, batches: Batches) -> Callable[[], None]:
    """Return the floor: a loop of preads over the same ranges, all looked up beforehand."""
    fds = [os.open(f"{index.root}/{path}", os.O_RDONLY) for path in index.shard_paths.tolist()]
    rows = index.rows(["image"], np.concatenate(batches))
    work = [(fds[file], length, offset) for offset, length, file, _ in rows.tolist()]

    def run() -> None:
        pread = os.pread
        for fd, length, offset in work:
            pread(fd, length, offset)

    return run


def keeping(index: Index, batches: Batches) -> Callable[[], None]:
    """Return the floor of anything that gives batches: the same loop, each batch kept as a list."""
    fds = [os.open(f"{index.root}/{path}", os.O_RDONLY) for path in index.shard_paths.tolist()]
    work = [
        [(fds[file], length, offset) for offset, length, file, _ in rows.tolist()]
        for rows in (index.rows(["image"], batch) for batch in batches)
    ]

    def run() -> None:
        pread = os.pread
        for batch in work:
            _ = [pread(fd, length, offset) for fd, length, offset in batch]

    return run


def read(reader: Reader, batches: Batches) -> Callable[[], None]:
    """Return the same through the reader."""

    def run() -> None:
        for batch in batches:
            reader.read(batch, ["image"])

    return run


def warm(index: Index) -> None:
    """Report random reads of warm pages."""
    ids = np.random.default_rng(1).permutation(len(index))[: 100 * BATCH * 2]
    batches = [ids[n : n + BATCH] for n in range(0, len(ids) - BATCH + 1, BATCH)]
    count = len(batches) * BATCH
    plain, checked = Reader(open_index(index.path, checksums=False)), Reader(index)
    runs = {
        "bare": bare(index, batches),
        "that keeps each batch": keeping(index, batches),
        "Reader.read, CRC off": read(plain, batches),
        "Reader.read, CRC on": read(checked, batches),
    }
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for run in range(RUNS + 1):
        for name, work in runs.items():
            reached = rate(count, work, time.process_time)
            if run:
                rates[name].append(reached)
    floor = statistics.median(rates["bare"])
    print(f"  random reads, warm: a bare pread loop {floor:,.0f} records/s")
    for name in list(runs)[1:]:
        ratios = [one / base for one, base in zip(rates[name], rates["bare"], strict=True)]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        print(
            f"    {name}: {statistics.median(rates[name]):,.0f} records/s, "
            f"{middle:.2f} of the loop ({low:.2f} to {high:.2f})"
        )


def opening(folder: Path, records: int, shards: int) -> None:
    """Report the time to open a large index, and to read the first labels."""
    names = [f"{shard:06d}.tar" for shard in range(shards)]
    for name in names:
        (folder / name).touch()
    stops = np.linspace(0, records, shards + 1).astype(np.int64)
    arrays = {
        "shards": np.zeros(shards, SHARD),
        "shardstops": stops[1:],
        "shardlengths": np.diff(stops),
        "field-0": np.zeros(records, row_type(0, 0, whole_files=False)),
        "column-0": np.arange(records) % 1000,
        **StringColumn.of(names).arrays("shardpaths"),
    }
    facts = {
        "container": "tar",
        "records": records,
        "columns": ["label"],
        "fields": [{"name": "image", "kind": "bytes", "missing": 0}],
        "digests": {},
        "class_order": None,
    }
    path = folder / "big.index"
    with temporary_folder(path) as work, index_writer(path, work) as store:
        store.add(arrays)
        store.finish(facts, vars(IndexOptions(container="tar")))
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        open_index(folder / "big.index")
        times.append(time.perf_counter() - start)
    milliseconds = statistics.median(times) * 1000
    print(f"open_index, {records:,} records in {shards:,} shards: {milliseconds:.1f} ms")


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--record-bytes", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--folder", help="where to write the shards")
    options = parser.parse_args()
    for record_bytes in options.record_bytes:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            count = options.megabytes * 1_000_000 // record_bytes
            print(f"records of {record_bytes:,} bytes, {count:,} of them")
            index = build(Path(folder), write_shards(Path(folder), count, record_bytes))
            warm(index)
    for shards in (100, 5000):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            opening(Path(folder), 10_000_000, shards)


if __name__ == "__main__":
    main()
