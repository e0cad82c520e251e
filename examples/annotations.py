"""Index images with XML annotations as pairs of loose files, for both frameworks.

You have images and annotations side by side, as annotation tools leave them, and the class of an
image stands in its XML. Training and validation take turns, on machines that may be taken away at
any time. The pairs are indexed where they are, and a killed run goes on with the next batch:

    python annotations_torch.py --kill-after 35        # kill -9, in the second epoch
    python annotations_torch.py                        # goes on
    python annotations_tensorflow.py --kill-after 35
    python annotations_tensorflow.py
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from PIL import Image

from twinfeed import (
    BatchSampler,
    DecodeImage,
    Entry,
    ExactOnceBatchSampler,
    Feed,
    Index,
    RandomSampler,
    SubsetSampler,
    build_index,
    open_index,
    split,
)

EPOCHS, SAVED_EVERY = 3, 10  # epochs; batches
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def options() -> argparse.Namespace:
    """Return the options of both programs."""
    parser = argparse.ArgumentParser(description="Train, or go on training, and validate.")
    parser.add_argument("--out", type=Path, default=Path("annotations-data"))
    parser.add_argument("--kill-after", type=int, default=0, help="batches")
    return parser.parse_args()


def write_pairs(folder: Path) -> None:
    """Write 600 digits as `0001.png` and `0001.xml`."""
    from sklearn.datasets import load_digits  # which takes a second, in the first run alone

    folder.mkdir(parents=True)
    data = load_digits()
    for number, (pixels, digit) in enumerate(zip(data.images[:600], data.target, strict=False)):
        Image.fromarray((pixels * 255 / 16).astype("uint8")).save(folder / f"{number:04}.png")
        (folder / f"{number:04}.xml").write_text(
            f"<annotation><object><name>{NAMES[digit]}</name></object></annotation>"
        )


def class_of(record: dict[str, Any]) -> str:
    """Read the class from a record's annotation."""
    return ElementTree.fromstring(record["xml"]).findtext("object/name", "")


def open_pairs(folder: Path) -> Index:
    """Open the index of the pairs, built by the first run."""
    if not (folder / "pairs.index").exists():
        write_pairs(folder / "pairs")
        entries = [
            Entry(path.stem, {"image": f"pairs/{path.name}", "xml": f"pairs/{path.stem}.xml"})
            for path in sorted((folder / "pairs").glob("*.png"))
        ]
        build_index(entries, folder / "pairs.index", label=class_of, progress=True)
    return open_index(folder / "pairs.index")


def feeds(folder: Path) -> tuple[Feed, Feed]:
    """Return what is trained on, in random order, and what is validated, each image once."""
    index = open_pairs(folder)
    training, validation = split(index.keys(), fraction=0.2, seed=0)
    order = RandomSampler(len(training), seed=0)
    some = SubsetSampler(training, of=len(index), order=order)
    once = ExactOnceBatchSampler(len(index), batch_size=64, records=validation)
    gray = DecodeImage(mode="L")
    return (
        Feed(index, BatchSampler(some, batch_size=24), fields=["image"], decode=gray),
        Feed(index, once, fields=["image"], decode=gray),
    )
