"""Keep torch's `DataLoader`: a sampler by `sampler=`, or a batch sampler by `batch_sampler=`.

python torch_dataloader.py
"""

from __future__ import annotations

from typing import Any

import torch
from same_ids import report
from torch.utils.data import DataLoader, Dataset

from twinfeed import BatchSampler, PKBatchSampler, RandomSampler

LABELS = torch.arange(600) % 12


class Records(Dataset[int]):
    """A dataset of your own. This one has the numbers of its records."""

    def __getitem__(self, record: int) -> int:
        return record

    def __len__(self) -> int:
        return len(LABELS)


def by_sampler(rank: int = 0, world_size: int = 1, **options: Any) -> list[Any]:
    """Train on single records in random order, which the DataLoader makes batches of."""
    sampler = RandomSampler(Records(), seed=0).shard(rank, world_size)
    loader = DataLoader(Records(), batch_size=24 // world_size, sampler=sampler, **options)
    delivered = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        delivered += list(loader)
    return delivered


def by_batch_sampler(start: tuple[int, int] = (0, 0), **options: Any) -> list[Any]:
    """Train on P×K batches from a step on."""
    sampler = PKBatchSampler(LABELS, p=4, k=4, seed=0)
    sampler.load_state_dict(sampler.state_at(*start))
    loader = DataLoader(Records(), batch_sampler=sampler, **options)
    delivered = []
    for epoch in range(start[0], 2):
        sampler.set_epoch(epoch)
        delivered += list(loader)
    return delivered


if __name__ == "__main__":
    batches = BatchSampler(RandomSampler(600, seed=0), batch_size=24)
    for options in ({}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}):
        report(by_sampler(**options), batches)
        whole = by_batch_sampler(**options)
        report(whole, PKBatchSampler(LABELS, p=4, k=4, seed=0))
    report(whole[:7] + by_batch_sampler((0, 7)), PKBatchSampler(LABELS, p=4, k=4, seed=0))

    ranks = [by_sampler(rank, 3) for rank in range(3)]
    dealt = [torch.stack(parts, dim=1).flatten() for parts in zip(*ranks, strict=True)]
    report(dealt, batches)
