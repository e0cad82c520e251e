"""Measure whether JAX's computation hides loading and copying, as gpu_prefetch.py does for torch.

python benchmarks/jax_prefetch.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
from gpu_prefetch import WARM, decode, images, medians, one_long_epoch

from twinfeed import Feed, JaxLoader


@jax.jit
def compute(images: jax.Array, weight: jax.Array, times: int) -> jax.Array:
    """Reduce the images to one matrix, and multiply it `times` by `weight`."""
    matrix = images.reshape(len(images), -1)[:, : len(weight)].astype(weight.dtype)
    return jax.lax.fori_loop(0, times, lambda _, product: product @ weight, matrix).sum()


def timed(steps: Iterator[Any], count: int) -> float:
    """Return the seconds of a step of what is running already, with nothing left on the device."""
    for _ in range(WARM):
        last = next(steps)
    jax.block_until_ready(last)
    started = time.perf_counter()
    for _ in range(count):
        last = next(steps)
    jax.block_until_ready(last)
    return (time.perf_counter() - started) / count


def main() -> None:
    """Print the time of a step against the larger of its floors, for steps of several lengths."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("gpu-benchmark-data"))
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    index = images(arguments.data / "pixels")
    feed = Feed(index, one_long_epoch(arguments.batch_size), decode=decode)
    weight = jax.random.uniform(jax.random.key(0), (4096, 4096)) / 2048  # products keep their size

    def loading(times: int) -> float:
        def steps() -> Iterator[Any]:
            with JaxLoader(feed, prefetch=3) as batches:
                for batch in batches:
                    yield compute(batch["image"], weight, times) if times else batch["image"]

        with closing(steps()) as running:
            return timed(running, arguments.steps)

    def computing(images: jax.Array, times: int) -> float:
        return timed((compute(images, weight, times) for _ in iter(int, 1)), arguments.steps)

    there = next(iter(JaxLoader(feed)))["image"]
    load, one = loading(0), computing(there, 8) / 8
    print(f"{jax.devices()[0]}\n\n| wanted | load | computation alone | together | of the larger |")
    print("|---" * 5 + "|")
    for share in (0.5, 1.0, 1.5, 3.0):
        times = max(1, round(share * load / one))
        loaded, alone, both = medians(
            lambda: loading(0),
            lambda times=times: computing(there, times),
            lambda times=times: loading(times),
        )
        print(
            f"| {share} × load | {loaded * 1e3:.2f} ms | {alone * 1e3:.2f} ms "
            f"| {both * 1e3:.2f} ms | {both / max(loaded, alone):.3f} |"
        )


if __name__ == "__main__":
    main()
