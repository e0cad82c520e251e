"""Train on images with XML annotations, kill the run, and go on with the next batch.

Images and annotations lie as pairs of loose files, as annotation tools leave them. They are indexed
where they are: a label function reads the class from the XML. Train and validation take turns. The
place is saved with the model every ten batches, so that a killed run loses nine batches at most:

    python examples/annotations.py --kill-after 25      # kill -9, in the second epoch
    python examples/annotations.py                      # goes on
"""

from __future__ import annotations

import argparse
import os
import signal
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from twinfeed.loaders import DecodeImage, Entry, Feed, Index, build_index, open_index
from twinfeed.loaders.torch import TorchLoader
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    RandomSampler,
    SubsetSampler,
    split,
)

EPOCHS, SAVED_EVERY = 3, 10
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def write_pairs(folder: Path) -> None:
    """Write 600 digits as `0001.png` and `0001.xml`."""
    folder.mkdir(parents=True)
    data = load_digits()
    for number, (pixels, digit) in enumerate(zip(data.images[:600], data.target, strict=False)):
        Image.fromarray((pixels * 255 / 16).astype("uint8")).save(folder / f"{number:04}.png")
        (folder / f"{number:04}.xml").write_text(
            f"<annotation><object><name>{NAMES[digit]}</name></object></annotation>"
        )


def class_of(record: dict[str, Any]) -> str:
    """Read the class from a record's annotation."""
    return ElementTree.fromstring(record["annotation"]).findtext("object/name", "")


def open_pairs(folder: Path) -> Index:
    """Open the index of the pairs, built by the first run."""
    if not (folder / "pairs.index").exists():
        write_pairs(folder / "pairs")
        entries = [
            Entry(
                path.stem, {"image": f"pairs/{path.name}", "annotation": f"pairs/{path.stem}.xml"}
            )
            for path in sorted((folder / "pairs").glob("*.png"))
        ]
        build_index(entries, folder / "pairs.index", label=class_of, progress=True)
    return open_index(folder / "pairs.index")


def save(folder: Path, **states: Any) -> None:
    """Replace the checkpoint by a whole one, whenever the process may be killed."""
    torch.save(states, folder / "checkpoint.new")
    os.replace(folder / "checkpoint.new", folder / "checkpoint.pt")


def main() -> None:
    """Train, or go on training, and validate after each epoch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("annotations-data"))
    parser.add_argument("--kill-after", type=int, default=0, help="batches")
    options = parser.parse_args()
    index = open_pairs(options.out)
    training, validation = split(index.keys(range(len(index))), fraction=0.2, seed=0)

    decode = DecodeImage(mode="L")
    order = SubsetSampler(
        training, order=RandomSampler(len(training), seed=0), num_records=len(index)
    )
    feed = Feed(index, BatchSampler(order, batch_size=24), fields=["image"], decode=decode)
    once = ExactOnceBatchSampler(len(index), batch_size=64, records=validation)
    loader = TorchLoader(feed, device="cpu")
    validator = TorchLoader(Feed(index, once, fields=["image"], decode=decode), device="cpu")

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 10)
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    if (options.out / "checkpoint.pt").exists():
        saved = torch.load(options.out / "checkpoint.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        loader.load_state_dict(saved["loader"])
        print(f"goes on at epoch {loader.epoch}, step {loader.step}")

    def pixels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["image"].flatten(1).float() / 255

    received = 0
    while loader.epoch < EPOCHS:
        epoch = loader.epoch
        for batch in tqdm(loader, f"epoch {epoch}", len(loader), initial=loader.step):
            loss = cross_entropy(model(pixels(batch)), batch["label"])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            received += 1
            if loader.step % SAVED_EVERY == 0:
                states = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
                save(options.out, **states, loader=loader.state_dict())
            if received == options.kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
        with torch.no_grad():
            right = sum(
                int((model(pixels(batch)).argmax(1) == batch["label"]).sum()) for batch in validator
            )
        print(f"epoch {epoch}: {right} of {len(validation)} right, each met once")


if __name__ == "__main__":
    main()
