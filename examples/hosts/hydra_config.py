"""Train with a sampler, a feed and a loader that a configuration of Hydra names.

python hydra_config.py
python hydra_config.py seed=7 sampler.k=2
"""

from __future__ import annotations

from typing import Any

import hydra
import numpy as np
import torch
from omegaconf import DictConfig
from same_ids import report
from torch.utils.data import DataLoader

LABELS = np.arange(600) % 12


class Records(torch.utils.data.Dataset[int]):
    """A dataset of your own. This one has the numbers of its records."""

    def __getitem__(self, record: int) -> int:
        return record

    def __len__(self) -> int:
        return len(LABELS)


def labels() -> np.ndarray:
    """Return the label of each record."""
    return LABELS


@hydra.main(version_base=None, config_path=".", config_name="hydra_config")
def main(config: DictConfig) -> None:
    """Make each object by its `_target_`, and train for three epochs."""
    loader: DataLoader[Any] = hydra.utils.instantiate(config.loader)
    delivered = [batch.tolist() for _ in range(3) for batch in loader]
    report(delivered, hydra.utils.instantiate(config.sampler))

    sampler = hydra.utils.instantiate(config.mixture)
    whole = hydra.utils.instantiate(config.feed_loader)
    report([batch["id"].tolist() for _ in range(3) for batch in whole], sampler)


if __name__ == "__main__":
    main()
