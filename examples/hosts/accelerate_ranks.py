"""Train with Accelerate on three ranks, and resume in mid-epoch on two, and on one.

python accelerate_ranks.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator, DataLoaderConfiguration, debug_launcher, skip_first_batches
from same_ids import report
from torch.utils.data import DataLoader, Dataset

from twinfeed import BatchSampler, RandomSampler


class Records(Dataset[int]):
    """A dataset of your own. This one has the numbers of its records."""

    def __getitem__(self, record: int) -> int:
        return record

    def __len__(self) -> int:
        return 600


def train(start: int, stop: int) -> None:
    """Train from a global step up to another, and write down what came."""
    # The batch of 24 is split between the ranks, and none is filled up.
    options = DataLoaderConfiguration(split_batches=True, even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    sampler = RandomSampler(Records(), seed=0)
    loader = accelerator.prepare(DataLoader(Records(), batch_size=24, sampler=sampler))
    delivered: list[Any] = []
    step = start
    while step < stop:
        epoch, skipped = divmod(step, len(loader))
        rest = skip_first_batches(loader, skipped) if skipped else loader
        rest.set_epoch(epoch)
        sampler.set_epoch(epoch)  # which a loader that skips does not do on several ranks
        for batch in rest:
            delivered.append(batch.tolist())
            step += 1
            if step == stop:
                break
    Path(f"from-{start}-rank-{accelerator.process_index}.json").write_text(json.dumps(delivered))


def delivered_by(start: int, world_size: int) -> list[Any]:
    """Return the batches of all ranks."""
    ranks = [
        json.loads(Path(f"from-{start}-rank-{rank}.json").read_text()) for rank in range(world_size)
    ]
    return [np.concatenate(parts) for parts in zip(*ranks, strict=True)]


if __name__ == "__main__":
    debug_launcher(train, (0, 16), num_processes=3)
    debug_launcher(train, (16, 32), num_processes=2)
    train(32, 60)
    whole = delivered_by(0, 3) + delivered_by(16, 2) + delivered_by(32, 1)
    report(whole, BatchSampler(RandomSampler(600, seed=0), batch_size=24))
