"""Measure many crops of very large images: what a cache of decoded images costs beside decoding.

The floor is decoding each image once, in one thread. The old recipe is a generator that keeps some
decoded images and cuts crops from them, with no seed, no bound by a proof and no resume. A loader
has threads of its own: one decodes, and one cuts the crops. So the processor's time of all threads,
and of the busiest thread of the library, is told beside the clock's: all as multiples of the
floor's in the same round. TensorFlow's own threads are not told apart. Unless said, a loader has as
many threads as it takes by itself: one for each processor.

    python benchmarks/crops.py [--images 60] [--crops 100]
"""

from __future__ import annotations

import argparse
import io
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from twinfeed import (
    BatchSampler,
    DecodeImage,
    Feed,
    Index,
    Loader,
    NumpyLoader,
    Reader,
    ReuseSampler,
    pack,
)

HEIGHT, WIDTH, SIDE, BATCH, LIVE = 3000, 4000, 224, 10, 10

Time = tuple[float, float, float]  # the clock's, the processor's, the busiest thread's, in seconds


def samples(count: int) -> Iterator[dict[str, Any]]:
    """Make JPEG images with some detail."""
    from PIL import Image

    for number in range(count):
        small = np.random.default_rng(number).integers(0, 256, (300, 400, 3), dtype=np.uint8)
        file = io.BytesIO()
        image = Image.fromarray(small).resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)
        image.save(file, "jpeg", quality=85)
        yield {"image": file.getvalue(), "label": number % 3}


def crop(sample: dict[str, Any]) -> dict[str, Any]:
    """Cut the crop that the seed says."""
    draw = np.random.default_rng(sample["seed"])
    top, left = draw.integers(HEIGHT - SIDE), draw.integers(WIDTH - SIDE)
    return {"image": sample["image"][top : top + SIDE, left : left + SIDE]}


def feed_of(index: Index, crops: int) -> Feed:
    order = ReuseSampler(len(index), reuse=crops, live=LIVE, seed=0)
    return Feed(index, BatchSampler(order, batch_size=BATCH), decode=DecodeImage(), transform=crop)


def decode_alone(index: Index, crops: int) -> None:
    """Decode each image once."""
    decode = DecodeImage()
    with Reader(index) as reader:
        for record in range(len(index)):
            decode({"image": reader.read([record], ["image"])["image"][0]})


def old_recipe(index: Index, crops: int) -> None:
    """Keep some decoded images, and replace one when its crops are used up."""
    decode, draw = DecodeImage(), random.Random(0)
    waiting = list(range(len(index)))
    held: list[list[Any]] = []
    batch = []
    with Reader(index) as reader:
        while waiting or held:
            while waiting and len(held) < LIVE:
                data = reader.read([waiting.pop()], ["image"])["image"][0]
                held.append([decode({"image": data})["image"], crops])
            one = draw.choice(held)
            top, left = draw.randrange(HEIGHT - SIDE), draw.randrange(WIDTH - SIDE)
            batch.append(one[0][top : top + SIDE, left : left + SIDE])
            one[1] -= 1
            if not one[1]:
                held = [other for other in held if other is not one]
            if len(batch) == BATCH:
                np.stack(batch)
                batch.clear()


def an_epoch(make: Callable[[Feed], Loader]) -> Callable[[Index, int], float]:
    def run(index: Index, crops: int) -> float:
        busy = 0.0
        with make(feed_of(index, crops)) as loader:
            for _ in loader:
                if loader.step == len(loader) - 1:  # the threads end with the last batch
                    busy = max(map(spent, threading.enumerate()))
        return busy

    return run


def spent(thread: threading.Thread) -> float:
    """Return the processor's time of one of the library's threads, in seconds."""
    if thread.ident is None or "twinfeed" not in thread.name:
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def torch_loader(feed: Feed, threads: int | None = None) -> Loader:
    from twinfeed import TorchLoader

    return TorchLoader(feed, device="cpu", threads=threads)


def tensorflow_loader(feed: Feed, threads: int | None = None) -> Loader:
    from twinfeed import TensorFlowLoader

    return TensorFlowLoader(feed, device="/CPU:0", threads=threads)


def main() -> None:
    """Run all ways in turn and print their medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=60)
    parser.add_argument("--crops", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import twinfeed.loaders.tensorflow
    import twinfeed.loaders.torch  # noqa: F401 - both, before the clock runs

    ways: dict[str, Callable[[Index, int], float | None]] = {
        "decode each image once, one thread": decode_alone,
        "old recipe": old_recipe,
        "NumpyLoader": an_epoch(NumpyLoader),
        "TorchLoader": an_epoch(torch_loader),
        "TensorFlowLoader": an_epoch(tensorflow_loader),
        "NumpyLoader, threads=1": an_epoch(lambda feed: NumpyLoader(feed, threads=1)),
        "TorchLoader, threads=1": an_epoch(lambda feed: torch_loader(feed, 1)),
        "TensorFlowLoader, threads=1": an_epoch(lambda feed: tensorflow_loader(feed, 1)),
    }
    with tempfile.TemporaryDirectory() as folder:
        index = pack(samples(options.images), Path(folder))["data"]
        times: dict[str, list[Time]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, run in ways.items():
                began = time.perf_counter(), time.process_time()
                busy = run(index, options.crops)
                clock, processor = time.perf_counter() - began[0], time.process_time() - began[1]
                times[name].append((clock, processor, processor if busy is None else busy))
    floor = times["decode each image once, one thread"]
    print("| way | seconds | of decoding alone | processor | busiest thread |")
    print("|---|---|---|---|---|")
    for name, taken in times.items():
        seconds = statistics.median(one[0] for one in taken)
        pairs = list(zip(taken, floor, strict=True))
        ratios = (statistics.median(a[n] / b[n] for a, b in pairs) for n in range(3))
        print(f"| {name} | {seconds:.1f} |", " | ".join(f"{ratio:.2f}" for ratio in ratios), "|")


if __name__ == "__main__":
    main()
