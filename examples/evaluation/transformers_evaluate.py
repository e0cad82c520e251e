"""Evaluate and predict with the `Trainer` of transformers, by record, on one rank or two.

python transformers_evaluate.py
torchrun --nproc-per-node 2 transformers_evaluate.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from records import WEIGHTS, N, Records, report

from twinfeed import Results


class Model(torch.nn.Module):
    """A model that leaves the id of a record alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.from_numpy(WEIGHTS))

    def forward(self, x: torch.Tensor, label: torch.Tensor, **_: torch.Tensor) -> dict[str, Any]:
        logits = x @ self.weights
        return {"loss": torch.nn.functional.cross_entropy(logits, label), "logits": logits}


def by_record(predicted: Any) -> dict[str, np.ndarray]:
    """Return the results in the order of the records; each record must have one."""
    label, ids = predicted.label_ids
    results = Results(N)
    results.add(ids, logits=predicted.predictions, label=label)
    return results.gather()  # of this process alone: the trainer has gathered already


def metrics(predicted: Any) -> dict[str, float]:
    """Return what `evaluate` reports; `eval_loss`, of batches, depends on the number of ranks."""
    table = by_record(predicted)
    report(table)
    logits, label = torch.from_numpy(table["logits"]), torch.from_numpy(table["label"])
    return {"cross_entropy": torch.nn.functional.cross_entropy(logits, label).item()}


if __name__ == "__main__":
    arguments = transformers.TrainingArguments(
        "transformers",
        label_names=["label", "id"],  # which the trainer gathers, as the logits
        remove_unused_columns=False,
        per_device_eval_batch_size=16,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    options = {"data_collator": torch.utils.data.default_collate, "compute_metrics": metrics}
    trainer = transformers.Trainer(Model(), arguments, **options)
    found = trainer.evaluate(Records())
    print(f"cross entropy {found['eval_cross_entropy']:.4f}", flush=True)
    report(by_record(trainer.predict(Records())))
