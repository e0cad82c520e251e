"""Train with Lightning from a `StatefulDataLoader`, and resume in mid-epoch.

python lightning_fit.py
"""

from __future__ import annotations

from typing import Any

import lightning
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


class Model(lightning.LightningModule):
    """A model that keeps the ids it is given."""

    def __init__(self, delivered: list[Any]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.delivered = delivered

    def train_dataloader(self) -> StatefulDataLoader:
        trainer = self.trainer
        sampler = RandomSampler(Records(), seed=0).shard(trainer.global_rank, trainer.world_size)
        size = 24 // trainer.world_size
        return StatefulDataLoader(Records(), size, sampler=sampler, num_workers=2)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.delivered.append(batch.tolist())
        return self.linear(batch[:, None].float() / 600).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def train(delivered: list[Any], *, steps: int, resume: bool = False) -> None:
    """Train up to a step, and save each 13th step."""
    saver = lightning.pytorch.callbacks.ModelCheckpoint(
        "lightning", "state", every_n_train_steps=13, save_top_k=1, enable_version_counter=False
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        callbacks=[saver],
        use_distributed_sampler=False,
    )
    trainer.fit(Model(delivered), ckpt_path="lightning/state.ckpt" if resume else None)


if __name__ == "__main__":
    delivered: list[Any] = []
    train(delivered, steps=39)
    train(delivered, steps=60, resume=True)
    report(delivered, BatchSampler(RandomSampler(600, seed=0), batch_size=24))
