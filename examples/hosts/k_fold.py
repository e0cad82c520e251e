"""Cross-validate on the folds of scikit-learn, with P×K batches and each record tested once."""

from __future__ import annotations

import numpy as np
import torch
from same_ids import report
from sklearn.model_selection import StratifiedKFold
from torch.utils.data import DataLoader

from twinfeed import (
    BatchSampler,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    SubsetSampler,
)

LABELS = np.repeat(np.arange(17), 40)
DATASET = range(680)  # record n is n

if __name__ == "__main__":
    tested = []
    folds = StratifiedKFold(5, shuffle=True, random_state=0).split(LABELS, LABELS)
    for train, test in folds:
        training = PKBatchSampler(LABELS, p=8, k=4, seed=0, records=train)
        # Or single records, for DataLoader(batch_size=…, sampler=shuffled).
        shuffled = SubsetSampler(train, of=680, order=RandomSampler(len(train), seed=0))
        evaluation = ExactOnceBatchSampler(680, batch_size=64, records=test)
        met = [ids for _ in range(2) for ids in DataLoader(DATASET, batch_sampler=training)]
        report(met, training)
        report([*DataLoader(DATASET, 64, sampler=shuffled)], BatchSampler(shuffled, batch_size=64))
        assert not np.isin(torch.cat(met), test).any()
        tested += list(DataLoader(DATASET, batch_sampler=evaluation))
    each = np.array_equal(np.sort(torch.cat(tested)), DATASET)
    print("every record was tested once:", each)
