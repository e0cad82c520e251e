"""Train embeddings over several ranks, stop, resume, and evaluate retrieval exactly.

You train embeddings on several GPUs. The loss must see the pairs of the whole batch, and recall@1
must compare each image with all others, which lie on other ranks. Both are the same on any number
of ranks, also where a run was stopped and goes on:

    python retrieval.py
    torchrun --nproc-per-node 4 retrieval.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from digits import SEED, decode, open_digits
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

from twinfeed import ExactOnceBatchSampler, Feed, PKBatchSampler, Results, TorchLoader

EPOCHS, STEPS, MARGIN = 3, 20, 0.2


def loss_of(points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the triplet loss with the hardest pairs of a batch."""
    far = 2 - 2 * points @ points.T
    same = labels[:, None] == labels
    hardest = (far * same).amax(1) - (far + 4 * same).amin(1)
    return torch.relu(hardest + MARGIN).mean()


def of_all_ranks(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of the whole batch; gradients flow to the rows of this rank alone."""
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.detach())
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


def train(model: Any, optimiser: Any, loader: TorchLoader, saved: Path, stop_after: int) -> bool:
    """Train on the pairs of the whole batch; return whether all epochs are done."""
    while loader.epoch < EPOCHS:
        for batch in loader:
            points = of_all_ranks(normalize(model(batch["pixels"].double())))
            loss = loss_of(points, of_all_ranks(batch["label"]))
            optimiser.zero_grad()
            (loss * dist.get_world_size()).backward()  # DDP divides by the number of ranks
            optimiser.step()
            if loader.epoch * STEPS + loader.step == stop_after:
                if dist.get_rank() == 0:
                    state = [model.state_dict(), optimiser.state_dict(), loader.state_dict()]
                    torch.save(state, saved)
                    print(f"stopped at epoch {loader.epoch}, step {loader.step}")
                return False
    return True


def everywhere(part: Any) -> list[Any]:
    """Return the parts of all ranks, on every rank."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return parts


@torch.no_grad()
def embeddings(model: Any, feed: Feed, records: int) -> np.ndarray:
    """Return the embedding of every record, in order, on every rank."""
    results = Results(records)
    with TorchLoader(feed) as loader:
        for batch in loader:
            results.add(batch["id"], point=normalize(model(batch["pixels"].double())))
    return results.gather(everywhere)["point"]


def recall_at_1(points: np.ndarray, labels: np.ndarray) -> float:
    """Return for how many images the nearest other image is of the same class."""
    near = points @ points.T
    np.fill_diagonal(near, -1)
    return float((labels[near.argmax(1)] == labels).mean())


def main() -> None:
    """Train and evaluate on as many processes as torchrun started."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("retrieval-data"))
    parser.add_argument("--stop-after", type=int, default=0, help="steps")
    options = parser.parse_args()
    for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, alone)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29512")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # the loader puts batches on the current device
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        open_digits(options.out)  # packs
    dist.barrier()
    training, evaluation = open_digits(options.out)

    torch.manual_seed(SEED)
    network = torch.nn.Linear(64, 32, dtype=torch.float64)
    model = DistributedDataParallel(network.cuda() if on_gpu else network)
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    sampler = PKBatchSampler(training.labels, p=8, k=4, batches_per_epoch=STEPS, seed=SEED)
    feed = Feed(training, sampler, decode=decode).shard(rank, world_size)
    once = Feed(evaluation, ExactOnceBatchSampler(len(evaluation), batch_size=64), decode=decode)
    saved = options.out / "saved.pt"
    with TorchLoader(feed) as loader:
        if saved.exists():
            weights, optimised, position = torch.load(saved, weights_only=True)
            model.load_state_dict(weights)
            optimiser.load_state_dict(optimised)
            loader.load_state_dict(position)
            if rank == 0:
                print(f"resuming at epoch {loader.epoch}, step {loader.step}")
        done = train(model, optimiser, loader, saved, options.stop_after)
    if done:
        points = embeddings(model, once.shard(rank, world_size), len(evaluation))
        if rank == 0:
            share = recall_at_1(points, evaluation.labels)
            print(f"{world_size} processes: recall@1 {share:.2%} of {len(points)} images")
    del model  # it shares the process group, which must end here: gloo's threads may hold tensors
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
