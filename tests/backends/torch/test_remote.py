"""Worker processes of torch over shards at a URL, started by fork and by spawn."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import threads
from support.plain import batches
from support.programs import PYTHON, QUIET
from support.servers import RangeServer
from torch.utils.data import DataLoader

from twinfeed.loaders import (
    DataCorruptionError,
    DiskCache,
    Feed,
    LoaderError,
    StaleIndexError,
    open_index,
    pack,
)
from twinfeed.loaders.torch import RecordDataset, RequestSampler, TorchLoader, as_tensors
from twinfeed.samplers import BatchSampler, RandomSampler, ShardShuffleSampler


@pytest.mark.parametrize(
    ("method", "cached"),
    [
        ("fork", False),
        ("fork", True),
        pytest.param("spawn", False, marks=pytest.mark.long),
    ],
)
def test_workers_read_remote_shards(
    tmp_path: Path, server: RangeServer, method: Any, cached: bool
) -> None:
    """The parent has read before it forks. A cache is filled by one process, once an epoch."""
    draw = np.random.default_rng(0)
    local = pack(({"x": draw.bytes(1000)} for _ in range(96)), tmp_path, shards=2)["data"]
    cache = DiskCache(tmp_path / "cache", bytes=10**7) if cached else None
    index = open_index(f"{server.url}/data.index", cache=cache)
    sampler = BatchSampler(RandomSampler(96, seed=0), batch_size=16)
    loader = TorchLoader(
        Feed(index, sampler),
        num_workers=1 if method == "spawn" else 2,
        multiprocessing_context=method,
        persistent_workers=True,
        device="cpu",
    )
    try:
        for epoch in range(2):
            server.clear()
            pairs = zip(loader, batches(Feed(local, sampler), epoch), strict=True)
            for one, other in pairs:
                assert np.array_equal(one["id"], other["id"])
                assert list(one["x"]) == list(other["x"])
        assert not (cached and server.asked)
    finally:
        loader.close()


@pytest.mark.parametrize("cached", [False, True])
def test_own_dataloader_over_remote_dataset_requests_records_or_chunks(
    tmp_path: Path, server: RangeServer, cached: bool
) -> None:
    draw = np.random.default_rng(0)
    pack(({"x": draw.bytes(1000)} for _ in range(96)), tmp_path)
    cache = DiskCache(tmp_path / "cache", bytes=10**7) if cached else None
    index = open_index(f"{server.url}/data.index", cache=cache)
    feed = Feed(index, BatchSampler(RandomSampler(96, seed=0), batch_size=16))
    server.clear()
    dataset = RecordDataset(feed)
    serving = DataLoader(dataset, batch_sampler=RequestSampler(feed), collate_fn=as_tensors)
    assert sum(len(batch["id"]) for batch in serving) == 96
    if cached:
        assert server.asked.total() < 8
    else:
        assert server.asked.total() > 48  # neighbours are one request


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("fork", "blocks"),
        ("fork", "random"),
        ("fork", "cached"),
        pytest.param("spawn", "random", marks=pytest.mark.long),
    ],
)
def test_workers_cost_no_more_requests_or_bytes(
    tmp_path: Path, server: RangeServer, method: Any, kind: str
) -> None:
    """Each byte is asked for once, whichever workers need it, in as few requests as without."""
    draw = np.random.default_rng(0)
    local = pack(({"x": draw.bytes(1000)} for _ in range(512)), tmp_path, shards=2)["data"]
    order: Any = RandomSampler(512, seed=0)
    if kind == "blocks":
        order = ShardShuffleSampler(local.shard_lengths, block=64, window=3, seed=0)
    sampler = BatchSampler(order, batch_size=16)
    asked = {}
    for workers in (0, 2):
        cache = DiskCache(tmp_path / f"cache{workers}", bytes=10**7) if kind == "cached" else None
        feed = Feed(open_index(f"{server.url}/data.index", cache=cache), sampler)
        options: Any = {"num_workers": workers, "multiprocessing_context": method}
        server.clear()
        with TorchLoader(feed, device="cpu", **(options if workers else {})) as loader:
            pairs = zip(loader, batches(Feed(local, sampler)), strict=True)
            assert all(list(one["x"]) == list(other["x"]) for one, other in pairs)
        asked[workers] = server.asked["GET"], sum(stop - at for _, at, stop in server.ranges)
    with_workers, without = asked[2], asked[0]
    few = 1.05 if kind == "random" else 1.0  # where two ranges hold a record, either may be taken
    assert all(one <= few * other for one, other in zip(with_workers, without, strict=True))
    assert without[0] < (200 if kind == "random" else 30)


@pytest.mark.parametrize("fault", ["changed", "corrupted", "refused", "gone"])
def test_workers_report_remote_fault_and_continue(
    tmp_path: Path, server: RangeServer, fault: str
) -> None:
    draw = np.random.default_rng(0)
    local = pack(({"x": draw.bytes(1000)} for _ in range(64)), tmp_path, shards=1)["data"]
    shard = tmp_path / local.shard_paths[0]
    right = shard.read_bytes()
    feed = Feed(
        open_index(f"{server.url}/data.index"),
        BatchSampler(RandomSampler(64, seed=0), batch_size=8),
        spec={"x": ((), None)},  # type: ignore[dict-item]
    )
    kinds = {"changed": StaleIndexError, "corrupted": DataCorruptionError, "refused": LoaderError}
    with TorchLoader(feed, device="cpu", num_workers=2) as loader:
        if fault in ("changed", "corrupted"):
            more = b"x" if fault == "changed" else b""
            shard.write_bytes(bytes(byte ^ 1 for byte in right) + more)
        else:
            server.fail = lambda _path, _start: 404 if fault == "gone" else 403
        with pytest.raises(kinds.get(fault, FileNotFoundError)) as caught:
            next(iter(loader))
        assert server.url in str(caught.value)
        assert "__getitem__" in str(caught.value.__cause__), "where in the worker"
        shard.write_bytes(right)
        server.fail = lambda _path, _start: None
        if fault != "corrupted":  # wrong bytes that were prefetched are reported one by one
            assert sum(len(batch["id"]) for batch in loader) == 64
    for thread in {*threading.enumerate()} - {*threads.before}:
        if "twinfeed" in thread.name:
            thread.join(60)
    assert not threads.started_threads()


KILLED = """
import os, sys
from torch.utils.data._utils import worker
from twinfeed.loaders import Feed, open_index
from twinfeed.loaders.torch import RecordDataset, RequestSampler, TorchLoader, as_tensors
from twinfeed.samplers import BatchSampler, SequentialSampler
worker.MP_STATUS_CHECK_INTERVAL = 0.2
def size(sample):
    return {"size": len(sample["x"])}  # torch's queue of a batch of bytes would keep a worker
