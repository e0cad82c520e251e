"""Train with the Trainer of transformers on P×K batches, and go on in mid-epoch.

The Trainer takes the loader from `get_train_dataloader`. Its own skipping is turned off, and the
loader's place is kept beside its checkpoint:

    python transformers_training.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from digits import SEED, decode, open_digits
from torch.nn.functional import cross_entropy

from twinfeed import ExactOnceBatchSampler, Feed, PKBatchSampler, TorchLoader

STOP, END = 27, 60  # steps; an epoch has 20


class Linear(torch.nn.Module):
    """A model as the Trainer wants one: it returns its loss and its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 10)

    def forward(self, pixels: Any, label: Any, **others: Any) -> dict[str, torch.Tensor]:
        scores = self.linear(pixels)
        return {"loss": cross_entropy(scores, label), "logits": scores}


class Trainer(transformers.Trainer):
    """A Trainer that is given the loaders, and keeps the place of the first."""

    loader: TorchLoader
    evaluator: TorchLoader

    def get_train_dataloader(self) -> Any:
        return self.loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.evaluator

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        (folder / "loader.json").write_text(json.dumps(self.loader.state_dict()))


def right(predicted: transformers.EvalPrediction) -> dict[str, float]:
    """Return the share that is right."""
    return {"right": float((predicted.predictions.argmax(1) == predicted.label_ids).mean())}


def fit(folder: Path, steps: int, *, resume: bool = False) -> float:
    """Train up to a step, from the checkpoint or from the start; return the share that is right."""
    training, evaluation = open_digits(folder)
    torch.manual_seed(SEED)
    arguments = transformers.TrainingArguments(
        str(folder / "saved"),
        max_steps=steps,
        save_steps=STOP,
        learning_rate=0.5,
        optim="sgd",
        lr_scheduler_type="constant",
        ignore_data_skip=True,
        label_names=["label"],
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
        report_to=[],
    )
    trainer = Trainer(Linear(), arguments, compute_metrics=right)
    trainer.remove_callback(transformers.PrinterCallback)
    sampler = PKBatchSampler(training.labels, p=10, k=4, batches_per_epoch=20, seed=SEED)
    once = ExactOnceBatchSampler(len(evaluation), batch_size=64)
    trainer.loader = TorchLoader(Feed(training, sampler, decode=decode))
    trainer.evaluator = TorchLoader(Feed(evaluation, once, decode=decode))
    checkpoint = folder / "saved" / f"checkpoint-{STOP}"
    if resume:
        trainer.loader.load_state_dict(json.loads((checkpoint / "loader.json").read_text()))
    trainer.train(resume_from_checkpoint=str(checkpoint) if resume else None)
    return trainer.evaluate()["eval_right"]


def main() -> None:
    """Stop in the second epoch, go on, and compare with a run that was not stopped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("transformers-data"))
    folder: Path = parser.parse_args().out
    print(f"transformers, stopped after {STOP} steps: {fit(folder, STOP):.2%} of 761 right")
    print(f"the same, resumed up to {END}: {fit(folder, END, resume=True):.2%}")
    print(f"a run that was not stopped: {fit(folder, END):.2%}")


if __name__ == "__main__":
    main()
