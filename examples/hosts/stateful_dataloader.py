"""Keep torchdata's `StatefulDataLoader`: resume after any batch, on another number of ranks.

python stateful_dataloader.py
"""

from __future__ import annotations

from typing import Any

import torch
from same_ids import report
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from twinfeed import BatchSampler, RandomSampler


class Records(Dataset[int]):
    """A dataset of your own. This one has the numbers of its records."""

    def __getitem__(self, record: int) -> int:
        return record

    def __len__(self) -> int:
        return 600


def loader_of(rank: int = 0, world_size: int = 1, **options: Any) -> StatefulDataLoader:
    """Return a loader of this rank's part of batches of 24."""
    sampler = RandomSampler(Records(), seed=0).shard(rank, world_size)
    return StatefulDataLoader(Records(), 24 // world_size, sampler=sampler, **options)


def run(state: Any, steps: int, world_size: int, **options: Any) -> tuple[list[Any], Any]:
    """Go on from a state for some steps; return the batches of all ranks, and the state."""
    ranks, states = [], []
    for rank in range(world_size):
        loader, batches = loader_of(rank, world_size, **options), []
        if state is not None:
            loader.load_state_dict(state)
        while len(batches) < steps:
            for batch in loader:
                batches.append(batch)
                if len(batches) == steps:
                    states.append(loader.state_dict())
                    break
        ranks.append(batches)
    dealt = [torch.stack(parts, dim=1).flatten() for parts in zip(*ranks, strict=True)]
    return dealt, states[-1]


if __name__ == "__main__":
    expected = BatchSampler(RandomSampler(600, seed=0), batch_size=24)
    for options in ({}, {"num_workers": 2}):
        for stop in range(1, 26) if not options else (7, 25):
            first, state = run(None, stop, 1, **options)
            second, state = run(state, 12, 3, **options)
            third, state = run(state, 12, 2, **options)
            report(first + second + third, expected)
