"""Compute metrics of torchmetrics of all ranks' results, on one rank or two.

python torchmetrics_results.py
torchrun --nproc-per-node 2 torchmetrics_results.py
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed
from records import WEIGHTS, N, Records, report
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from twinfeed import ExactOnceBatchSampler, Results


def everywhere(part: object) -> list[Any]:
    """Return the objects of all ranks."""
    parts = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, part)
    return parts


if __name__ == "__main__":
    torch.distributed.init_process_group(
        "gloo",
        init_method="env://" if "RANK" in os.environ else "tcp://127.0.0.1:0",
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    # No step waits for another rank, so a rank without a record needs no empty batch.
    sampler = ExactOnceBatchSampler(N, batch_size=32).shard(rank, world_size, empty="skip")
    results = Results(N)
    for batch in DataLoader(Records(), batch_sampler=sampler):
        logits = batch["x"] @ torch.from_numpy(WEIGHTS)
        results.add(batch["id"], logits=logits, label=batch["label"])
    table = results.gather(everywhere)
    report(table)

    logits, label = torch.from_numpy(table["logits"]), torch.from_numpy(table["label"])
    for metric in (MulticlassAccuracy, MulticlassAUROC):
        # Every rank has all results: to join the ranks' would count each record twice.
        value = metric(3, sync_on_compute=False)(logits.softmax(1), label)
        print(f"{metric.__name__} {value:.4f}", flush=True)
    torch.distributed.destroy_process_group()
