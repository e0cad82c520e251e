"""Show the bias of a shuffle buffer on sorted data, and its cure, as a picture.

Data that are written class by class are common. `shuffle(buffer_size)` with a buffer smaller than
the data leaves them nearly sorted: batches hold a few classes only, and nothing tells. This draws
a real one of tf.data beside the shard-aware shuffle, which holds no records at all:

    python shuffle_bias.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import tensorflow as tf
from digits import SEED, open_digits

from twinfeed import BatchSampler, RandomSampler, ShardShuffleSampler, diagnose, plot_mixing

BATCH, BUFFER = 32, 200


def main() -> None:
    """Draw five ways to shuffle 1,036 digits that lie sorted by class."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("shuffle-data"))
    folder: Path = parser.parse_args().out
    labels = np.sort(open_digits(folder)[0].labels)  # as a writer leaves them, class by class
    records = len(labels)

    buffered = tf.data.Dataset.range(records).shuffle(BUFFER, seed=SEED)
    orders = {
        f"blocks of {block}, {window} at once": ShardShuffleSampler(
            [records], block=block, window=window, seed=SEED
        )
        for block, window in ((64, 4), (8, 32))
    }
    orders["uniform"] = RandomSampler(records, seed=SEED)
    streams = {f"tf.data: shuffle({BUFFER})": np.fromiter(buffered.as_numpy_iterator(), np.int64)}
    streams |= {name: BatchSampler(order, batch_size=BATCH) for name, order in orders.items()}
    for name, stream in streams.items():
        batch_size = BATCH if isinstance(stream, np.ndarray) else None
        found = diagnose(stream, batch_size=batch_size, labels=labels)
        classes = found.distinct["classes"]
        print(f"{name}: {classes.value:.1f} classes in a batch, {classes.uniform:.1f} if uniform")
    plot_mixing(streams, labels=labels, buffers=[BUFFER]).savefig(folder / "mixing.png", dpi=90)
    print(f"picture: {folder / 'mixing.png'}")


if __name__ == "__main__":
    main()
