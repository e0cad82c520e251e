"""Repeated augmentation: an image several times in a row, by a sampler of one's own.

python repeated_augmentation.py
"""

from __future__ import annotations

import numpy as np
import torch
from same_ids import report
from torch.utils.data import DataLoader

from twinfeed import (
    BatchSampler,
    Feed,
    IdSequence,
    NumpyLoader,
    RandomSampler,
    Sampler,
)
from twinfeed.samplers import SamplerTraits
from twinfeed.testing import check_sampler


class RepeatedAugmentationSampler(Sampler):
    """Give each image `repeats` times in a row. An epoch has as many samples as images."""

    def __init__(self, n: int, /, *, repeats: int, seed: int) -> None:
        self.num_records = n
        self.seed = seed
        self.parameters = {"repeats": repeats}
        self.traits = SamplerTraits(repeats=True)
        self._repeats = repeats
        self._images = IdSequence(RandomSampler(n, seed=seed), epochs=1_000_000)

    def __len__(self) -> int:
        return self.num_records // self._repeats * self._repeats

    def draw(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        first = epoch * (len(self) // self._repeats)  # an epoch goes on where the last one ended
        return self._images[first + positions // self._repeats]


SAMPLER = RepeatedAugmentationSampler(600, repeats=3, seed=0)


def crop(sample: dict[str, int]) -> dict[str, np.int64]:
    return {"left": np.random.default_rng(sample["seed"]).integers(32)}


if __name__ == "__main__":
    check_sampler(SAMPLER)
    batches = BatchSampler(SAMPLER, batch_size=24)
    delivered = []
    for rank in range(3):  # three processes, with 8 samples each a step
        loader = DataLoader(range(600), batch_size=8, sampler=SAMPLER.shard(rank, 3))
        delivered.append(list(loader) + list(loader))  # two epochs
    steps = [torch.stack(parts, dim=1).flatten() for parts in zip(*delivered, strict=True)]
    report(steps, batches)

    epochs = [SAMPLER.ids(epoch, np.arange(600)) for epoch in range(3)]
    print("times an image comes in 3 epochs:", set(np.bincount(np.concatenate(epochs)).tolist()))
    print("rank by rank:", *(part[0][:4].tolist() for part in delivered))
    batch = next(iter(NumpyLoader(Feed({"x": np.arange(600)}, batches, transform=crop))))
    print("image", batch["id"][0], "cropped at", batch["left"][:3].tolist())
