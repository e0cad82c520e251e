"""Mix two data sets in exact proportion, by one index of both.

In every four samples three are of the small data set and one of the large one, which
`sample_from_datasets` gives on average only:

    python mixing_datasets.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from digits import SEED, decode, open_digits

from twinfeed import BatchSampler, Feed, MixtureSampler, NumpyLoader, RandomSampler, build_index

WEIGHTS = (1, 3)


def main() -> None:
    """Index two sets of shards together, and count what comes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("mixing-data"))
    folder: Path = parser.parse_args().out
    open_digits(folder)  # writes train-*.tfrecord and eval-*.tfrecord

    # Shards are numbered in the order in which they are named: "eval" comes before "train".
    shards = [str(folder / f"{name}-*.tfrecord") for name in ("eval", "train")]
    index = build_index(shards, folder / "both.index", label="label")
    stops = np.cumsum(index.shard_lengths)
    small = int(stops[sum("eval" in path for path in index.shard_paths.tolist()) - 1])
    sizes = (small, len(index) - small)
    print(f"one index of {len(index)} records: {sizes[0]} of one set, {sizes[1]} of the other")

    mixture = MixtureSampler(
        [RandomSampler(size, seed=SEED) for size in sizes],
        weights=WEIGHTS[::-1],
        num_samples=1000,
        seed=SEED,
    )
    feed = Feed(index, BatchSampler(mixture, batch_size=40), decode=decode)
    counts = [int((batch["id"] < small).sum()) for batch in NumpyLoader(feed)]
    print(f"of 40 in each batch {min(counts)} to {max(counts)} are of the small set")
    assert set(counts) == {30}


if __name__ == "__main__":
    main()
