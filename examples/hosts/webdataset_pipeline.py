"""Feed a pipeline of webdataset: the samples of a feed, or a pipeline of each class.

python webdataset_pipeline.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import webdataset as wds
from same_ids import report

from twinfeed import Feed, Index, PKBatchSampler, TarWriter, pack
from twinfeed.loaders.webdataset import choose_samples, samples

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


def choose() -> bool:
    """Choose from a pipeline of each class; return whether the classes are the sampler's."""
    pipelines = [
        wds.DataPipeline(wds.SimpleShardList(f"class-{label}.tar"), wds.tarfile_to_samples())
        for label in range(12)
    ]
    sampler = PKBatchSampler.of_classes(12, p=4, k=4, seed=0, batches_per_epoch=37)
    source = choose_samples(sampler, [pipeline.repeat() for pipeline in pipelines], replay=True)
    stages = wds.decode(), wds.to_tuple("cls"), wds.batched(16)
    drawn = [labels for (labels,) in source.track(wds.DataPipeline(source, *stages))]
    expected = [sampler.group_of(ids) for ids in sampler.batches(0, 0, 37)]
    return np.array_equal(drawn, expected)


if __name__ == "__main__":
    records = [{"txt": b"%d" % n, "label": int(LABELS[n])} for n in range(600)]
    index = pack(records, "mixed", container="tar")["data"]
    delivered: list[Any] = []
    state = train(index, delivered, stop=50)
    train(index, delivered, state)
    report(delivered, SAMPLER)

    for label in range(12):
        with TarWriter(f"class-{label}.tar") as shard:
            for n in range(label, 600, 12):
                shard.write(f"{n:06}", {"txt": b"%d" % n, "cls": b"%d" % label})
    print("chosen classes are the sampler's:", choose())
