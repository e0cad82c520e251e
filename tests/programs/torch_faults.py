"""What may go wrong around a loader; run as `python torch_faults.py <scenario>`."""

import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from itertools import product
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import numpy as np
from support.inside import Pool
from support.torch_feeds import pack_words
from torch.utils.data import DataLoader, get_worker_info

from twinfeed.loaders import Feed, Index, LoaderError, WorkerDiedError, pack
from twinfeed.loaders.torch import RecordDataset, RequestSampler, TorchLoader, as_tensors
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


def bus(sample: dict[str, Any]) -> dict[str, Any]:
    if len(sample["word"]) == 10:
        os.kill(os.getpid(), signal.SIGBUS)
    return {"length": len(sample["word"])}


def wide(sample: dict[str, Any]) -> dict[str, Any]:
    """Decode to 2 MB: a batch of four does not fit often into 16 MB of shared memory."""
    return {"wide": np.zeros(1_000_000, np.int16)}


def left(sample: dict[str, Any]) -> dict[str, Any]:
    if len(sample["word"]) == 10:
        os._exit(0)
    return {"length": len(sample["word"])}


def slow(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.02)
    return {"length": len(sample["word"])}


def die(decode: Any) -> None:
    for readahead in BOTH:
        feed = Feed(words(), sampler(), decode=decode)
        with TorchLoader(feed, num_workers=2, readahead=readahead) as loader:
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
    time.sleep(0.5)
    for worker in multiprocessing.active_children():
        worker.kill()
    try:
        list(batches)
    except WorkerDiedError as error:
        print(error)


def killed_in_the_body() -> None:
    """Kill workers while the loop computes, after torch has installed its signal handler."""
    list(DataLoader(range(4), num_workers=1))  # type: ignore[arg-type]
    with TorchLoader(Feed(words(), sampler(1)), num_workers=2) as loader:
        try:
            for _ in loader:
                for worker in multiprocessing.active_children():
                    worker.kill()
                time.sleep(0.5)
        except RuntimeError as error:
            print(type(error).__name__, error)


def leaving(sample: dict[str, Any]) -> dict[str, Any]:
    """Make the tensors that were sent out of reach, and end a moment later."""
    if len(sample["word"]) == 1 and get_worker_info() is not None:  # not in the feed's trial
        sharer: Any = resource_sharer._resource_sharer  # type: ignore[attr-defined]
        while sharer._address is None:  # a thread sends the first batch
            time.sleep(0.01)
        os.unlink(sharer._address)
        threading.Timer(0.5, os._exit, [3]).start()
    return {"length": np.full(4096, len(sample["word"]))}  # too large to be sent by value


def ends_before_its_tensors_come() -> None:
    """Fetch a tensor from a worker that torch still takes for alive."""
    feed = Feed(words(), sampler(1), decode=leaving)
    with TorchLoader(feed, num_workers=1) as loader:
        try:
            list(loader)
        except WorkerDiedError as error:
            print(type(error.__cause__).__name__, error)


def lead_group() -> None:
    """Make this process the leader of a new group, and print the id of both."""
    os.setsid()
    print(os.getpid(), flush=True)


def interrupted(workers: int) -> None:
    lead_group()
    feed = Feed(words(), sampler(), decode=slow)
    loaders = [TorchLoader(feed, num_workers=workers, readahead=readahead) for readahead in BOTH]
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
        options = {"num_workers": workers, "readahead": readahead}
        loaders = [TorchLoader(Feed(index, big), **options) for _ in range(2)]
        for _ in loaders[0]:
            break
        ALIVE.append(iter(loaders[1]))
        next(ALIVE[-1])
    print("leaving", flush=True)


def failed() -> None:
    for workers, readahead in product((0, 1), BOTH):
        feed = Feed(words(), sampler(), decode=slow)
        try:
            for _ in TorchLoader(feed, num_workers=workers, readahead=readahead):
                raise KeyError("the training step")
        except KeyError as error:
            print("failed in", error)


def full(**options: Any) -> None:
    """Keep batches until shared memory is full: of a loader, and of a DataLoader."""
    feed, kept = Feed(words(), sampler(), decode=wide, **options), []
    try:
        with TorchLoader(feed, num_workers=2) as loader:
            kept.extend(loader)
    except WorkerDiedError as error:
        print(len(kept), error)
    kept.clear()
    try:
        kept += DataLoader(
            RecordDataset(feed),
            batch_sampler=RequestSampler(feed),  # type: ignore[arg-type]
            collate_fn=as_tensors,  # type: ignore[arg-type]
            num_workers=2,
        )
    except WorkerDiedError as error:
        print(str(error).partition("WorkerDiedError: ")[2])


def both_ways() -> None:
    """Read by the workers of a loader, and of a DataLoader."""
    feed = Feed(words(), sampler(), decode=wide)
    with TorchLoader(feed, num_workers=2) as loader:
        print(sum(1 for _ in loader))
    requests: Any = RequestSampler(feed)
    collate: Any = as_tensors
    dataset = RecordDataset(feed)
    loader = DataLoader(dataset, batch_sampler=requests, collate_fn=collate, num_workers=2)
    print(sum(1 for _ in loader))


def fields(count: int, length: int) -> Any:
    """Decode to this many fields of this many bytes."""
    return lambda sample: {f"x{n}": np.full(length, n % 256, np.uint8) for n in range(count)}


def waiting(*contexts: str) -> None:
    """Wait, with workers that have filled their pipes, and a process of a pool that is at work."""
    lead_group()
    samples = [{"data": bytes(8000)} for _ in range(400)]
    index = pack(samples, Path(tempfile.mkdtemp()))["data"]
    feed = Feed(index, ExactOnceBatchSampler(400, batch_size=2))
    options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 16}
    requests: Any = RequestSampler(feed)
    collate: Any = as_tensors
    plain: Any = {"sampler": requests, "batch_size": None, "collate_fn": collate}
    loaders = [DataLoader(RecordDataset(feed), **plain, **options)]
    for context in contexts:
        loaders += [TorchLoader(feed, multiprocessing_context=context, **options)]
    passes = [iter(loader) for loader in loaders]
    for batches in passes:
        next(batches)
    with Pool(1) as pool:
        pool.submit(os.getpid).result()
        call = pool.submit(signal.pause)
        time.sleep(0.5)
        print("waiting", flush=True)
        call.result()


def few_descriptors(limit: int, count: int, length: int) -> None:
    """Many fields from workers of a process that may have few open files."""
    feed = Feed(words(), sampler(), decode=fields(count, length))
    with TorchLoader(feed, num_workers=2) as loader:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        try:
            print(sum(int(batch[f"x{count - 1}"].sum()) for batch in loader))
        except LoaderError as error:
            print(error)


SCENARIOS = {
    "many small fields": lambda: few_descriptors(64, 60, 8),
    "many large fields": lambda: few_descriptors(1024, 260, 8000),
    "both ways": both_ways,
    "waiting": lambda: waiting("fork"),
    "waiting for spawned workers": lambda: waiting("spawn", "forkserver"),
    "killed": lambda: die(killed),
    "bus": lambda: die(bus),
    "full": full,
    "full, ragged": lambda: full(collate="ragged"),
    "left": lambda: die(left),
    "killed in the body": killed_in_the_body,
    "ends before its tensors come": ends_before_its_tensors_come,
    "killed while sending": die_while_sending,
    "interrupted threads": lambda: interrupted(0),
    "interrupted workers": lambda: interrupted(2),
    "broken off threads": lambda: broken_off(0),
    "broken off workers": lambda: broken_off(2),
    "failed": failed,
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]]()
