"""Measure batches of rows beside what the dataset itself takes for the same ids.

Each batch of a loader, with `prefetch=0`, is followed by a plain read of as many random rows: the
ratio of the medians is of one run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any

import numpy as np

from twinfeed import BatchSampler, DatasetSource, Feed, NumpyLoader, RandomSampler

RECORDS, BATCH = 20_000, 128


def measured(data: Any, plain: Callable[[Any], Any], epochs: int) -> tuple[float, float]:
    """Return the medians of a batch, in µs: of a loader over rows, and of a plain read."""
    rows = DatasetSource(data)
    feed = Feed(rows, BatchSampler(RandomSampler(len(rows), seed=0), batch_size=BATCH))
    random, loaded, read = np.random.default_rng(0), [], []
    with NumpyLoader(feed, prefetch=0) as loader:
        for _ in range(epochs):
            begin = perf_counter()
            for _batch in loader:
                loaded.append(perf_counter() - begin)
                ids = random.integers(0, len(data), BATCH)
                begin = perf_counter()
                plain(ids)
                read.append(perf_counter() - begin)
                begin = perf_counter()
    return 1e6 * statistics.median(loaded), 1e6 * statistics.median(read)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    small, large = (
        np.random.default_rng(0).integers(0, 256, (RECORDS, size), np.uint8)
        for size in (1024, 10_240)
    )
    samples = [{"row": row.tobytes()} for row in small]
    ways: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "array: x[ids]": (small, small.__getitem__),
        "array of 10 KB: x[ids]": (large, large.__getitem__),
        "list of dicts: samples[n]": (samples, lambda ids: [samples[n] for n in ids]),
    }
    with suppress(ImportError):
        import datasets

        stored = datasets.Dataset.from_list(samples)
        ways["Hugging Face: dataset[ids]"] = (stored, stored.__getitem__)
        ways["Hugging Face: dataset[n]"] = (stored, lambda ids: [stored[int(n)] for n in ids])
    print(f"| {BATCH} rows of 1 KB unless it says otherwise | twinfeed, µs | plain, µs | ratio |")
    print("|---|---|---|---|")
    for name, (data, plain) in ways.items():
        loaded, read = measured(data, plain, epochs)
        print(f"| {name} | {loaded:,.0f} | {read:,.0f} | {loaded / read:.2f} |")


if __name__ == "__main__":
    main()
