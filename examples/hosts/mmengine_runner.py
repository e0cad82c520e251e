"""Train with the `Runner` of mmengine, whose configuration names the samplers, and resume.

python mmengine_runner.py
"""

from __future__ import annotations

import os
from typing import Any

# The checkpoints of mmengine 0.10 hold classes of its own, which torch 2.6 and later do not load.
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # only for checkpoints that you wrote

import mmengine.runner
import numpy as np
import torch
from mmengine.dist import get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATA_SAMPLERS
from same_ids import report
from torch.utils.data import Dataset

from twinfeed import BatchSampler, BatchStream, PKBatchSampler, RandomSampler

LABELS = np.arange(600) % 12


class Records(Dataset[dict[str, int]]):
    """A dataset of your own. This one has the numbers of its records."""

    def __getitem__(self, record: int) -> dict[str, int]:
        return {"record": record}

    def __len__(self) -> int:
        return len(LABELS)


@DATA_SAMPLERS.register_module()
def p_by_k(sampler: Any, batch_size: int) -> BatchStream:
    """Return P x K batches of this rank; mmengine passes its own sampler and batch size too."""
    return PKBatchSampler(LABELS, p=6, k=4, seed=0).shard(get_rank(), get_world_size())


class Model(BaseModel):
    """A model that keeps the ids it is given."""

    def __init__(self, delivered: list[Any]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.delivered = delivered

    def forward(self, record: torch.Tensor, mode: str) -> dict[str, torch.Tensor]:
        self.delivered.append(record.tolist())
        return {"loss": self.linear(record[:, None].float() / 600).mean()}


class StopAfter(Hook):
    """Stop a run after an epoch, as a failure would."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch == self.epochs:
            raise KeyboardInterrupt


def train(folder: str, delivered: list[Any], *, epochs: int, **samplers: Any) -> None:
    """Train up to an epoch, from the last checkpoint of the folder on."""
    loader = {"dataset": Records(), "batch_size": 24, "num_workers": 1, **samplers}
    runner = mmengine.runner.Runner(
        Model(delivered),
        work_dir=folder,
        train_dataloader={"collate_fn": {"type": "default_collate"}, **loader},
        train_cfg={"by_epoch": True, "max_epochs": 3},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.01}},
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 1}},
        custom_hooks=[StopAfter(epochs)],
        randomness={"seed": 0},  # which the sampler gets
        resume=True,
        log_level="WARNING",
    )
    try:
        runner.train()
    except KeyboardInterrupt:
        print("stopped")


SAMPLERS: dict[str, dict[str, Any]] = {
    "random": {"sampler": {"type": RandomSampler}},
    "whole": {
        "sampler": {"type": "twinfeed.RandomSampler"},
        "batch_sampler": {"type": BatchSampler, "last_batch": "drop"},
    },
    "p-by-k": {
        "sampler": {"type": "DefaultSampler"},  # which mmengine asks for, and nobody reads
        "batch_sampler": {"type": "p_by_k"},
    },
}

if __name__ == "__main__":
    order = BatchSampler(RandomSampler(600, seed=0), batch_size=24)
    for name, samplers in SAMPLERS.items():
        delivered: list[Any] = []
        train(name, delivered, epochs=2, **samplers)
        train(name, delivered, epochs=3, **samplers)
        report(delivered, PKBatchSampler(LABELS, p=6, k=4, seed=0) if name == "p-by-k" else order)
