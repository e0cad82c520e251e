"""Train on many crops of very large images, and decode each image once for all of its crops.

You train on microscope slides, satellite scenes or photographs that take a hundred times as long
to decode as to crop, and whose decoded images do not fit in memory. Known ways decode far too
often, or use some images far more than others. A reuse sampler bounds the memory, and uses every
image equally often:

    python crops.py
"""

from __future__ import annotations

import argparse
import io
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from twinfeed import (
    BatchSampler,
    BatchStream,
    DecodeImage,
    Feed,
    Index,
    NumpyLoader,
    RandomSampler,
    Reader,
    ReuseSampler,
    ViewSampler,
    open_index,
    pack,
)

IMAGES, CROPS, LIVE, BATCH, SIDE = 24, 16, 8, 8, 224
HEIGHT, WIDTH = 1500, 2000
decode_image = DecodeImage()


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
        self.decoded = 0

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Decode one image."""
        self.decoded += 1
        return decode_image(sample)


def with_sampler(index: Index, sampler: BatchStream) -> tuple[list[int], int]:
    """Run through an epoch; return which image each crop is of, and how many were decoded."""
    decode = Counting()
    feed = Feed(index, sampler, decode=decode, transform=crop)
    loader = NumpyLoader(feed, prefetch=0)  # else it would begin with the next epoch, too
    images = [int(n) for batch in loader for n in sampler.records(batch["id"])]
    return images, decode.decoded


def with_old_filter(index: Index) -> tuple[list[int], int]:
    """Do as the old recipe: keep some images, give crops of any, and replace one now and then."""
    random, decode = np.random.default_rng(0), Counting()

    def stream() -> Iterator[tuple[int, dict[str, Any]]]:
        with Reader(index) as reader:
            while True:
                for image in random.permutation(IMAGES).tolist():
                    data = reader.read([image], ["image"])["image"][0]
                    yield image, decode({"image": data})

    source, images = stream(), []
    kept = [next(source) for _ in range(LIVE)]
    while len(images) < IMAGES * CROPS:
        place = int(random.integers(LIVE))
        image, decoded = kept[place]
        crop({**decoded, "seed": len(images)})
        images.append(image)
        if random.random() < 1 / CROPS:
            kept[place] = next(source)
    return images, decode.decoded


def main() -> None:
    """Take as many crops in four ways, and print what each costs and gives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("crops-data"))
    index = open_photographs(parser.parse_args().out)
    pairs = RandomSampler(IMAGES * CROPS, seed=0)
    every = ViewSampler(pairs, [CROPS] * IMAGES, per_epoch="all", seed=0)
    reuse = ReuseSampler(IMAGES, reuse=CROPS, live=LIVE, seed=0)
    ways = {
        "decode for each crop": lambda: with_sampler(index, BatchSampler(every, batch_size=BATCH)),
        "random caching filter": lambda: with_old_filter(index),
        "reuse sampler": lambda: with_sampler(index, BatchSampler(reuse, batch_size=BATCH)),
    }
    print(f"{'':23}{'crops':>6}{'decoded':>9}{'uses of an image':>18}{'time':>8}")
    for name, way in ways.items():
        began = time.perf_counter()
        images, decoded = way()
        seconds = time.perf_counter() - began
        uses = Counter(images)
        spread = f"{min(uses[n] for n in range(IMAGES))} to {max(uses.values())}"
        print(f"{name:23}{len(images):6}{decoded:9}{spread:>18}{seconds:6.1f} s")
    megabytes = LIVE * HEIGHT * WIDTH * 3 / 2**20
    print(f"filter and sampler hold {LIVE} images: {megabytes:.0f} MB, whatever their number")


if __name__ == "__main__":
    main()
