"""Warnings on two ranks, and the loss of an evaluation whose last batch is empty on a rank."""

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.torch_feeds import lengths, pack_words

from twinfeed.loaders import Feed, open_index
from twinfeed.loaders.torch import RecordDataset, RequestSampler, TorchLoader, as_tensors
from twinfeed.samplers import BatchStream, ExactOnceBatchSampler

RECORDS = 761


def evaluation() -> BatchStream:
    return ExactOnceBatchSampler(RECORDS, batch_size=760)


def warned(passes: Any) -> list[str]:
    """What the first batch of a pass warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        next(iter(passes))
    return [str(one.message) for one in caught if "ranks" in str(one.message)]


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        pack_words(folder, RECORDS)
    dist.barrier()
    index = open_index(folder / "data.index")

    def feed(sampler: BatchStream) -> Feed:
        return Feed(index, sampler, decode=lengths)

    def loader(sampler: BatchStream) -> TorchLoader:
        return TorchLoader(feed(sampler), device="cpu")

    def plain(sampler: BatchStream) -> Any:
        requests = RequestSampler(feed(sampler))
        dataset = RecordDataset(feed(sampler))
        return torch.utils.data.DataLoader(dataset, batch_sampler=requests, collate_fn=as_tensors)

    def bare(sampler: BatchStream) -> Any:
        return torch.utils.data.DataLoader(range(RECORDS), batch_sampler=sampler)

    makes = [loader, bare, plain]
    first, *others = makes[rank:] + makes[:rank]  # another on each rank
    meant = feed(evaluation()).shard(0, 1).sampler
    for make in makes:
        assert warned(make(meant)) == []
        assert warned(make(evaluation().shard(rank, 2))) == []
    (said,) = warned(first(evaluation()))
    assert "there are 2 ranks, and each gets every batch" in said
    assert "shard(0, 1) says that all of them are meant" in said
    assert [warned(make(evaluation())) for make in others] == [[], []], "once a process"

    sums, means = torch.zeros(2), []
    for batch in loader(evaluation().shard(rank, 2)):
        losses = batch["length"].float()
        sums += torch.stack([losses.sum(), torch.tensor(float(len(losses)))])
        means.append(losses.mean())
    dist.all_reduce(sums)
    loss, records = sums.tolist()
    empty = [bool(torch.isnan(mean)) for mean in means]
    assert empty == [False, rank != 0], empty
    assert records == RECORDS
    assert loss / records == sum(number % 100 for number in range(RECORDS)) / RECORDS
    print(f"rank {rank} of 2: as it must be")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    main(parser.parse_args().data)
