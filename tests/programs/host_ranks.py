"""Train up to a step in a trainer of another library, on any ranks, from the checkpoint before.

python host_ranks.py lightning FOLDER STEPS
torchrun --nproc-per-node 3 host_ranks.py transformers FOLDER STEPS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from support.datasets import Numbers
from torchdata.stateful_dataloader import StatefulDataLoader

from twinfeed.samplers import RandomSampler

SAMPLER = RandomSampler(600, seed=0)
BATCH_SIZE, SAVED = 24, 13  # of all ranks; each so many steps there is a checkpoint
RANK, RANKS = (int(os.environ.get(name, one)) for name, one in (("RANK", 0), ("WORLD_SIZE", 1)))


def by_lightning(folder: Path, steps: int, delivered: list[Any]) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from support.lightning_module import Notes

    sampler = SAMPLER.shard(RANK, RANKS)
    loader: Any = StatefulDataLoader(Numbers(), BATCH_SIZE // RANKS, sampler=sampler)
    module = Notes(lambda batch: delivered.append(batch["number"].tolist()))
    saved = folder / "state.ckpt"
    options = {"every_n_train_steps": SAVED, "enable_version_counter": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp" if RANKS > 1 else "auto",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(folder, "state", **options)],
        use_distributed_sampler=False,
    )
    trainer.fit(module, loader, ckpt_path=saved if saved.exists() else None)


def by_transformers(folder: Path, steps: int, delivered: list[Any]) -> None:
    import transformers

    class Trainer(transformers.Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SAMPLER

        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> torch.Tensor:
            delivered.append(inputs["number"].tolist())
            return model(torch.zeros(1)).sum()  # type: ignore[no-any-return]

    class SetEpoch(transformers.TrainerCallback):
        def on_epoch_begin(
            self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **_: Any
        ) -> None:
            SAMPLER.set_epoch(state.global_step // len(train_dataloader))

    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH_SIZE,
        accelerator_config={"split_batches": True, "even_batches": False},
        remove_unused_columns=False,
        max_steps=steps,
        save_steps=SAVED,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    model = torch.nn.Linear(1, 1)
    dataset = torch.utils.data.Subset(Numbers(), range(600))
    trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[SetEpoch()])
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))


if __name__ == "__main__":
    name, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    delivered: list[Any] = []
    {"lightning": by_lightning, "transformers": by_transformers}[name](folder, steps, delivered)
    (folder / f"{steps}-{RANK}.json").write_text(json.dumps(delivered))
