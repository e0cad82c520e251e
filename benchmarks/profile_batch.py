"""Profile one batch: the microseconds of each stage, of 128 records, one thread, pages warm.

python benchmarks/profile_batch.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
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
    Reader,
    pack,
    shuffled,
)
from twinfeed.loaders.batches.batcher import Batcher
from twinfeed.loaders.batches.feed import recipe_of
from twinfeed.loaders.batches.meter import Meter
from twinfeed.loaders.feed.arguments import stored_fields
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.reading.reader import plan_of_pass

BATCH, ROUNDS = 128, 7


def written(folder: Path, megabytes: int, record_bytes: int) -> Index:
    """Write records of random bytes, and bring them into memory."""
    noise = np.random.default_rng(0).bytes(record_bytes + 4096)
    count = megabytes * 1_000_000 // record_bytes // BATCH * BATCH
    samples = ({"data": noise[n % 4096 :][:record_bytes], "label": n % 10} for n in range(count))
    index = pack(samples, folder, shards=8)["data"]
    for name in index.shard_paths.tolist():
        Path(index.root, name).read_bytes()
    return index


def microseconds(work: Callable[[], object], batches: int) -> float:
    """Return the median time of a batch."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(times) / batches


def drained(items: Iterator[Any]) -> None:
    """Go through all items, and keep none."""
    for _ in items:
        pass


def profiled(index: Index, stream: BatchStream) -> dict[str, float]:
    """Return the microseconds of each stage."""
    batches = min(len(stream), 200)
    feed = Feed(index, stream)
    drawing = Feed(index, stream, transform=dict)
    reader = Reader(index)
    requests = list(islice(feed.requests(1), batches))
    found = {
        "request": microseconds(lambda: drained(islice(feed.requests(1), batches)), batches),
        "with seeds": microseconds(lambda: drained(islice(drawing.requests(1), batches)), batches),
    }
    for name, limit in (("plan, pages warm", None), ("plan, bound of 64 MiB", 1 << 26)):

        def plan(limit: int | None = limit) -> None:
            start, stored = len(stream), stored_fields(feed.index, feed.fields)
            reads = plan_of_pass(reader, Schedule(stream), stored, start, limit)
            for step in range(start, start + batches):
                with reads.step(step):
                    pass
            reader._plans.pop()  # the next round starts anew

        found[name] = microseconds(plan, batches)
    found["read"] = microseconds(
        lambda: drained(reader.read(request.records, feed.fields) for request in requests), batches
    )
    meter = Meter()
    batcher = Batcher(recipe_of(feed), reader=reader, meter=meter)
    found["read and collate"] = microseconds(lambda: drained(map(batcher, requests)), batches)
    report = meter.report()
    found["of these collation"] = 1e6 * report.collating / (ROUNDS * batches)
    found["meter"] = 5 * microseconds(
        lambda: drained(meter.timed("collating", int) for _ in range(1000)), 1000
    )
    for prefetch in (0, 2):
        loader = NumpyLoader(feed, prefetch=prefetch)

        def whole(loader: NumpyLoader = loader) -> None:
            loader.set_epoch(1)
            drained(islice(loader, batches))

        found[f"NumpyLoader(prefetch={prefetch})"] = microseconds(whole, batches)
    return found


def main() -> None:
    """Print a table: a row for each stage, a column for each size and order."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record-bytes", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--megabytes", type=int, default=200)
    options = parser.parse_args()
    columns: dict[str, dict[str, float]] = {}
    for record_bytes in options.record_bytes:
        with tempfile.TemporaryDirectory() as folder:
            index = written(Path(folder), options.megabytes, record_bytes)
            orders = {
                "random": RandomSampler(len(index), seed=0),
                "blocks": shuffled(index, seed=0),
            }
            for name, order in orders.items():
                stream = BatchSampler(order, batch_size=BATCH)
                columns[f"{record_bytes} {name}"] = profiled(index, stream)
    print("| microseconds a batch |", " | ".join(columns), "|\n|---|" + "---|" * len(columns))
    for stage in next(iter(columns.values())):
        print(f"| {stage} |", " | ".join(f"{one[stage]:.0f}" for one in columns.values()), "|")


if __name__ == "__main__":
    main()
