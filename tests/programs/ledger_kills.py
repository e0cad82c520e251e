"""Trainings that are killed, rolled back and resumed on other ranks, each writing its ledger.

Run as a script: it is given a folder and a number of runs. What each loop received is noted beside
the ledgers, and compared with what `who` and `when` say.
"""

import itertools
import json
import os
import random
import signal
import sys
import warnings
from collections import defaultdict
from pathlib import Path

import numpy as np

from twinfeed import (
    BatchSampler,
    BatchStream,
    DatasetSource,
    ExactOnceBatchSampler,
    Feed,
    NumpyLoader,
    PKBatchSampler,
    RandomSampler,
    ShardShuffleSampler,
    ViewSampler,
    when,
    who,
)

RECORDS = 48
LABELS = np.arange(RECORDS) // 8
SAMPLERS: dict[str, BatchStream] = {
    "random": BatchSampler(RandomSampler(RECORDS, seed=1), batch_size=9, last_batch="pad"),
    "shards": BatchSampler(
        ShardShuffleSampler([20, 0, 28], block=5, window=3, seed=3), batch_size=9
    ),
    "views": BatchSampler(
        ViewSampler(RandomSampler(RECORDS, seed=1), LABELS + 1, per_epoch="one", seed=8),
        batch_size=9,
    ),
    "P x K": PKBatchSampler(LABELS, p=6, k={0: 2, 3: 3}, batches_per_epoch=5, seed=5),
    "evaluation": ExactOnceBatchSampler(RECORDS, batch_size=7),
}


def train(folder: Path, feed: Feed, start: int, batches: int, *, kill: bool) -> None:
    """Receive and note so many batches in a child, which then dies or closes the loader."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    notes = os.open(folder / f"{feed.sampler.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with NumpyLoader(feed, ledger=folder / "ledger.jsonl", prefetch=0) as loader:
        if start:
            loader.load_state_dict(loader.state_at(*divmod(start, len(feed))))
        passes = itertools.chain.from_iterable(itertools.repeat(loader))
        for number, batch in enumerate(itertools.islice(passes, batches)):
            step = number % len(feed) if feed.sampler.evaluation else start + number
            os.write(notes, json.dumps([step, batch["id"].tolist()]).encode() + b"\n")
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


def check(folder: Path, feed: Feed) -> int:
    """Compare the ledger of each rank with what the rank received; return the number of steps."""
    received, ledger = 0, folder / "ledger.jsonl"
    for file in folder.glob("*.txt"):
        rank = int(file.stem)
        ids_of_step, steps_of_record = defaultdict(list), defaultdict(list)
        for line in file.read_text().splitlines():
            step, ids = json.loads(line)
            ids_of_step[step].append(ids)
            for record in {*feed.sampler.records(np.array(ids, np.int64)).tolist()}:
                steps_of_record[record].append(step)
            received += 1
        for step, batches in ids_of_step.items():
            requests = who(ledger, feed, step, rank=rank)
            assert [request.ids.tolist() for request in requests] == batches, (rank, step)
        for record in range(RECORDS):
            assert when(ledger, feed, record, rank=rank) == steps_of_record[record], (rank, record)
    return received


def main(folder: str, runs: str) -> None:
    warnings.simplefilter("ignore")  # the source has no digests
    rng = random.Random(0)
    for name, sampler in SAMPLERS.items():
        feed = Feed(DatasetSource({"x": np.arange(RECORDS)}), sampler)
        (subfolder := Path(folder) / name).mkdir()
        reached = 0
        for _ in range(int(runs)):
            start = 0 if sampler.evaluation else rng.randint(max(0, reached - 4), reached)
            batches, world, kill = rng.randint(1, 8), rng.randint(1, 3), rng.random() < 0.6
            for rank in range(world):
                train(subfolder, feed.shard(rank, world), start, batches, kill=kill)
            reached = start + batches
        print(name, check(subfolder, feed))


if __name__ == "__main__":
    main(*sys.argv[1:])
