"""Measure whether loading and copying hide behind the computation.

A step computes on the batch of images that the loader put on to the device. Its time with the
loader is compared with the larger of two floors: the computation alone, on a batch that is there
already, and the loader alone. Then copies from pinned memory alone are compared with the same
copies beside a computation of about the same length.

    python benchmarks/gpu_prefetch.py
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from twinfeed import BatchSampler, Feed, Index, RandomSampler, TorchLoader, open_index, pack
from twinfeed.loaders.batches.prefetch import Prefetcher
from twinfeed.loaders.torch._copier import copier_for

SIDE, RECORDS = 224, 4096

Steps = Generator[None, None, None]


def images(folder: Path) -> Index:
    """Pack images that need no decoding: the loader is to be fast."""
    if not (folder / "data.index").exists():
        random = np.random.default_rng(0)
        samples = ({"image": random.bytes(SIDE * SIDE * 3)} for _ in range(RECORDS))
        pack(samples, folder)
    return open_index(folder / "data.index")


def compute(batch: torch.Tensor, weight: torch.Tensor, times: int) -> torch.Tensor:
    """Reduce the images to one matrix, and multiply it `times` by `weight`."""
    matrix = batch.view(len(batch), -1)[:, : weight.shape[0]].to(weight.dtype)
    for _ in range(times):
        matrix = matrix @ weight
    return matrix.sum()


def timed(steps: Steps, warm: int, count: int, device: torch.device) -> float:
    """Return the seconds of a step of what is running already, with nothing left on the device.

    What was made ahead before the clock counts as nothing: a few batches of `count`.
    """
    with closing(steps):
        for _ in range(warm):
            next(steps)
        _wait(device)
        started = time.perf_counter()
        for _ in range(count):
            next(steps)
        _wait(device)
        return (time.perf_counter() - started) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def computing(batch: torch.Tensor, weight: torch.Tensor, times: int) -> Steps:
    """Compute on one batch that is there already."""
    while True:
        compute(batch, weight, times)
        yield


def medians(*ways: Callable[[], float]) -> list[float]:
    """Take each measure three times, in turn."""
    rounds = [[way() for way in ways] for _ in range(3)]
    return [statistics.median(one) for one in zip(*rounds, strict=True)]


def with_computing(
    running: Callable[[int], Steps],
    batch: torch.Tensor,
    weight: torch.Tensor,
    times: int,
    *,
    warm: int,
    steps: int,
    device: torch.device,
) -> list[float]:
    """Return the times of a step of what is running alone, of computing alone, and of both."""
    return medians(
        lambda: timed(running(0), warm, steps, device),
        lambda: timed(computing(batch, weight, times), 1, steps, device),
        lambda: timed(running(times), warm, steps, device),
    )


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the pixels of an image."""
    return {"image": np.frombuffer(sample["image"], np.uint8).reshape(SIDE, SIDE, 3)}


def hidden_loading(index: Index, device: torch.device, batch_size: int, steps: int) -> None:
    """Print the time of a step against the larger of its floors, for steps of several lengths."""
    weight = torch.rand(4096, 4096, device=device) / 2048  # products keep their size

    def loader() -> TorchLoader:
        sampler = BatchSampler(RandomSampler(RECORDS, seed=0), batch_size=batch_size)
        return TorchLoader(Feed(index, sampler, decode=decode), device=device, prefetch=3)

    def loading(times: int) -> Steps:
        with loader() as batches:
            while True:
                for batch in batches:
                    if times:
                        compute(batch["image"], weight, times)
                    yield

    there = next(iter(loader()))["image"]
    warm = 2 * -(-RECORDS // batch_size)  # epochs
    load = timed(loading(0), warm, steps, device)
    one = timed(computing(there, weight, 8), 1, steps, device) / 8
    print(f"\n| wanted | load | computation alone | together | of the larger |\n{'|---' * 5}|")

    def row(share: float) -> str:
        times = max(1, round(share * load / one))
        loaded, alone, both = with_computing(
            loading, there, weight, times, warm=warm, steps=steps, device=device
        )
        return (
            f"| {share} × load | {loaded * 1e3:.2f} ms "
            f"| {alone * 1e3:.2f} ms, {alone / loaded:.2f} of it | {both * 1e3:.2f} ms "
            f"| {both / max(loaded, alone):.3f} |"
        )

    for share in (0.5, 1.0, 1.5, 3.0):
        print(row(share))
    if device.type == "cuda":
        print(f"\nmost memory reserved: {torch.cuda.max_memory_reserved(device) / 1e9:.2f} GB")


def overlapped_copies(device: torch.device, batch_size: int, steps: int) -> None:
    """Print how long copies and a computation take, alone and together."""
    copier = copier_for(device)
    weight = torch.rand(4096, 4096, device=device) / 2048
    sources = [
        copier.prepare({"image": torch.zeros(batch_size, SIDE, SIDE, 3, dtype=torch.uint8)})
        for _ in range(4)
    ]
    there = copier.receive(copier.send(sources[0]))["image"]

    def copying(times: int) -> Steps:
        with Prefetcher(map(copier.send, itertools.cycle(sources)), depth=3) as ahead:
            for sent in ahead:
                batch: dict[str, Any] = copier.receive(sent)
                if times:
                    compute(batch["image"], weight, times)
                yield

    copies = timed(copying(0), steps, steps, device)
    one = timed(computing(there, weight, 8), 1, steps, device) / 8
    times = max(1, round(copies / one))
    copies, alone, both = with_computing(
        copying, there, weight, times, warm=steps, steps=steps, device=device
    )
    print(
        f"\ncopy alone {copies * 1e3:.2f} ms, computation alone {alone * 1e3:.2f} ms, "
        f"together {both * 1e3:.2f} ms: {(copies + alone - both) / min(copies, alone):.0%} of the "
        f"shorter is hidden"
    )


def main() -> int:
    """Measure both on one device; return 1 where there is no GPU and none other was named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("gpu-benchmark-data"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here: nothing measured (--device cpu shows that it runs)")
        return 1
    index = images(arguments.data)
    hidden_loading(index, device, arguments.batch_size, arguments.steps)
    overlapped_copies(device, arguments.batch_size, arguments.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
