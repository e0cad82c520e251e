"""Evaluate each of 761 records exactly once on 1, 2, 3 and 4 ranks, and get one number.

You report a metric that others must be able to repeat, on whatever number of GPUs they have.
Nothing divides 761, and a sampler that makes the ranks equal repeats or drops records, so that the
number moves with the machine. Sums and counts over exactly the records do not:

    python exactly_once.py
"""

from __future__ import annotations

import argparse
import os
import uuid
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"
import torch
import torch.distributed as dist
from digits import SEED, decode, open_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler

from twinfeed import BatchSampler, ExactOnceBatchSampler, Feed, Index, RandomSampler, TorchLoader

RANKS = 4


def trained(index: Index) -> torch.nn.Module:
    """Train a linear classifier for an epoch."""
    torch.manual_seed(SEED)
    model = torch.nn.Linear(64, 10)
    optimiser = torch.optim.SGD(model.parameters(), 0.5)
    sampler = BatchSampler(RandomSampler(len(index), seed=SEED), batch_size=64)
    for batch in TorchLoader(Feed(index, sampler, decode=decode), device="cpu"):
        optimiser.zero_grad()
        cross_entropy(model(batch["pixels"]), batch["label"]).backward()
        optimiser.step()
    return model


@torch.no_grad()
def sums_of(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Return the number of records, their sum of losses, and how many are right."""
    scores, labels = model(batch["pixels"]), batch["label"]
    loss = cross_entropy(scores.double(), labels, reduction="sum")
    return torch.stack([torch.tensor(len(labels)), loss, (scores.argmax(1) == labels).sum()])


def show(name: str, sums: torch.Tensor) -> None:
    """Divide once, at the end."""
    records, loss, right = sums.tolist()
    print(
        f"{name:28} {records:.0f} records, loss {loss / records:.6f}, {right / records:.2%} right"
    )


def evaluate(rank: int, meeting: str, folder: Path, model: torch.nn.Module) -> None:
    """Evaluate as one of four processes, in groups of 1, 2, 3 and 4 of them."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    index = open_digits(folder)[1]
    once = Feed(index, ExactOnceBatchSampler(len(index), batch_size=64), decode=decode)
    for ranks in range(1, RANKS + 1):
        group = dist.new_group(range(ranks))
        if rank < ranks:
            with TorchLoader(once.shard(rank, ranks), device="cpu") as loader:
                sums = sum(sums_of(model, batch) for batch in loader)
            dist.all_reduce(sums, group=group)
            if rank == 0:
                show(f"exactly once, {ranks} ranks", sums)
    dist.destroy_process_group()


def padded(model: torch.nn.Module, index: Index, ranks: int) -> torch.Tensor:
    """Evaluate what torch's own sampler gives to the ranks."""
    everything = Feed(index, ExactOnceBatchSampler(761, batch_size=761), decode=decode)[0, 0]
    total = torch.zeros(3, dtype=torch.float64)
    for rank in range(ranks):
        ids = list(DistributedSampler(range(761), num_replicas=ranks, rank=rank, shuffle=False))
        batch = {name: torch.from_numpy(everything[name][ids]) for name in ("pixels", "label")}
        total += sums_of(model, batch)
    return total


def with_keras(model: torch.nn.Module, index: Index) -> None:
    """Let Keras evaluate the same weights, by `evaluate`."""
    import keras

    same = keras.Sequential([keras.Input([64]), keras.layers.Dense(10)])
    same.set_weights([model.weight.T.detach().numpy(), model.bias.detach().numpy()])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    same.compile(loss=loss, metrics=["accuracy"])
    once = Feed(index, ExactOnceBatchSampler(len(index), batch_size=64), decode=decode)
    loader = TorchLoader(once, device="cpu")
    batches = loader.dataloader(lambda batch: (batch["pixels"], batch["label"]))
    found, right = same.evaluate(batches, verbose=0)
    print(f"{'Keras, model.evaluate':28} {len(index)} records, loss {found:.6f}, {right:.2%} right")


def main() -> None:
    """Evaluate one model in several ways."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("once-data"))
    folder: Path = parser.parse_args().out.resolve()
    training, index = open_digits(folder)
    model = trained(training)
    meeting = str(folder / f"meeting-{uuid.uuid4().hex}")
    torch.multiprocessing.spawn(evaluate, (meeting, folder, model), nprocs=RANKS)
    with_keras(model, index)
    for ranks in range(2, RANKS + 1):
        show(f"DistributedSampler, {ranks} ranks", padded(model, index, ranks))


if __name__ == "__main__":
    main()
