"""What Accelerate may share out to two processes, what it is refused, and how it evaluates.

accelerate_ranks.py runs it too: to start two processes takes longer than what is tried here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from support.torch_feeds import lengths, pack_words
from torch.utils.data import DataLoader

from twinfeed.loaders import Feed, Index, Results, open_index
from twinfeed.loaders.torch import RecordDataset, RequestSampler, TorchLoader, as_tensors
from twinfeed.samplers import BatchSampler, BatchStream, ExactOnceBatchSampler, RandomSampler

RECORDS = 99


def numbers(batch: Any) -> dict[str, torch.Tensor]:
    """What can be sent to another process."""
    return {"id": as_tensors(batch)["id"]}


def evaluate(accelerator: Accelerator, index: Index) -> None:
    """Gather an evaluation whose last batches differ by rank: with padding, and by `Results`."""

    def batches(last_batch: Literal["pad", "smaller"]) -> TorchLoader:
        sampler = ExactOnceBatchSampler(RECORDS, batch_size=10, last_batch=last_batch)
        ranks = accelerator.process_index, accelerator.num_processes
        feed = Feed(index, sampler.shard(*ranks), decode=lengths)
        return accelerator.prepare(TorchLoader(feed, device="cpu"))  # type: ignore[no-any-return]

    def everywhere(part: object) -> list[Any]:
        parts = [None] * accelerator.num_processes
        torch.distributed.all_gather_object(parts, part)
        return parts

    gathered = [
        accelerator.gather_for_metrics((batch["id"], batch["mask"])) for batch in batches("pad")
    ]
    ids = [number for ids, mask in gathered for number in ids[mask].tolist()]
    assert sorted(ids) == list(range(RECORDS)), ids

    sizes, results = [], Results(RECORDS)
    for batch in batches("smaller"):
        sizes.append(len(batch["id"]))
        results.add(batch["id"], double=2 * batch["id"])
    assert len({*map(tuple, everywhere(sizes))}) == 2, "the last batches differ"
    assert (results.gather(everywhere)["double"] == 2 * np.arange(RECORDS)).all()


def share(folder: Path) -> None:
    """Prepare DataLoaders of nine and of ten batches, bare and whole, and gather what comes."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    if rank == 0:
        pack_words(folder, RECORDS)
    accelerator.wait_for_everyone()
    index = open_index(folder / "data.index")

    def stream(steps: int) -> BatchStream:
        order = RandomSampler(RECORDS, seed=0)
        return BatchSampler(order, batch_size=11, batches_per_epoch=steps).shard(0, 1)

    def whole(steps: int) -> DataLoader[Any]:
        feed = Feed(index, stream(steps), decode=lengths)
        requests = RequestSampler(feed)
        return DataLoader(RecordDataset(feed), batch_sampler=requests, collate_fn=numbers)

    def bare(steps: int) -> DataLoader[Any]:
        return DataLoader(torch.arange(RECORDS), batch_sampler=stream(steps))

    for make in (whole, bare):
        with pytest.raises(TypeError, match="2 processes cannot divide 9 batches"):
            list(accelerator.prepare(make(9)))
        accelerator.wait_for_everyone()
        came = [
            (batch if make is bare else batch["id"]).tolist()
            for batch in accelerator.prepare(make(8))
        ]
        expected = [stream(8).batch(0, step).tolist() for step in range(rank, 8, 2)]
        assert came == expected, (make.__name__, came, expected)
    evaluate(accelerator, index)
    print(f"rank {rank} of 2: as it must be")
