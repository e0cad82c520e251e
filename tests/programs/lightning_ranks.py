"""Train with Lightning on several devices, resume in mid-epoch, and see that every record came."""

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

from twinfeed.loaders import Feed, Index, open_index
from twinfeed.loaders.torch import TorchLoader
from twinfeed.samplers import ExactOnceBatchSampler, PKBatchSampler

STEPS, SAVED, STOPPED = 20, 27, 34  # steps of an epoch; where a state is saved; where a run stops


def training_sampler(index: Index) -> PKBatchSampler:
    """Draw all ten classes, four images each."""
    return PKBatchSampler(index.labels, p=10, k=4, batches_per_epoch=STEPS, seed=SEED)


class Digits(lightning.LightningModule):
    """A linear classifier that notes the records that it gets."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.indexes = {name: open_index(folder / f"{name}.index") for name in ("train", "eval")}
        self.linear = torch.nn.Linear(64, 10)
        self.received: list[list[int]] = []

    def _loader(self, name: str, sampler: Any) -> TorchLoader:
        """Take this rank's slice of every batch: Lightning does not shard a TorchLoader."""
        mine = sampler.shard(self.trainer.global_rank, self.trainer.world_size)
        return TorchLoader(Feed(self.indexes[name], mine, decode=decode), device=self.device)

    def train_dataloader(self) -> TorchLoader:
        return self._loader("train", training_sampler(self.indexes["train"]))

    def val_dataloader(self) -> TorchLoader:
        return self._loader("eval", ExactOnceBatchSampler(761, batch_size=64))

    def training_step(self, batch: dict[str, Any], _: int) -> torch.Tensor:
        self.received.append(batch["id"].tolist())
        return cross_entropy(self.linear(batch["pixels"]), batch["label"])

    def on_validation_epoch_start(self) -> None:
        self.counts = torch.zeros(761, device=self.device)
        self.right = torch.zeros((), device=self.device)

    def validation_step(self, batch: dict[str, Any], _: int) -> None:
        self.counts[batch["id"]] += 1
        self.right += self.linear(batch["pixels"]).argmax(1).eq(batch["label"]).sum()

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            return
        counts = self.trainer.strategy.reduce(self.counts, reduce_op="sum")
        right = self.trainer.strategy.reduce(self.right, reduce_op="sum")
        assert counts.eq(1).all(), "every record exactly once, over all ranks"
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch}: {right:.0f} of 761 right, each seen once")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5)


def fit(folder: Path, devices: int, *, steps: int, checkpoint: Path | None) -> Digits:
    """Train up to a global step, from a checkpoint if there is a checkpoint."""
    module = Digits(folder)
    saver = ModelCheckpoint(folder, "state", every_n_train_steps=SAVED, save_top_k=1)
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=devices,
        max_steps=steps,
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
    return module


def main() -> None:
    """Train beyond a checkpoint, start again from it, and compare what was received."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("lightning-data"))
    arguments = parser.parse_args()
    folder: Path = arguments.out
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    # torchrun's and Lightning's other ranks run this script as well.
    if lightning.fabric.utilities.rank_zero.rank_zero_only.rank == 0:
        open_digits(folder)

    first = fit(folder, arguments.devices, steps=STOPPED, checkpoint=None)
    resumed = fit(folder, arguments.devices, steps=STOPPED, checkpoint=folder / "state.ckpt")
    sampler = training_sampler(first.indexes["train"])
    sampler = sampler.shard(first.global_rank, arguments.devices)
    stream = [sampler.batch(*divmod(step, STEPS)).tolist() for step in range(STOPPED)]
    assert first.received == stream
    assert resumed.received == stream[SAVED:]
    rank = f"rank {first.global_rank} of {arguments.devices}"
    print(f"{rank}: resumed at step {SAVED} with its stream")


if __name__ == "__main__":
    main()
