"""What may go wrong around a loader; run as `python torch_faults.py <scenario>`."""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from torch_help import pack_words

from twinfeed.loaders import Feed, Index, WorkerDiedError, pack
from twinfeed.loaders.torch import TorchLoader
from twinfeed.samplers import ExactOnceBatchSampler

ALIVE: list[Any] = []

BOTH = (0, 3000)
"""The `readahead` with which the planner is off, and on."""


def words() -> Index:
    return pack_words(Path(tempfile.mkdtemp()))


def sampler(batch_size: int = 4) -> ExactOnceBatchSampler:
    return ExactOnceBatchSampler(24, batch_size=batch_size)


def killed(sample: dict[str, Any]) -> dict[str, Any]:
    if len(sample["word"]) == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"length": len(sample["word"])}


def full(sample: dict[str, Any]) -> dict[str, Any]:
    if len(sample["word"]) == 10:
        os.kill(os.getpid(), signal.SIGBUS)  # what a full /dev/shm looks like
    return {"length": len(sample["word"])}


def left(sample: dict[str, Any]) -> dict[str, Any]:
    if len(sample["word"]) == 10:
        os._exit(0)
    return {"length": len(sample["word"])}


def slow(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.02)
    return {"length": len(sample["word"])}


def die(decode: Any, ways: Sequence[int] = BOTH) -> None:
    for readahead in ways:
        feed = Feed(words(), sampler(), decode=decode, readahead=readahead)
        with TorchLoader(feed, num_workers=2) as loader:
            count = 0
            try:
                for _ in loader:
                    count += 1
            except WorkerDiedError as error:
                print(count, error)


def spawned() -> None:
    """Start a worker that imports the script anew."""
    feed = Feed(words(), sampler())
    with TorchLoader(feed, num_workers=1, multiprocessing_context="spawn") as loader:
        list(loader)


def die_while_sending() -> None:
    """Kill a worker that waits in the midst of a message which the pipe cannot hold."""
    samples = [{"data": bytes(4_000_000)} for _ in range(24)]
    index = pack(samples, Path(tempfile.mkdtemp()))["data"]
    loader = TorchLoader(Feed(index, sampler(1)), num_workers=2, prefetch=1, prefetch_factor=4)
    batches = iter(loader)
    next(batches)
    time.sleep(1)
    for worker in multiprocessing.active_children():
        worker.kill()
    try:
        list(batches)
    except WorkerDiedError as error:
        print(error)


def interrupted(workers: int) -> None:
    feeds = [Feed(words(), sampler(), decode=slow, readahead=readahead) for readahead in BOTH]
    loaders = [TorchLoader(feed, num_workers=workers) for feed in feeds]
    try:
        for _ in range(1000):
            for _ in zip(*loaders, strict=True):
                print("batch", flush=True)
    except KeyboardInterrupt:
        print("interrupted, and went on", flush=True)
        raise


def broken_off(workers: int) -> None:
    """Leave by a break and with an iterator still alive; messages are larger than a pipe."""
    index = pack_words(Path(tempfile.mkdtemp()), 6_000)
    big = ExactOnceBatchSampler(6_000, batch_size=3_000)
    for readahead in BOTH:
        feed = Feed(index, big, readahead=readahead)
        loaders = [TorchLoader(feed, num_workers=workers) for _ in range(2)]
        for _ in loaders[0]:
            break
        ALIVE.append(iter(loaders[1]))
        next(ALIVE[-1])
    print("leaving", flush=True)


def failed() -> None:
    for workers, readahead in product((0, 1), BOTH):
        feed = Feed(words(), sampler(), decode=slow, readahead=readahead)
        try:
            for _ in TorchLoader(feed, num_workers=workers):
                raise KeyError("the training step")
        except KeyError as error:
            print("failed in", error)


SCENARIOS = {
    "killed": lambda: die(killed),
    "full": lambda: die(full),
    "left": lambda: die(left, BOTH[1:]),  # torch looks every five seconds
    "killed while sending": die_while_sending,
    "interrupted threads": lambda: interrupted(0),
    "interrupted workers": lambda: interrupted(2),
    "broken off threads": lambda: broken_off(0),
    "broken off workers": lambda: broken_off(2),
    "failed": failed,
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]]()
