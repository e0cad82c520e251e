"""Measure whether loading and copying hide behind the computation.

A step computes on the batch of images that the loader put on to the device. Its time with the
loader is compared with the larger of two floors: the computation alone, on a batch that is there
already, and the loader alone. The computation is first products of matrices, of any length that is
wanted, and then the training step of convolutional networks on JPEG images. Then copies from pinned
memory alone are compared with the same copies beside a computation of about the same length.

    python benchmarks/gpu_prefetch.py
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from images import photo
from torch import nn
from torch.utils.data import DataLoader, Dataset

from twinfeed import (
    BatchSampler,
    DecodeImage,
    Feed,
    Index,
    TorchLoader,
    WeightedSampler,
    open_index,
    pack,
)
from twinfeed.loaders.batches.prefetch import Prefetcher
from twinfeed.loaders.torch._copier import copier_for

SIDE, RECORDS = 224, 4096
WIDTHS = (32, 128, 256)  # channels of the networks
WORKERS = 8
WARM = 64  # steps before the clock starts

Steps = Generator[None, None, None]


def images(folder: Path) -> Index:
    """Pack images that need no decoding: the loader is to be fast."""
    if not (folder / "data.index").exists():
        random = np.random.default_rng(0)
        samples = ({"image": random.bytes(SIDE * SIDE * 3)} for _ in range(RECORDS))
        pack(samples, folder)
    return open_index(folder / "data.index")


def one_long_epoch(batch_size: int) -> BatchSampler:
    """Return a sampler whose epoch is longer than a measure: none begins while the clock runs."""
    order = WeightedSampler(np.ones(RECORDS), num_samples=batch_size * 10**6, seed=0)
    return BatchSampler(order, batch_size=batch_size)


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
        sampler = one_long_epoch(batch_size)
        return TorchLoader(Feed(index, sampler, decode=decode), device=device, prefetch=3)

    def loading(times: int) -> Steps:
        with loader() as batches:
            for batch in batches:
                if times:
                    compute(batch["image"], weight, times)
                yield

    there = next(iter(loader()))["image"]
    load = timed(loading(0), WARM, steps, device)
    one = timed(computing(there, weight, 8), 1, steps, device) / 8
    print(f"\n| wanted | load | computation alone | together | of the larger |\n{'|---' * 5}|")

    def row(share: float) -> str:
        times = max(1, round(share * load / one))
        loaded, alone, both = with_computing(
            loading, there, weight, times, warm=WARM, steps=steps, device=device
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


def photos(folder: Path) -> Index:
    """Pack JPEG images of soft colours, as of a camera, with their labels."""
    if not (folder / "data.index").exists():
        numbers = range(RECORDS)
        pack(({"image": photo(SIDE, SIDE, n), "label": n % 100} for n in numbers), folder)
    return open_index(folder / "data.index")


class Training:
    """The training step of a convolutional network of `width` channels, in bfloat16."""

    def __init__(self, width: int, device: torch.device) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 7, stride=4, padding=3), nn.ReLU()]
        for _ in range(6):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100)]
        self.network = nn.Sequential(*layers).to(device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.01)
        self.device = device

    def __call__(self, batch: dict[str, Any]) -> None:
        images = batch["image"].permute(0, 3, 1, 2).float() / 255  # channels last, as they came
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(self.network(images), batch["label"])
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


class Decoded(Dataset[Any]):
    """A dataset by hand: JPEG images in a list, which `DecodeImage` decodes."""

    def __init__(self, index: Index) -> None:
        self.samples, self.decode = list(index), DecodeImage()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, record: int) -> dict[str, Any]:
        sample = self.decode(self.samples[record])
        return {"image": torch.from_numpy(sample["image"]), "label": sample["label"]}


def hidden_decoding(index: Index, device: torch.device, batch_size: int, steps: int) -> None:
    """Print the time of a training step on JPEG images against the larger of its floors.

    The last loader is a DataLoader with its own options for this: workers, pinned memory, and
    copies that do not block. It reads no file.
    """
    sampler = one_long_epoch(batch_size)

    def ours(workers: int) -> Callable[[], Iterable[dict[str, Any]]]:
        feed = Feed(index, sampler, decode=DecodeImage())
        return lambda: TorchLoader(feed, device=device, prefetch=3, num_workers=workers)

    def by_hand() -> Iterable[dict[str, Any]]:
        options: dict[str, Any] = {"num_workers": WORKERS, "prefetch_factor": 3, "pin_memory": True}
        for batch in DataLoader(Decoded(index), batch_sampler=sampler, **options):
            yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}

    def loading(
        loader: Callable[[], Iterable[dict[str, Any]]], step: Callable[[dict[str, Any]], object]
    ) -> Steps:
        for batch in loader():
            step(batch)
            yield

    loaders = {
        "`TorchLoader`, threads": ours(0),
        f"`TorchLoader`, {WORKERS} workers": ours(WORKERS),
        f"`DataLoader` by hand, {WORKERS} workers": by_hand,
    }
    there = next(iter(ours(0)()))
    print(f"\n| width | loader | load | training alone | together | of the larger |\n{'|---' * 6}|")
    for width in WIDTHS:
        step = Training(width, device)
        ways = [
            partial(loading, loader, work) for loader in loaders.values() for work in (len, step)
        ]
        alone, *times = medians(
            lambda step=step: timed(
                loading(lambda: itertools.repeat(there), step), WARM, steps, device
            ),
            *(lambda way=way: timed(way(), WARM, steps, device) for way in ways),
        )
        for name, loaded, both in zip(loaders, times[::2], times[1::2], strict=True):
            print(
                f"| {width} | {name} | {loaded * 1e3:.2f} ms | {alone * 1e3:.2f} ms "
                f"| {both * 1e3:.2f} ms | {both / max(loaded, alone):.3f} |"
            )


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
    sizes = arguments.batch_size, arguments.steps
    hidden_loading(images(arguments.data / "pixels"), device, *sizes)
    hidden_decoding(photos(arguments.data / "jpeg"), device, *sizes)
    overlapped_copies(device, *sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
