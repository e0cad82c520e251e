"""A host that begins its sampler once: one pass with the ids of all epochs.

python endless_pass.py
"""

from __future__ import annotations

from itertools import islice

import torch
from same_ids import report
from torch.utils.data import BatchSampler, DataLoader

from twinfeed import EndlessSampler, PKBatchSampler

SAMPLER = PKBatchSampler(torch.arange(600) % 12, p=4, k=4, seed=0)


def train(epoch: int, epochs: int, rank: int = 0, world_size: int = 1) -> list[torch.Tensor]:
    """Do what fast-reid, YOLOX and detectron2 do: one iterator, and a number of steps."""
    steps = len(SAMPLER)
    start = epoch * steps * SAMPLER.batch_size  # records of all ranks
    ids = EndlessSampler(SAMPLER, start=start, rank=rank, world_size=world_size)
    batches = BatchSampler(ids, SAMPLER.batch_size // world_size, drop_last=True)  # the host's
    loader = DataLoader(range(600), batch_sampler=batches, num_workers=2)
    return list(islice(loader, (epochs - epoch) * steps))


if __name__ == "__main__":
    report(train(0, 3), SAMPLER)
    report(train(0, 1) + train(1, 3), SAMPLER)  # stopped after epoch 0, and started again
    ranks = zip(train(0, 2, 0, 2), train(0, 2, 1, 2), strict=True)
    report([torch.cat(slices) for slices in ranks], SAMPLER)
