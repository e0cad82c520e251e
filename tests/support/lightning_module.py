"""What the tests of Lightning share, which import it where they need it.

It takes longer to import than torch, and 100 MB, which each process that a test forks would copy.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch

from support.batches import noted


class Notes(lightning.LightningModule):
    """A module that notes what it is given."""

    def __init__(self, note: Callable[[Any], Any] = noted) -> None:
        super().__init__()
        self.note = note
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.trained: list[Any] = []
        self.validated: list[list[Any]] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.trained.append(self.note(batch))
        return self.weight * 2

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: Any, _: int) -> None:
        self.validated[-1].append(self.note(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(folder: Path, **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
