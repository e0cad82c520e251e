"""Decode large JPEG images to small ones: whole, and with `reducing_gap`, beside Pillow.

python benchmarks/images.py
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable

import numpy as np
from PIL import Image

from twinfeed import DecodeImage

SHAPES = ((256, 256), (600, 800), (1200, 1600))
SIZES = (64, 224)


def photo(height: int, width: int, seed: int = 0) -> bytes:
    """Return a JPEG of soft colours, as of a camera."""
    few = np.random.default_rng(seed).integers(0, 255, (height // 16, width // 16, 3), np.uint8)
    file = io.BytesIO()
    large = Image.fromarray(few).resize((width, height), Image.Resampling.BICUBIC)
    large.save(file, "jpeg", quality=90)
    return file.getvalue()


def pillow(data: bytes, size: int) -> Callable[[], object]:
    """Decode by Pillow, which decodes a part of the pixels too."""

    def decode() -> object:
        image = Image.open(io.BytesIO(data))
        image.draft("RGB", (2 * size, 2 * size))
        return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))

    return decode


def microseconds(work: Callable[[], object]) -> float:
    """Return the processor time of one call."""
    begin = time.process_time()
    work()
    return 1e6 * (time.process_time() - begin)


def main() -> None:
    """Print a row for each shape and size: medians, and medians of ratios of pairs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    pairs = parser.parse_args().pairs
    print("pixels, to | whole, µs | reducing_gap=2.0 | of whole | Pillow's draft | of whole")
    for height, width in SHAPES:
        data = photo(height, width)
        for size in SIZES:
            if min(height, width) < 4 * size:
                continue
            whole = DecodeImage(size=(size, size))
            part = DecodeImage(size=(size, size), reducing_gap=2.0)
            ways = [
                lambda whole=whole, data=data: whole({"image": data}),
                lambda part=part, data=data: part({"image": data}),
                pillow(data, size),
            ]
            times = np.array([[microseconds(way) for way in ways] for _ in range(pairs)])
            middle = [statistics.median(column) for column in times.T]
            ratios = [statistics.median(column) for column in (times / times[:, :1]).T]
            print(
                f"{height} x {width}, {size} | {middle[0]:,.0f} | {middle[1]:,.0f} | "
                f"{ratios[1]:.2f} | {middle[2]:,.0f} | {ratios[2]:.2f}"
            )


if __name__ == "__main__":
    main()
