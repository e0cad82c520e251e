"""Join several captions and a large table of features to each image, in constant memory.

An image is stored once, and each of its captions is a view: an epoch shows every image with one of
its captions, and five epochs show all. The captions are lines of a CSV file, in any order, and are
joined by the key of the image. The names of the images are a table with a row for each image.
Features that another model computed lie in a file of a gigabyte. The file is mapped, and a batch
reads its own rows only:

    python captions.py
"""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path

import numpy as np
from digits import SEED, decode, open_digits

from twinfeed import (
    BatchSampler,
    ByKey,
    ByRecord,
    Feed,
    Index,
    NumpyLoader,
    RandomSampler,
    SideTable,
    ViewSampler,
)

CAPTIONS, FEATURES = 5, 50_000
STYLES = ("a {}", "one {}", "the digit {}", "{}, written by hand", "a small picture of a {}")


def write_captions(path: Path, index: Index) -> None:
    """Write a line for each caption, with the key of its image, in any order."""
    digits = zip(index.keys(), index.labels, strict=True)
    rows = [(key, style.format(digit)) for key, digit in digits for style in STYLES]
    random.Random(SEED).shuffle(rows)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("image", "caption"), *rows])


def feature_table(path: Path, rows: int) -> SideTable:
    """Map a table of float32[rows, 50,000]: a sparse file, with the row in the first column."""
    if not path.exists():
        made = np.lib.format.open_memmap(path, "w+", np.float32, (rows, FEATURES))
        made[:, 0] = np.arange(rows)
    return SideTable(path)


def own_memory() -> float:
    """Return the MB that this process holds itself; pages of mapped files are the system's."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1024


def main() -> None:
    """Go through five epochs, and count which captions came."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("captions-data"))
    folder: Path = parser.parse_args().out
    index, _ = open_digits(folder)
    write_captions(folder / "captions.csv", index)
    captions = ByKey(folder / "captions.csv", key="image", value="caption")
    counts = captions.counts(index)  # how many captions each image has: 5
    samples = int(counts.sum())
    names = [f"image-{record:04}" for record in range(len(index))]

    features = feature_table(folder / "features.npy", samples)
    order = ViewSampler(RandomSampler(len(index), seed=SEED), counts, per_epoch="one", seed=SEED)
    sampler = BatchSampler(order, batch_size=32)
    side = {"caption": captions, "name": ByRecord(names), "feature": features}
    feed = Feed(index, sampler, decode=decode, side=side)

    shown = np.zeros(samples, np.int64)
    before = most = own_memory()
    with NumpyLoader(feed) as loader:
        for epoch in range(CAPTIONS):
            for batch in loader:
                most = max(most, own_memory())
                assert (batch["feature"][:, 0] == batch["id"]).all()  # each sample has its row
                for caption, digit in zip(batch["caption"], batch["label"], strict=True):
                    assert str(digit) in caption  # of its image
                shown[batch["id"]] += 1
            memory = f"{own_memory() - before:.0f} MB"
            print(f"epoch {epoch}: {memory}, {batch['name'][0]}: {batch['caption'][0]!r}")
    assert (shown == 1).all()
    size = samples * FEATURES * 4 / 2**30
    print(f"every caption came once; a table of {size:.2f} GB took {most - before:.0f} MB at most")


if __name__ == "__main__":
    main()
