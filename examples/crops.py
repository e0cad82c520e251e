"""Train on many crops of very large images, and decode each image once for all of its crops.

Decoding a large photograph takes a hundred times as long as cutting a crop out of it, and the
decoded images of an epoch do not fit in memory. A reuse sampler keeps some images live, mixes their
crops with each other's, and replaces them steadily:

    python examples/crops.py
"""

from __future__ import annotations

import argparse
import io
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from twinfeed.loaders import DecodeImage, Feed, Index, NumpyLoader, open_index, pack
from twinfeed.samplers import BatchSampler, BatchStream, RandomSampler, ReuseSampler, ViewSampler

IMAGES, CROPS, LIVE, BATCH, SIDE = 24, 16, 8, 8, 224
HEIGHT, WIDTH = 1500, 2000


def open_photographs(folder: Path) -> Index:
    """Open large photographs, made of smooth noise on the first run."""
    if not (folder / "data.index").exists():
        random = np.random.default_rng(0)
        samples = []
        for _ in range(IMAGES):
            coarse = Image.fromarray(random.integers(0, 256, (15, 20, 3), dtype=np.uint8))
            file = io.BytesIO()
            coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC).save(file, "jpeg", quality=90)
            samples.append({"image": file.getvalue()})
        pack(samples, folder)
    return open_index(folder / "data.index")


def crop(sample: dict[str, Any]) -> dict[str, Any]:
    """Cut a square out of the image at a place that the sample's seed says."""
    random = np.random.default_rng(sample["seed"])
    y, x = random.integers(0, HEIGHT - SIDE), random.integers(0, WIDTH - SIDE)
    return {"crop": sample["image"][y : y + SIDE, x : x + SIDE]}


class Counting:
    """Decode images, and count how many."""

    def __init__(self) -> None:
        self._decode = DecodeImage()
        self.decoded = 0

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Decode one image."""
        self.decoded += 1
        return self._decode(sample)


def measure(name: str, index: Index, sampler: BatchStream) -> None:
    """Run through an epoch, and print what it took."""
    decode = Counting()
    feed = Feed(index, sampler, decode=decode, transform=crop)
    tried = feed.spec and decode.decoded  # a feed tries decode and transform before the first pass
    began = time.perf_counter()
    crops = sum(len(batch["crop"]) for batch in NumpyLoader(feed))
    seconds = time.perf_counter() - began
    print(f"{name}: {crops} crops, {decode.decoded - tried} images decoded, {seconds:.1f} s")


def main() -> None:
    """Take 16 crops of each image in both ways."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("crops-data"))
    index = open_photographs(parser.parse_args().out)
    every = ViewSampler(
        RandomSampler(IMAGES * CROPS, seed=0), [CROPS] * IMAGES, per_epoch="all", seed=0
    )
    measure("each crop decodes its image", index, BatchSampler(every, batch_size=BATCH))
    reuse = ReuseSampler(IMAGES, reuse=CROPS, live=LIVE, seed=0)
    measure("live images are reused", index, BatchSampler(reuse, batch_size=BATCH))
    megabytes = LIVE * HEIGHT * WIDTH * 3 / 2**20
    print(f"at most {LIVE} images are live at once: {megabytes:.0f} MB, whatever their number")


if __name__ == "__main__":
    main()
