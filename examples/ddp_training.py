"""Train with DDP on any number of ranks, and evaluate exactly once: the numbers are the same.

A batch is shared out to the ranks, and some get one image more than others. So losses are summed,
and divided by the number of images in the global batch:

    python ddp_training.py
    torchrun --nproc-per-node 3 ddp_training.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from digits import SEED, decode, open_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from twinfeed import BatchSampler, ExactOnceBatchSampler, Feed, Index, RandomSampler, TorchLoader

BATCH = 40


def train(model: torch.nn.Module, index: Index, rank: int, world_size: int) -> None:
    """Train for two epochs; each rank has its slice of every batch."""
    sampler = BatchSampler(
        RandomSampler(len(index), seed=SEED), batch_size=BATCH, last_batch="drop"
    )
    optimiser = torch.optim.SGD(model.parameters(), 0.5)
    with TorchLoader(Feed(index, sampler.shard(rank, world_size), decode=decode)) as loader:
        for _ in range(2):
            for batch in loader:
                logits = model(batch["pixels"].double())
                loss = cross_entropy(logits, batch["label"], reduction="sum")
                optimiser.zero_grad()
                (loss * world_size / BATCH).backward()  # DDP divides by the number of ranks
                optimiser.step()


@torch.no_grad()
def evaluate(model: torch.nn.Module, index: Index, rank: int, world_size: int) -> torch.Tensor:
    """Return how many records there were, their sum of losses, and how many were right.

    Every rank has the same number of steps. The last batch is smaller, and may be empty on a
    rank: its sums are zero, and no collective waits without end.
    """
    device = next(model.parameters()).device
    seen = torch.zeros(len(index), dtype=torch.int64, device=device)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    sampler = ExactOnceBatchSampler(len(index), batch_size=64).shard(rank, world_size)
    with TorchLoader(Feed(index, sampler, decode=decode)) as loader:
        for batch in loader:
            logits, labels = model(batch["pixels"].double()), batch["label"]
            loss = cross_entropy(logits, labels, reduction="sum")
            right = logits.argmax(1).eq(labels).sum()
            sums += torch.stack([torch.tensor(len(labels), device=device), loss, right])
            seen[batch["id"]] += 1
    dist.all_reduce(sums)
    dist.all_reduce(seen)
    assert seen.eq(1).all(), "every record exactly once, over all ranks and steps"
    return sums


def main() -> None:
    """Train and evaluate on as many processes as torchrun started."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("ddp-data"))
    folder: Path = parser.parse_args().out
    for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, alone)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # the loader puts batches on the current device
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        open_digits(folder)  # packs
    dist.barrier()
    training, evaluation = open_digits(folder)

    torch.manual_seed(SEED)
    model = torch.nn.Linear(64, 10, dtype=torch.float64)
    model = DistributedDataParallel(model.cuda() if on_gpu else model)
    train(model, training, rank, world_size)
    records, loss, right = evaluate(model, evaluation, rank, world_size).tolist()
    if rank == 0:
        print(
            f"{world_size} processes: {records:.0f} records, each once; "
            f"loss {loss / records:.6f}, {right:.0f} right"
        )
    del model  # it shares the process group, which must end here: gloo's threads may hold tensors
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
