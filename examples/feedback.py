"""Draw records by their pass rate, which changes while training, and get one model on 1 to 4 ranks.

Every 100 steps the model answers each record once. A record that it often gets wrong is drawn more
often from then on. The weights are a schedule, so the run can be killed, and resumed on another
number of ranks, and ends with the same weights and the same model, bit by bit:

    python feedback.py
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # by torch.optim as well: imported once, before the forks
import torch.distributed as dist
import torch.multiprocessing as mp
from digits import SEED, decode, open_digits
from torch.nn.functional import cross_entropy

from twinfeed import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    Feed,
    Index,
    Results,
    TorchLoader,
    WeightedSampler,
)

BATCH, STEPS, FEEDBACK_EVERY, SAVED_EVERY = 60, 600, 100, 40
RUNS: dict[str, list[tuple[int, int | None]]] = {  # ranks, and the step at which they are killed
    "by pass rate, 1 rank": [(1, None)],
    "by pass rate, 2 ranks": [(2, None)],
    "by pass rate, 3 ranks": [(3, None)],
    "by pass rate, 4 ranks": [(4, None)],
    "killed on 4 and on 1, ended on 3": [(4, 230), (1, 410), (3, None)],
}


def sampler(schedule: dict[int, torch.Tensor]) -> BatchStream:
    """Return the stream of all ranks: the weight of each record, by the step since which it is."""
    weights = {step: tensor.numpy() for step, tensor in schedule.items()}
    return BatchSampler(WeightedSampler(weights, seed=SEED), batch_size=BATCH, last_batch="drop")


def of_all_ranks(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of the whole batch, in its order."""
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows)
    return torch.cat(parts)


def everywhere(part: Any) -> list[Any]:
    """Return the parts of all ranks, on every rank."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return parts


@torch.no_grad()
def answers(model: torch.nn.Module, index: Index) -> torch.Tensor:
    """Return for each record whether the model is right, 1.0 or 0.0, on every rank."""
    once = Feed(index, ExactOnceBatchSampler(len(index), batch_size=256), decode=decode)
    results = Results(len(index))
    for batch in TorchLoader(once.shard(dist.get_rank(), dist.get_world_size()), device="cpu"):
        guess = model(batch["pixels"].double()).argmax(1)
        results.add(batch["id"], right=guess == batch["label"])
    return torch.from_numpy(results.gather(everywhere)["right"]).float()


def go_on(feed: Feed, schedule: dict[int, torch.Tensor], position: Any) -> TorchLoader:
    """Return this rank's loader of the stream with a schedule, at the position of a state."""
    stream = feed.with_sampler(sampler(schedule))
    loader: TorchLoader = TorchLoader(
        stream.shard(dist.get_rank(), dist.get_world_size()), device="cpu"
    )
    if position is not None:
        loader.load_state_dict(position)
    return loader


def train(rank: int, ranks: int, kill_at: int | None, by_feedback: bool, folder: Path) -> None:
    """Train from the last checkpoint on, and save the model, the weights and how it evaluates."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting-{ranks}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    index, evaluation = open_digits(folder.parent)
    torch.manual_seed(SEED)
    model = torch.nn.Linear(64, 10, dtype=torch.float64)
    optimiser = torch.optim.SGD(model.parameters(), 0.5)
    schedule, passed, tries = {0: torch.ones(len(index))}, torch.zeros(len(index)), 0
    position, checkpoint = None, folder / "checkpoint.pt"
    if checkpoint.exists():
        weights, schedule, passed, tries, position = torch.load(checkpoint)
        model.load_state_dict(weights)
    feed = Feed(index, sampler(schedule), decode=decode)
    loader = go_on(feed, schedule, position)
    while loader.global_step < STEPS:
        for batch in loader:
            scores = model(of_all_ranks(batch["pixels"].double()))
            optimiser.zero_grad()
            cross_entropy(scores, of_all_ranks(batch["label"])).backward()
            optimiser.step()
            step = loader.global_step
            if by_feedback and step % FEEDBACK_EVERY == 0 and step < STEPS:
                passed, tries = passed + answers(model, index), tries + 1
                schedule[step] = 1 - 0.9 * passed / tries
                loader = go_on(feed, schedule, loader.state_dict())
            if step % SAVED_EVERY == 0 and rank == 0:
                saved = model.state_dict(), schedule, passed, tries, loader.state_dict()
                torch.save(saved, folder / "checkpoint.tmp")
                os.replace(folder / "checkpoint.tmp", checkpoint)
            if step == kill_at:
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            if step == STEPS or step in schedule:
                break
    rates = [f"{answers(model, data).mean():.2%} of {len(data)}" for data in (index, evaluation)]
    if rank == 0:
        torch.save((model.state_dict(), schedule, " and ".join(rates)), folder / "end.pt")
    dist.barrier()
    dist.destroy_process_group()


def run(
    name: str, starts: list[tuple[int, int | None]], out: Path, *, by_feedback: bool = True
) -> Any:
    """Start a run as often as it is killed, and return what it saved at its end."""
    folder = out / name.replace(" ", "-")
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    for ranks, kill_at in starts:
        options: Any = {"nprocs": ranks, "start_method": "fork"}
        try:
            mp.start_processes(train, (ranks, kill_at, by_feedback, folder), **options)
        except mp.ProcessExitedException as error:
            if error.exit_code != -signal.SIGKILL:
                raise
    return torch.load(folder / "end.pt")


def same(first: Any, second: Any) -> bool:
    """Return whether two runs ended with the same bits, in the model and in all weights."""
    return all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(first[:2], second[:2], strict=True)
    )


def main() -> None:
    """Run on 1 to 4 ranks, killed and not, and compare the bits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("feedback-data"))
    out: Path = parser.parse_args().out.resolve()
    open_digits(out)
    evenly = run("drawn evenly", [(1, None)], out, by_feedback=False)
    print(f"{'drawn evenly, 1 rank':34} {evenly[2]} right")
    first: Any = None
    for name, starts in RUNS.items():
        end = run(name, starts, out)
        first = first or end
        bits = "the same bits" if same(first, end) else "OTHER BITS"
        print(f"{name:34} {end[2]} right, {bits}")
        assert same(first, end)
    steps, weights = list(first[1])[1:], first[1][max(first[1])]
    print(f"weights changed at the steps {', '.join(map(str, steps))}")
    print(f"{(weights < 0.11).float().mean():.2%} of the digits pass each time")


if __name__ == "__main__":
    main()
