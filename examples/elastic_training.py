"""Kill a training on 1 rank, resume it on 3, kill it again, and end it on 2: the same losses.

The same training with torch's `DistributedSampler` stands beside it. As in most scripts, its
checkpoint has an epoch and no position, so that the epoch that was killed begins again:

    python elastic_training.py
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
import torch._dynamo  # by torch.optim as well: imported once, before the forks
import torch.distributed as dist
import torch.multiprocessing as mp
from digits import SEED, load
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from twinfeed import BatchSampler, DatasetSource, Feed, RandomSampler, TorchLoader

mpl.use("Agg")
from matplotlib import pyplot as plt

BATCH, EPOCHS, SAVED_EVERY = 48, 4, 5
RUNS = {  # for each start of a run: how many ranks, and the step at which all of them are killed
    "never killed": [(1, None)],
    "killed twice": [(1, 52), (3, 97), (2, None)],
}


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return 1,797 digits, float64[n, 64], and their labels."""
    images, labels = load()
    return images.reshape(-1, 64) / 16, labels


class Twinfeed:
    """Batches of a loader, whose state is the position after the last batch."""

    def __init__(self, rank: int, ranks: int) -> None:
        images, labels = digits()
        sampler = BatchSampler(
            RandomSampler(len(labels), seed=SEED), batch_size=BATCH, last_batch="drop"
        )
        source = DatasetSource({"image": images, "label": labels}, digest="the 1,797 digits")
        feed = Feed(source, sampler.shard(rank, ranks))
        self.loader = TorchLoader(feed)
        self.state_dict = self.loader.state_dict
        self.load_state_dict = self.loader.load_state_dict

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the rest of the training."""
        while self.loader.epoch < EPOCHS:
            for batch in self.loader:
                yield batch["image"], batch["label"]


class Torch:
    """Batches of a `DataLoader` with a `DistributedSampler`, whose state is an epoch."""

    def __init__(self, rank: int, ranks: int) -> None:
        data = TensorDataset(*map(torch.as_tensor, digits()))
        self.sampler = DistributedSampler(data, ranks, rank, seed=SEED)
        self.loader = DataLoader(data, BATCH // ranks, sampler=self.sampler, drop_last=True)
        self.epoch = 0

    def state_dict(self) -> dict[str, int]:
        """Return the epoch that is running."""
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin at an epoch."""
        self.epoch = state["epoch"]

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the epochs that remain."""
        while self.epoch < EPOCHS:
            self.sampler.set_epoch(self.epoch)
            yield from self.loader
            self.epoch += 1


def train(
    rank: int, ranks: int, source: type[Twinfeed] | type[Torch], kill_at: int | None, out: Path
) -> None:
    """Train from the last checkpoint on; rank 0 writes the loss of each global batch."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{out}/rendezvous-{ranks}", rank=rank, world_size=ranks
    )
    torch.manual_seed(SEED)
    layers = torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
    model = torch.nn.Sequential(*layers).double()
    optimiser = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    data, losses, checkpoint = source(rank, ranks), [], out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        data.load_state_dict(saved["data"])
        losses = saved["losses"]
    replica = DistributedDataParallel(model)
    for images, labels in data.batches():
        loss = cross_entropy(replica(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        total = loss.detach() / ranks
        dist.all_reduce(total)
        losses.append(total.item())
        if rank == 0 and len(losses) % SAVED_EVERY == 0:
            state = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
            state |= {"data": data.state_dict(), "losses": losses}
            torch.save(state, out / "checkpoint.tmp")
            os.replace(out / "checkpoint.tmp", checkpoint)
        if len(losses) == kill_at:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        (out / "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    del replica  # it shares the process group, which must end here: gloo's threads may hold tensors
    dist.destroy_process_group()


def run(source: type[Twinfeed] | type[Torch], name: str, folder: Path) -> list[float]:
    """Start a run as often as it is killed, and return the loss of each step."""
    out = folder / f"{source.__name__} {name}".replace(" ", "-").lower()
    out.mkdir(parents=True, exist_ok=True)
    for file in out.iterdir():
        file.unlink()
    for ranks, kill_at in RUNS[name]:
        try:
            mp.start_processes(
                train, (ranks, source, kill_at, out), nprocs=ranks, start_method="fork"
            )
        except mp.ProcessExitedException as error:
            if error.exit_code != -signal.SIGKILL:
                raise
    losses: list[float] = json.loads((out / "losses.json").read_text())
    return losses


def main() -> None:
    """Run both sources, killed and not, and draw the losses of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("elastic-data"))
    folder: Path = parser.parse_args().out.resolve()
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    for axis, source in zip(axes, (Twinfeed, Torch), strict=True):
        whole, killed = (run(source, name, folder) for name in RUNS)
        steps = min(len(whole), len(killed))
        apart = np.abs(np.subtract(whole[:steps], killed[:steps])).max()
        title = "twinfeed" if source is Twinfeed else "DistributedSampler"
        equal = "the same" if apart < 1e-9 else f"up to {apart:.1f} apart"
        print(f"{title}: {len(whole)} steps, {len(killed)} if killed; the losses are {equal}")
        axis.plot(whole, color="C0", linewidth=3, alpha=0.4, label="never killed")
        axis.plot(killed, color="C3", linewidth=1, label="1 rank, killed, 3, killed, 2")
        for _, kill_at in RUNS["killed twice"][:2]:
            axis.axvline(kill_at, color="grey", linewidth=0.8, linestyle=":")
        axis.set(title=title, xlabel="step", yscale="log")
        axis.legend()
    axes[0].set_ylabel("loss of the global batch")
    figure.savefig(folder / "elastic.png", dpi=90)
    print(f"picture: {folder.name}/elastic.png")


if __name__ == "__main__":
    main()
