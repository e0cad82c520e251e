"""What Accelerate may share out to two processes, and what it is refused."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from torch_help import lengths, pack_words

from twinfeed.loaders import Feed, open_index
from twinfeed.loaders.torch import RecordDataset, RequestSampler, as_tensors
from twinfeed.samplers import BatchSampler, BatchStream, RandomSampler

RECORDS = 99


def numbers(batch: Any) -> dict[str, torch.Tensor]:
    """What can be sent to another process."""
    return {"id": as_tensors(batch)["id"]}


def main(folder: Path) -> None:
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
        with pytest.raises(TypeError, match="2 processes cannot share out 9 batches"):
            list(accelerator.prepare(make(9)))
        accelerator.wait_for_everyone()
        came = [
            (batch if make is bare else batch["id"]).tolist()
            for batch in accelerator.prepare(make(8))
        ]
        expected = [stream(8).batch(0, step).tolist() for step in range(rank, 8, 2)]
        assert came == expected, (make.__name__, came, expected)
    print(f"rank {rank} of 2: as it must be")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    main(parser.parse_args().data)
