"""The data of the stories: scikit-learn's 1,797 handwritten digits, packed or as images."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from twinfeed import Index, open_index, pack

SEED = 7


def open_digits(folder: Path) -> tuple[Index, Index]:
    """Open 1,036 digits for training and 761 for evaluation: a prime, which nothing divides.

    A record has the 64 pixels of a digit as bytes, from 0 to 16, and its label.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():  # stories load the checkpoints that lie there
        raise SystemExit(f"{folder} belongs to another user: name a folder of your own by --out")
    if not (folder / "eval.index").exists():
        images, labels = load()
        rows = zip(images.astype("uint8"), labels, strict=True)
        samples = [{"pixels": pixels.tobytes(), "label": int(label)} for pixels, label in rows]
        pack(samples, folder, split={"train": 1036, "eval": 761}, seed=SEED)
    return open_index(folder / "train.index"), open_index(folder / "eval.index")


def decode(sample: dict[str, bytes]) -> dict[str, np.ndarray]:
    """Turn 64 bytes into 64 numbers between 0 and 1."""
    return {"pixels": np.frombuffer(sample["pixels"], np.uint8).astype(np.float32) / 16}


def write_images(folder: Path, numbers: Iterable[int] = range(1797)) -> None:
    """Write digits as `folder/<digit>/<number>.png`, a folder for each class."""
    images, labels = load()
    for number in numbers:
        path = folder / str(labels[number]) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((images[number] * 255 / 16).astype("uint8")).save(path)


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels of all digits, from 0 to 16, and their labels."""
    from sklearn.datasets import load_digits  # which takes a second, in the first run alone

    data = load_digits()
    return data.images, data.target
