"""Find the images that are in training and in the evaluation, and train without them.

Somebody has copied 60 of 1,000 training images of digits to the evaluation, under other names, and
some of them to another class. Their files are equal, so `overlap` finds them; nothing else is read.

    python leak.py
    python -m twinfeed overlap leak-data/train.index leak-data/eval.index
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from digits import write_images

from twinfeed import (
    DecodeImage,
    ExactOnceBatchSampler,
    Feed,
    Index,
    NumpyLoader,
    build_index,
    open_index,
    overlap,
)

OUT = Path("leak-data")
TRAIN, EVALUATION, COPIED = range(1000), range(1000, 1500), range(0, 900, 15)


def make() -> tuple[Index, Index]:
    """Write both folders of images, with the copies, and index them as they are."""
    if not (OUT / "eval.index").exists():
        write_images(OUT / "train", TRAIN)
        write_images(OUT / "eval", EVALUATION)
        for number in COPIED:
            (image,) = (OUT / "train").glob(f"*/{number:04}.png")
            label = "3" if number % 200 == 0 else image.parent.name  # some in a wrong folder
            shutil.copy(image, OUT / "eval" / label / f"scan-{number:04}.png")
        build_index(OUT / "train", OUT / "train.index")
        build_index(OUT / "eval", OUT / "eval.index")
    return open_index(OUT / "train.index"), open_index(OUT / "eval.index")


def pixels(index: Index, records: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels of records, each once, with a 1 beside them, and the labels."""
    sampler = ExactOnceBatchSampler(index, batch_size=64, records=records)
    feed = Feed(index, sampler, fields=["image", "label"], decode=DecodeImage("image", mode="L"))
    batches = list(NumpyLoader(feed))
    images = np.concatenate([batch["image"].reshape(-1, 64) / 255 for batch in batches])
    return np.hstack([images, np.ones((len(images), 1))]), np.concatenate(
        [batch["label"] for batch in batches]
    )


def fit(index: Index, records: np.ndarray | None = None) -> np.ndarray:
    """Return the weights of a linear classifier, the best for these records."""
    images, labels = pixels(index, records)
    return np.linalg.solve(images.T @ images + 1e-3 * np.eye(65), images.T @ np.eye(10)[labels])


def show(weights: np.ndarray, index: Index, records: np.ndarray | None = None) -> str:
    """Return how many images are classified right."""
    images, labels = pixels(index, records)
    right = (images @ weights).argmax(1) == labels
    return f"{right.mean():.1%} of {len(right)} right"


def main() -> None:
    """Find the copies, and train and evaluate with and without them."""
    train, evaluation = make()
    found = overlap(train, evaluation)
    print(found)
    print("with the copies:", show(fit(train), evaluation))
    print("evaluated without them:", show(fit(train), evaluation, found.records_to_keep))
    rest = overlap(evaluation, train).records_to_keep  # the training records
    print(f"trained on the other {len(rest)}:", show(fit(train, rest), evaluation))


if __name__ == "__main__":
    main()
