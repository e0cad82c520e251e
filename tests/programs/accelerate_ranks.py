"""Train with Accelerate on several ranks, resume in mid-epoch, and see that every record came.

The state goes into Accelerate's checkpoints as JSON: what is registered there is pickled.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate_shares import share
from digits import SEED, decode, open_digits
from torch.nn.functional import cross_entropy

from twinfeed.loaders import Feed, Index
from twinfeed.loaders.torch import TorchLoader
from twinfeed.samplers import PKBatchSampler

STEPS, SAVED, STOPPED = 20, 27, 34  # steps of an epoch; where a state is saved; where a run stops


def sampler_of(index: Index, accelerator: Accelerator) -> PKBatchSampler:
    """Draw all ten classes, four images each; this rank has whole classes of every batch."""
    sampler = PKBatchSampler(index.labels, p=10, k=4, batches_per_epoch=STEPS, seed=SEED)
    return sampler.shard(accelerator.process_index, accelerator.num_processes)


def train(index: Index, *, resume: Path | None) -> list[list[int]]:
    """Train up to a global step; return which records came."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(SEED)
    model = torch.nn.Linear(64, 10)
    optimiser = torch.optim.SGD(model.parameters(), 0.5)
    sampler = sampler_of(index, accelerator)
    loader = TorchLoader(Feed(index, sampler, decode=decode), device=accelerator.device)
    prepared = accelerator.prepare(model, optimiser, loader)
    assert prepared[2] is loader, "Accelerate leaves it alone"
    model, optimiser, _ = prepared

    def save(models: object, weights: object, state: str) -> None:
        if accelerator.is_main_process:  # the state is the same on all ranks
            (Path(state) / "loader.json").write_text(json.dumps(loader.state_dict()))

    def load(models: object, state: str) -> None:
        loader.load_state_dict(json.loads((Path(state) / "loader.json").read_text()))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    if resume is not None:
        accelerator.load_state(str(resume))

    received = []
    step = loader.epoch * len(loader) + loader.step
    while step < STOPPED:
        for batch in loader:
            received.append(batch["id"].tolist())
            optimiser.zero_grad()
            accelerator.backward(cross_entropy(model(batch["pixels"]), batch["label"]))
            optimiser.step()
            step += 1
            if step == SAVED and resume is None:
                accelerator.save_state(str(Path(index.root) / "state"))
            if step == STOPPED:
                break
    return received


def main() -> None:
    """Train beyond a checkpoint, start again from it, and compare what was received."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("accelerate-data"))
    folder: Path = parser.parse_args().out
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    with accelerator.main_process_first():  # it packs
        index, _ = open_digits(folder)

    share(folder / "words")
    first = train(index, resume=None)
    resumed = train(index, resume=folder / "state")
    sampler = sampler_of(index, accelerator)
    stream = [sampler.batch(*divmod(step, STEPS)).tolist() for step in range(STOPPED)]
    assert first == stream
    assert resumed == stream[SAVED:]
    print(
        f"rank {accelerator.process_index} of {accelerator.num_processes}: "
        f"resumed at step {SAVED} with its stream"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
