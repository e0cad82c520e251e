"""Train with Lightning on P×K batches, validate exactly once, and go on in mid-epoch.

A `TorchLoader` goes into the Trainer as it is. Lightning sets the epoch and keeps the loader's
state in its checkpoints. The rank is given once, where the loaders are made:

    python lightning_training.py
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from digits import SEED, decode, open_digits
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy

from twinfeed import BatchStream, ExactOnceBatchSampler, Feed, Index, PKBatchSampler, TorchLoader

STOP, END = 27, 60  # steps; an epoch has 20


class Digits(lightning.LightningModule):
    """Classify digits by a linear layer."""

    def __init__(self, training: Index, evaluation: Index) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.training_data, self.evaluation_data = training, evaluation
        self.linear = torch.nn.Linear(64, 10)
        self.right = 0

    def loader(self, index: Index, sampler: BatchStream) -> TorchLoader:
        """Carry this rank's part of every batch."""
        mine = sampler.shard(self.trainer.global_rank, self.trainer.world_size)
        return TorchLoader(Feed(index, mine, decode=decode), device=self.device)

    def train_dataloader(self) -> TorchLoader:
        labels = self.training_data.labels
        sampler = PKBatchSampler(labels, p=10, k=4, batches_per_epoch=20, seed=SEED)
        return self.loader(self.training_data, sampler)

    def val_dataloader(self) -> TorchLoader:
        once = ExactOnceBatchSampler(len(self.evaluation_data), batch_size=64)
        return self.loader(self.evaluation_data, once)

    def training_step(self, batch: dict[str, Any], _: int) -> torch.Tensor:
        return cross_entropy(self.linear(batch["pixels"]), batch["label"])

    def on_validation_epoch_start(self) -> None:
        self.right = 0

    def validation_step(self, batch: dict[str, Any], _: int) -> None:
        self.right += int((self.linear(batch["pixels"]).argmax(1) == batch["label"]).sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5)


def fit(folder: Path, steps: int, *, resume: bool = False) -> float:
    """Train up to a step, from the checkpoint or from the start; return the share that is right."""
    saver = ModelCheckpoint(folder, "state", every_n_train_steps=STOP, save_top_k=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=False,
        callbacks=[saver],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Digits(*open_digits(folder))
    trainer.fit(module, ckpt_path=folder / "state.ckpt" if resume else None, weights_only=True)
    trainer.validate(module, verbose=False)
    return module.right / 761


def main() -> None:
    """Stop in the second epoch, go on, and compare with a run that was not stopped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("lightning-data"))
    folder: Path = parser.parse_args().out
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    print(f"Lightning, stopped after {STOP} steps: {fit(folder, STOP):.2%} of 761 right")
    print(f"the same, resumed up to {END}: {fit(folder, END, resume=True):.2%}")
    print(f"a run that was not stopped: {fit(folder, END):.2%}")


if __name__ == "__main__":
    main()
