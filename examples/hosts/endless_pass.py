"""A host that begins its sampler once: one pass with the ids of all epochs.

python endless_pass.py
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import torch
from same_ids import report
from torch.utils.data import BatchSampler, DataLoader, Sampler

from twinfeed import BatchStream, PKBatchSampler

SAMPLER = PKBatchSampler(torch.arange(600) % 12, p=4, k=4, seed=0)


class EndlessSampler(Sampler[int]):
    """The ids of all epochs of a batch sampler, from an epoch on, for a host that cuts batches."""

    def __init__(self, batches: BatchStream, /, *, epoch: int = 0) -> None:
        self.batches, self.epoch = batches, epoch

    def __len__(self) -> int:
        return len(self.batches) * self.batches.batch_size  # of one epoch, as such hosts expect

    def __iter__(self) -> Iterator[int]:
        for epoch in count(self.epoch):
            for step in range(len(self.batches)):
                yield from self.batches.batch(epoch, step).tolist()


def train(epoch: int, epochs: int, rank: int = 0, world_size: int = 1) -> list[torch.Tensor]:
    """Do what fast-reid, YOLOX and detectron2 do: one iterator, and a number of steps."""
    sampler = SAMPLER.shard(rank, world_size)
    ids = EndlessSampler(sampler, epoch=epoch)
    batches = BatchSampler(ids, sampler.batch_size, drop_last=True)  # the host's
    loader = DataLoader(range(600), batch_sampler=batches, num_workers=2)
    return list(islice(loader, (epochs - epoch) * len(sampler)))


if __name__ == "__main__":
    report(train(0, 3), SAMPLER)
    report(train(0, 1) + train(1, 3), SAMPLER)  # stopped after epoch 0, and started again
    ranks = zip(train(0, 2, 0, 2), train(0, 2, 1, 2), strict=True)
    report([torch.cat(slices) for slices in ranks], SAMPLER)
