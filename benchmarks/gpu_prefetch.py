"""Measure whether loading and copying hide behind the computation.

A step computes on the batch of images that the loader put on to the device. Its time with the
loader is compared with the larger of two floors: the computation alone, on a batch that is there
already, and the loader alone. Then copies from pinned memory alone are compared with the same
copies beside a computation of about the same length.

    python benchmarks/gpu_prefetch.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from twinfeed.loaders import DecodeArray, Index, open_index, pack
from twinfeed.loaders.prefetch import Prefetcher
from twinfeed.loaders.torch import TorchLoader
from twinfeed.loaders.torch.device import copier_for
from twinfeed.samplers import BatchSampler, RandomSampler

SIDE, RECORDS = 224, 4096
WARM_UP = 5  # steps


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


def per_step(run: Callable[[int], int], steps: int, device: torch.device) -> float:
    """Return the seconds of a step, warmed up, with nothing left on the device."""
    run(WARM_UP)
    _wait(device)
    started = time.perf_counter()
    done = run(steps)
    _wait(device)
    return (time.perf_counter() - started) / done


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def hidden_loading(index: Index, device: torch.device, batch_size: int, steps: int) -> None:
    """Print the time of a step against the larger of its floors, for steps of several lengths."""
    weight = torch.rand(4096, 4096, device=device, dtype=torch.float32) / 4096

    def loader() -> TorchLoader:
        sampler = BatchSampler(RandomSampler(RECORDS, seed=0), batch_size=batch_size)
        decode = DecodeArray("image", dtype="u1", shape=(SIDE, SIDE, 3))
        return TorchLoader(index, sampler, decode=decode, device=device, prefetch=3)

    def loading(times: int) -> Callable[[int], int]:
        def run(count: int) -> int:
            done = 0
            batches = loader()
            while done < count:
                for batch in batches:
                    if times:
                        compute(batch["image"], weight, times)
                    done += 1
                    if done == count:
                        break
            batches.close()
            return done

        return run

    there = next(iter(loader()))["image"]

    def computing(times: int) -> Callable[[int], int]:
        def run(count: int) -> int:
            for _ in range(count):
                compute(there, weight, times)
            return count

        return run

    load = per_step(loading(0), steps, device)
    one = per_step(computing(8), steps, device) / 8
    print(f"\n| computation | load | computation alone | together | of the larger |\n{'|---' * 5}|")
    for share in (0.5, 1.0, 1.5, 3.0):
        times = max(1, round(share * load / one))
        rows = [
            (per_step(computing(times), steps, device), per_step(loading(times), steps, device))
            for _ in range(3)
        ]
        alone, both = (statistics.median(column) for column in zip(*rows, strict=True))
        print(
            f"| {share} × load | {load * 1e3:.2f} ms | {alone * 1e3:.2f} ms | {both * 1e3:.2f} ms "
            f"| {both / max(load, alone):.3f} |"
        )


def overlapped_copies(device: torch.device, batch_size: int, steps: int) -> None:
    """Print how long copies and a computation take, alone and together."""
    copier = copier_for(device)
    weight = torch.rand(4096, 4096, device=device, dtype=torch.float32) / 4096
    sources = [
        copier.prepare({"image": torch.zeros(batch_size, SIDE, SIDE, 3, dtype=torch.uint8)})
        for _ in range(4)
    ]
    there = copier.receive(copier.send(sources[0]))["image"]

    def copying(times: int) -> Callable[[int], int]:
        def run(count: int) -> int:
            batches = map(copier.send, (sources[step % 4] for step in range(count)))
            with Prefetcher(batches, depth=3) as ahead:
                for sent in ahead:
                    batch: dict[str, Any] = copier.receive(sent)
                    if times:
                        compute(batch["image"], weight, times)
            return count

        return run

    def computing(times: int) -> Callable[[int], int]:
        def run(count: int) -> int:
            for _ in range(count):
                compute(there, weight, times)
            return count

        return run

    copies = per_step(copying(0), steps, device)
    times = max(1, round(copies / (per_step(computing(8), steps, device) / 8)))
    alone, both = per_step(computing(times), steps, device), per_step(copying(times), steps, device)
    print(
        f"\ncopy alone {copies * 1e3:.2f} ms, computation alone {alone * 1e3:.2f} ms, "
        f"together {both * 1e3:.2f} ms: {(copies + alone - both) / min(copies, alone):.0%} of the "
        f"shorter is hidden"
    )
    copier.close()


def main() -> int:
    """Measure both on one device; return 1 where there is no GPU and none other was named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("gpu-benchmark-data"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
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
