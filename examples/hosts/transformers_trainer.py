"""Train with the `Trainer` of transformers, and resume in mid-epoch, on one rank or two.

python transformers_trainer.py
torchrun --nproc-per-node 2 transformers_trainer.py
"""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from same_ids import report
from torch.utils.data import Dataset

from twinfeed import BatchSampler, RandomSampler


class Records(Dataset[dict[str, int]]):
    """A dataset of your own. This one has the numbers of its records."""

    def __getitem__(self, record: int) -> dict[str, int]:
        return {"record": record}

    def __len__(self) -> int:
        return 600


class Model(torch.nn.Module):
    """A model that keeps the ids it is given."""

    def __init__(self, delivered: list[Any]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.delivered = delivered

    def forward(self, record: torch.Tensor) -> dict[str, torch.Tensor]:
        self.delivered.append(record.tolist())
        return {"loss": self.linear(record[:, None].float() / 600).mean()}


SAMPLER = RandomSampler(Records(), seed=0)


class Trainer(transformers.Trainer):
    """A trainer whose records come in the order of a sampler."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SAMPLER


class SetEpoch(transformers.TrainerCallback):
    """Set the epoch of the sampler: on several ranks a resumed trainer does not."""

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **others: Any
    ) -> None:
        SAMPLER.set_epoch(state.global_step // len(train_dataloader))


def train(delivered: list[Any], *, steps: int, resume: bool = False) -> None:
    """Train up to a step, and save each 13th step."""
    arguments = transformers.TrainingArguments(
        "transformers",
        per_device_train_batch_size=24,  # of all ranks, as batches are split between them
        accelerator_config={"split_batches": True, "even_batches": False},
        max_steps=steps,
        save_steps=13,
        dataloader_num_workers=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(Model(delivered), arguments, train_dataset=Records(), callbacks=[SetEpoch()])
    trainer.train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    delivered: list[Any] = []
    train(delivered, steps=39)
    train(delivered, steps=60, resume=True)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    report(delivered, BatchSampler(SAMPLER, batch_size=24).shard(rank, world_size))
