"""Train with a loss and a trainer of pytorch-metric-learning; test over two ranks.

python pytorch_metric_learning_training.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.testers import GlobalEmbeddingSpaceTester
from pytorch_metric_learning.trainers import MetricLossOnly
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from same_ids import report
from torch.utils.data import DataLoader, TensorDataset

from twinfeed import ExactOnceBatchSampler, PKBatchSampler, Results

LABELS = np.repeat(np.arange(17), 40)
POINTS = np.random.default_rng(0).normal(LABELS[:, None], 1, (680, 8))
NUMBERS = torch.arange(680)
DATASET = TensorDataset(torch.tensor(POINTS, dtype=torch.float32), NUMBERS)
SAMPLER = PKBatchSampler(LABELS, p=8, k=4, seed=0)


class Trainer(MetricLossOnly):
    """A trainer whose batches are those of `SAMPLER`."""

    def initialize_dataloader(self) -> None:
        self.dataloader = DataLoader(self.dataset, batch_sampler=SAMPLER, num_workers=2)
        self.dataloader_iter = iter(self.dataloader)


def points_and_labels(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the points of a batch and their labels, and keep the numbers of its records."""
    points, numbers = batch
    delivered.append(numbers)
    return points, torch.tensor(LABELS)[numbers]


def train(model: torch.nn.Module) -> None:
    """Train three epochs."""
    trainer = Trainer(
        models={"trunk": model},
        optimizers={"trunk_optimizer": torch.optim.SGD(model.parameters(), 0.01)},
        batch_size=32,
        loss_funcs={"metric_loss": TripletMarginLoss()},
        dataset=DATASET,
        iterations_per_epoch=len(SAMPLER),
        data_and_label_getter=points_and_labels,
        data_device="cpu",
    )
    trainer.train(num_epochs=3)


def test(model: torch.nn.Module) -> tuple[float, float]:
    """Return the precision of a tester, and that of the results of two ranks."""
    calculator = AccuracyCalculator(
        include=("precision_at_1",),
        knn_func=CustomKNN(LpDistance()),
        device=torch.device("cpu"),
    )
    dataset = TensorDataset(DATASET.tensors[0], torch.tensor(LABELS))
    tester = GlobalEmbeddingSpaceTester(
        accuracy_calculator=calculator, data_device="cpu", dataloader_num_workers=0
    )
    whole = tester.test({"all": dataset}, 1, model)["all"]["precision_at_1_level0"]

    for rank in range(2):  # each rank does this
        sampler = ExactOnceBatchSampler(680, batch_size=64).shard(rank, 2)
        results = Results(680, run="after training")
        for points, numbers in DataLoader(DATASET, batch_sampler=sampler):
            results.add(numbers, point=torch.nn.functional.normalize(model(points)))
        results.save(f"rank-{rank}.npz")
    table = Results.load([f"rank-{rank}.npz" for rank in range(2)]).gather()
    points = torch.tensor(table["point"])
    return whole, calculator.get_accuracy(points, torch.tensor(LABELS))["precision_at_1"]


if __name__ == "__main__":
    delivered: list[Any] = []
    torch.manual_seed(0)
    network = torch.nn.Linear(8, 4)
    train(network)
    report(delivered, SAMPLER)
    of_tester, of_ranks = test(network)
    print("two ranks have the tester's precision:", of_tester == of_ranks)
