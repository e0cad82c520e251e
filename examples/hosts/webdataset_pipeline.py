"""Feed a pipeline of webdataset: the samples of a feed.

python webdataset_pipeline.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import webdataset as wds
from same_ids import report

from twinfeed import Feed, Index, PKBatchSampler, pack
from twinfeed.loaders.webdataset import samples

LABELS = np.arange(600) % 12
SAMPLER = PKBatchSampler(LABELS, p=4, k=4, seed=0)


def train(index: Index, delivered: list[Any], state: Any = None, stop: int | None = None) -> Any:
    """Train the rest of two epochs, or up to a step; return the state."""
    source = samples(Feed(index, SAMPLER))
    if state is not None:
        source.load_state_dict(state)
    stages = wds.decode(), wds.to_tuple("txt", "cls"), wds.batched(16)
    loader = wds.WebLoader(wds.DataPipeline(source, *stages), batch_size=None, num_workers=2)
    for _ in range(source.epoch, 2):
        for numbers, _labels in source.track(loader):
            delivered.append([int(number) for number in numbers])
            if source.global_step == stop:
                return source.state_dict()
    return source.state_dict()


if __name__ == "__main__":
    records = [{"txt": b"%d" % n, "label": int(LABELS[n])} for n in range(600)]
    index = pack(records, "mixed", container="tar")["data"]
    delivered: list[Any] = []
    state = train(index, delivered, stop=50)
    train(index, delivered, state)
    report(delivered, SAMPLER)
