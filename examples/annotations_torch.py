"""Train in PyTorch on images with annotations; killed, go on with the next batch."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from annotations import EPOCHS, SAVED_EVERY, feeds, options
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from twinfeed import TorchLoader


def scores(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Give the model its pixels."""
    return model(batch["image"].flatten(1).float() / 255)


def save(parts: dict[str, Any], checkpoint: Path) -> None:
    """Replace the checkpoint as a whole, whenever the process may be killed."""
    new = checkpoint.with_suffix(".new")
    torch.save({name: part.state_dict() for name, part in parts.items()}, new)
    os.replace(new, checkpoint)


def main() -> None:
    """Train, or go on training, and validate after each epoch."""
    given = options()
    loader, validator = (TorchLoader(feed, device="cpu") for feed in feeds(given.out))
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 10)
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    parts = {"model": model, "optimiser": optimiser, "loader": loader}
    checkpoint = given.out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        print(f"goes on at epoch {loader.epoch}, step {loader.step}")

    received = 0
    while loader.epoch < EPOCHS:
        epoch = loader.epoch
        for batch in tqdm(loader, f"epoch {epoch}", len(loader), initial=loader.step):
            optimiser.zero_grad()
            cross_entropy(scores(model, batch), batch["label"]).backward()
            optimiser.step()
            received += 1
            if loader.step and loader.step % SAVED_EVERY == 0:  # step 0: not validated yet
                save(parts, checkpoint)
            if received == given.kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
        right = torch.cat([scores(model, one).argmax(1) == one["label"] for one in validator])
        print(f"epoch {epoch}: {len(right)} images validated, {right.float().mean():.1%} right")
        save(parts, checkpoint)


if __name__ == "__main__":
    main()
