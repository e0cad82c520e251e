"""Evaluate in a loop of Accelerate, by record, on one rank or two.

python accelerate_evaluate.py
torchrun --nproc-per-node 2 accelerate_evaluate.py
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from records import WEIGHTS, N, Records, report
from torch.utils.data import DataLoader

from twinfeed import ExactOnceBatchSampler, Results, exact_collate


def exactly_once(accelerator: Accelerator, model: Any) -> dict[str, Any]:
    """Evaluate from a DataLoader that is not prepared, and gather once, at the end."""
    dataset = Records()
    sampler = ExactOnceBatchSampler(dataset, batch_size=32)
    loader = DataLoader(
        dataset,
        batch_sampler=sampler.shard(accelerator.process_index, accelerator.num_processes),
        collate_fn=exact_collate(dataset),
    )
    results = Results(N)
    for batch in loader:
        logits = model(batch["x"].to(accelerator.device))
        results.add(batch["id"], logits=logits, label=batch["label"])
    return results.gather(lambda part: gather_object([part]))


def prepared(accelerator: Accelerator, model: Any) -> dict[str, Any]:
    """Evaluate from a prepared DataLoader, which repeats records, and cuts them off again."""
    results = Results(N)
    for batch in accelerator.prepare(DataLoader(Records(), batch_size=16)):
        found = {"id": batch["id"], "logits": model(batch["x"]), "label": batch["label"]}
        found = accelerator.gather_for_metrics(found)
        results.add(found.pop("id"), **found)
    return results.gather()  # every rank has all


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    linear = torch.nn.Linear(4, 3, bias=False)
    linear.weight.data = torch.from_numpy(WEIGHTS.T.copy())
    model = accelerator.prepare(linear)
    report(exactly_once(accelerator, model))
    report(prepared(accelerator, model))
    accelerator.end_training()
