"""A curriculum: the first epochs draw from the easiest records, by a sampler of one's own."""

from __future__ import annotations

import numpy as np
from same_ids import report
from torch.utils.data import DataLoader

from twinfeed import BatchSampler, RandomSampler, Sampler
from twinfeed.testing import check_sampler


class CurriculumSampler(Sampler):
    """Draw from the easiest quarter of the records in epoch 0, then from a quarter more each."""

    def __init__(self, difficulty: np.ndarray, /, *, seed: int) -> None:
        self.num_records = len(difficulty)
        self.seed = seed
        self.parameters = {"difficulty": difficulty}
        self._easiest = np.argsort(difficulty, kind="stable")
        sizes = [len(difficulty) * quarters // 4 for quarters in (1, 2, 3, 4)]
        self._orders = [RandomSampler(size, seed=seed) for size in sizes]

    def __len__(self) -> int:
        return len(self._orders[0])  # an epoch has as many samples as the easiest quarter

    def draw(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        order = self._orders[min(epoch, 3)]
        return self._easiest[order.ids(epoch, positions)]


if __name__ == "__main__":
    difficulty = np.random.default_rng(0).random(680)
    order = CurriculumSampler(difficulty, seed=0)
    check_sampler(order)
    delivered = []
    for epoch in range(5):
        sampler = BatchSampler(order, batch_size=32)  # new in each epoch, as in a resumed run
        sampler.set_epoch(epoch)
        batches = list(DataLoader(range(680), batch_sampler=sampler))
        hardest = max(difficulty[batch].max() for batch in batches)
        print(f"epoch {epoch}: {len(batches)} batches, difficulty up to {hardest:.2f}")
        delivered += batches
    report(delivered, sampler)
