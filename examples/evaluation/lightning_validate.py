"""Validate with Lightning, by record, on one rank or two.

python lightning_validate.py
torchrun --nproc-per-node 2 lightning_validate.py
"""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from records import WEIGHTS, N, Records, report
from torch.utils.data import DataLoader

from twinfeed import ExactOnceBatchSampler, Results, exact_collate


class Model(lightning.LightningModule):
    """A model whose validation gathers results by record."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.from_numpy(WEIGHTS))

    def val_dataloader(self) -> DataLoader[Any]:
        dataset, trainer = Records(), self.trainer
        sampler = ExactOnceBatchSampler(dataset, batch_size=32)
        return DataLoader(
            dataset,
            batch_sampler=sampler.shard(trainer.global_rank, trainer.world_size),
            collate_fn=exact_collate(dataset),
        )

    def on_validation_epoch_start(self) -> None:
        self.results = Results(N)

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self.results.add(batch["id"], logits=batch["x"] @ self.weights, label=batch["label"])

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:  # of two batches, when `fit` begins
            return
        table = self.results.gather(everywhere if self.trainer.world_size > 1 else None)
        report(table)
        logits, label = torch.from_numpy(table["logits"]), torch.from_numpy(table["label"])
        self.log("cross_entropy", torch.nn.functional.cross_entropy(logits, label))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return (batch @ self.weights).sum()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.zeros(8, 4), batch_size=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def everywhere(part: object) -> list[Any]:
    """Return the objects of all ranks."""
    parts = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, part)
    return parts


if __name__ == "__main__":
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        use_distributed_sampler=False,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    (found,) = trainer.validate(model, verbose=False)
    print(f"cross entropy {found['cross_entropy']:.4f}", flush=True)
    trainer.fit(model)  # with a sanity check, and a validation at the end of the epoch