sampler = BatchSampler(SequentialSampler(64), batch_size=8)
feed = Feed(open_index(sys.argv[1]), sampler, decode=size)
loader = TorchLoader(feed, device="cpu", num_workers=2, readahead=0)
next(iter(loader))
print(os.getpid(), *(worker.pid for worker in loader._workers._iterator._workers), flush=True)
sys.stdin.readline()
for batch in loader:
    pass
"""


def test_workers_end_with_a_process_that_is_killed(tmp_path: Path, server: RangeServer) -> None:
    """They wait then for an answer that does not come any more."""
    pack(({"x": b"x" * 100_000} for _ in range(64)), tmp_path, shards=1)
    url = f"{server.url}/data.index"
    code = KILLED.replace("num_workers=2", "num_workers=2, persistent_workers=True")
    command, pipe, environment = [PYTHON, "-c", code, url], subprocess.PIPE, os.environ | QUIET
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pid, *workers = map(int, process.stdout.readline().split())
        while server.now:
            time.sleep(0.01)
        server.delay = 60.0
        print(file=process.stdin, flush=True)
        while not server.now:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
    assert len(workers) == 2
    for _ in range(600):
        if not any(Path(f"/proc/{pid}").exists() for pid in workers):
            return
        time.sleep(0.05)
    pytest.fail("a worker outlives its parent")
