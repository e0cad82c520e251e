"""Train with Accelerate on P×K batches, and go on in mid-epoch.

`prepare` leaves a `TorchLoader` alone, so that the rank is given once, and the loader's state goes
into Accelerate's checkpoints:

    python accelerate_training.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from digits import SEED, decode, open_digits
from torch.nn.functional import cross_entropy

from twinfeed import ExactOnceBatchSampler, Feed, PKBatchSampler, TorchLoader

STOP, END = 27, 60  # steps; an epoch has 20


def fit(folder: Path, steps: int, *, resume: bool = False) -> float:
    """Train up to a step, from the checkpoint or from the start; return the share that is right."""
    training, evaluation = open_digits(folder)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    rank, ranks = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(SEED)
    model = torch.nn.Linear(64, 10)
    model, optimiser = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.5))

    sampler = PKBatchSampler(training.labels, p=10, k=4, batches_per_epoch=20, seed=SEED)
    loader = TorchLoader(Feed(training, sampler, decode=decode).shard(rank, ranks))
    accelerator.register_for_checkpointing(loader)
    if resume:
        accelerator.load_state(folder / "state")
    step = 20 * loader.epoch + loader.step
    while step < steps:
        for batch in loader:
            optimiser.zero_grad()
            accelerator.backward(cross_entropy(model(batch["pixels"]), batch["label"]))
            optimiser.step()
            step += 1
            if step == steps:
                break
    accelerator.save_state(folder / "state")

    once = ExactOnceBatchSampler(len(evaluation), batch_size=64)
    right = torch.zeros((), dtype=torch.int64, device=accelerator.device)
    for batch in TorchLoader(Feed(evaluation, once, decode=decode).shard(rank, ranks)):
        right += (model(batch["pixels"]).argmax(1) == batch["label"]).sum()
    return float(accelerator.reduce(right)) / len(evaluation)


def main() -> None:
    """Stop in the second epoch, go on, and compare with a run that was not stopped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("accelerate-data"))
    folder: Path = parser.parse_args().out
    print(f"Accelerate, stopped after {STOP} steps: {fit(folder, STOP):.2%} of 761 right")
    print(f"the same, resumed up to {END}: {fit(folder, END, resume=True):.2%}")
    print(f"a run that was not stopped: {fit(folder, END):.2%}")


if __name__ == "__main__":
    main()
