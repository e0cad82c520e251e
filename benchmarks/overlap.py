"""Find the records that two indexes have in common, by `overlap`, without reading.

The rows of a real index are replaced by `--rows` random ones on each side, which are mapped from
files, as those of a large index are; none is equal. Each size runs in a process of its own. Memory
is the peak of what the process holds for itself (RssAnon), beyond what it held before; pages of
mapped files come on top, and can be dropped at any time.

    python benchmarks/overlap.py --rows 10000000
"""

from __future__ import annotations

import argparse
import re
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from twinfeed import overlap, pack
from twinfeed.loaders import Index


def side(folder: Path, rows: int, seed: int) -> Index:
    """Return an index of so many records, whose field has random lengths and CRCs."""
    index = pack([{"image": b"x"}], folder)["data"]
    table = np.lib.format.open_memmap(
        folder / "rows.npy", "w+", index.table("image").dtype.descr, (rows,)
    )
    draw = np.random.default_rng(seed)
    for start in range(0, rows, 1 << 22):
        part = table[start : start + (1 << 22)]
        part["length"] = draw.integers(1, 100_000, len(part))
        part["crc"] = draw.integers(0, 1 << 32, len(part), dtype=np.uint32)
    index._tables["image"] = np.load(folder / "rows.npy", mmap_mode="r")
    index._records = rows
    return index


def megabytes() -> float:
    """Return the memory of this process without mapped files, in MB."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def main() -> None:
    """Print a row of the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    rows = parser.parse_args().rows
    peak = before = megabytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, megabytes())

    with tempfile.TemporaryDirectory() as folder:
        train, evaluation = (side(Path(folder, str(seed)), rows, seed) for seed in (0, 1))
        threading.Thread(target=watch).start()
        for name, sides in (("two indexes", (train, evaluation)), ("doubles of one", (train,))):
            peak, start, processor = megabytes(), time.perf_counter(), time.process_time()
            found = overlap(*sides)
            seconds, processor = time.perf_counter() - start, time.process_time() - processor
            print(
                f"| {rows:,} | {name} | {seconds:.1f} | {processor:.1f} | {peak - before:,.0f} "
                f"| {len(found.unread)} | {len(found.records)} |"
            )
        done.set()


if __name__ == "__main__":
    main()
