"""Merge the parts of very many records in little memory, and open the index that comes of it.

The parts are synthetic: they say where records would lie, and the shards are empty files.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np

from twinfeed import open_index
from twinfeed.loaders import IndexOptions
from twinfeed.loaders.building._merge import write_index
from twinfeed.loaders.building._part_stats import IndexStats
from twinfeed.loaders.building._parts import FieldStats, PartFile, ShardPart, load_part
from twinfeed.loaders.index.arrays import row_type
from twinfeed.loaders.support.temporary import temporary_folder

BLOCK = 1 << 15
CLASSES = 1000


def write_part(folder: Path, shard: int, records: int) -> Path:
    """Write the part of a shard of so many records: a field, a key and a label each."""
    name = f"{shard:07d}.tfrecord"
    (folder / name).touch()
    options = IndexOptions(container="tfrecord", label_from="field", label="label")
    file = folder / f"{shard:032x}.part"
    part = ShardPart(options, name, 0, num_records=records)
    part.labels, part.first_records = [f"class {n}" for n in range(CLASSES)], [name] * CLASSES
    part.fields = {"image": FieldStats("bytes", BLOCK, 100)}
    part.string_sizes = {"keys": (records, 8 * records)}
    rows = np.zeros(BLOCK, row_type(0, 0, whole_files=False))
    with zipfile.ZipFile(file, "w") as archive:
        out = PartFile(archive)
        for start in range(0, records, BLOCK):
            count = min(BLOCK, records - start)
            arrays = {
                "rows-0": rows[:count],
                "keys-text": np.full(8 * count, ord("k"), np.uint8),
                "keys-ends": np.arange(8, 8 * count + 8, 8, dtype=np.uint32),
                "labels": np.arange(start, start + count) * 7919 % CLASSES,
            }
            out.add(count, arrays)
        out.finish(part)
    return file


def merged(folder: Path, limit: int) -> None:
    """Merge the parts of a folder, in a process whose data may grow by `limit` bytes."""
    held = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    data = next(int(words[1]) * 1024 for words in held if words[0] == "VmData:")
    resource.setrlimit(resource.RLIMIT_DATA, (data + limit, data + limit))
    start = time.perf_counter()
    stats = IndexStats(map(load_part, sorted(folder.glob("*.part"))))
    with temporary_folder(folder / "x.index") as work:
        write_index(folder / "x.index", work, stats, None)
    seconds = time.perf_counter() - start
    print(f"merged {stats.num_records:,} records with {limit:,} bytes at most, in {seconds:.0f} s")


def opening(path: Path) -> None:
    """Report the time to open an index, and to find where 64 records lie, for the first time."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        index = open_index(path)
        middle = time.perf_counter()
        index.rows(["image"], np.linspace(0, len(index) - 1, 64).astype(np.int64))
        times.append((middle - start, time.perf_counter() - middle))
    opened, found = (statistics.median(column) * 1000 for column in zip(*times, strict=True))
    print(
        f"{len(index):,} records in {len(index.shards):,} shards: open_index {opened:.1f} ms, "
        f"first rows {found:.1f} ms"
    )


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--shards", type=int, nargs="+", default=[20])
    parser.add_argument("--limit", type=int, default=700_000_000)
    parser.add_argument("--merge", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.merge:
        merged(Path(options.merge), options.limit)
        return
    for records in options.records:
        for shards in options.shards:
            with tempfile.TemporaryDirectory() as folder:
                for shard in range(shards):
                    write_part(Path(folder), shard, records // shards)
                command = [sys.executable, __file__, "--merge", folder, "--limit"]
                subprocess.run([*command, str(options.limit)], check=True)
                opening(Path(folder, "x.index"))


if __name__ == "__main__":
    main()
