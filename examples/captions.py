"""Join several captions and a large table of features to each image, in constant memory.

An image is stored once, and each of its captions is a view: an epoch shows every image with one of
its captions, and five epochs show all. The captions are texts, a row for each, and the names
of the images a table with a row for each image. Features that another model computed lie in a file
of a gigabyte. The file is mapped, and a batch reads its own rows only:

    python captions.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from digits import SEED, decode, open_digits

from twinfeed import (
    BatchSampler,
    ByRecord,
    Feed,
    NumpyLoader,
    RandomSampler,
    SideTable,
    ViewSampler,
)

CAPTIONS, FEATURES = 5, 50_000
STYLES = ("a {}", "one {}", "the digit {}", "{}, written by hand", "a small picture of a {}")


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
    captions = [style.format(digit) for digit in index.labels for style in STYLES]
    samples = len(captions)  # sample s is caption s % 5 of image s // 5
    names = [f"image-{record:04}" for record in range(len(index))]

    features = feature_table(folder / "features.npy", samples)
    order = ViewSampler(
        RandomSampler(len(index), seed=SEED), [CAPTIONS] * len(index), per_epoch="one", seed=SEED
    )
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
                assert batch["caption"] == [captions[sample] for sample in batch["id"]]
                shown[batch["id"]] += 1
            memory = f"{own_memory() - before:.0f} MB"
            print(f"epoch {epoch}: {memory}, {batch['name'][0]}: {batch['caption'][0]!r}")
    assert (shown == 1).all()
    size = samples * FEATURES * 4 / 2**30
    print(f"every caption came once; a table of {size:.2f} GB took {most - before:.0f} MB at most")


if __name__ == "__main__":
    main()
