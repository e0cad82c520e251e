"""What is prefetched of remote shards: a golden trace of requests, and what must hold of each pass.

`PYTHONPATH=tests python tests/unit/loaders/reading/test_prefetch.py` records the traces. A trace
has a line for each step: `file:start+bytes` of each request, a bar, and what is buffered then.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import numpy as np
import pytest
from support import GOLDEN
from support.batches import read_ahead
from support.inside import batcher_of
from support.servers import RangeServer

from twinfeed.loaders import (
    DecodeError,
    DiskCache,
    Feed,
    Index,
    NumpyLoader,
    Reader,
    open_index,
    pack,
)
from twinfeed.loaders.reading.prefetch import chunk_cache, kernel_readahead
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.storage import request_pool
from twinfeed.loaders.storage.open_store import store_of
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    ReuseSampler,
    ShardShuffleSampler,
)

TRACES = GOLDEN / "prefetch.json"
RECORD, COUNT = 9000, 60

STREAMS: dict[str, Callable[[Index], BatchStream]] = {
    "uniform": lambda _: BatchSampler(RandomSampler(COUNT, seed=0), batch_size=6),
    "blocks": lambda index: BatchSampler(
        ShardShuffleSampler(index.shard_lengths, block=5, window=3, seed=0), batch_size=6
    ),
    "ranks": lambda index: BatchSampler(
        ShardShuffleSampler(index.shard_lengths, block=5, window=4, sections=2, seed=0),
        batch_size=12,
    ).shard(0, 2),
    "reuse": lambda _: BatchSampler(ReuseSampler(COUNT, reuse=2, live=8, seed=0), batch_size=8),
    "pk": lambda index: PKBatchSampler(index.class_order, p=3, k=2, seed=0),
    "evaluation": lambda _: ExactOnceBatchSampler(COUNT, batch_size=6),
}
WAYS = ("remote", "cached", "local")
MOST_CALLS = {("blocks", "remote"): (77, 57, 16), ("evaluation", "cached"): (142, 105, 28)}


def buffered(reader: Reader) -> list[tuple[int, int, int]]:
    """Return the file, the start and the stop of each range that a reader has fetched ahead."""
    return list(reader._files().buffer._ranges) if reader.index.remote else []  # type: ignore[union-attr]


class Immediately:
    """A pool of request threads that has none: a request is done when it is submitted."""

    def submit(self, call: Callable[[], Any], _size: int, /, **_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        return future

    def promote(self, _futures: Any, /) -> None:
        """Do nothing: no request waits."""


@contextmanager
def traced(
    folder: Path, name: str, way: str
) -> Iterator[tuple[Callable[[], NumpyLoader], list[str]]]:
    """Give what makes a loader, and the list of the ranges that are requested."""
    requests: list[str] = []
    fsspec.filesystem("memory").put(f"{folder}/", "/prefetch", recursive=True)
    with tempfile.TemporaryDirectory() as empty:
        cache = DiskCache(Path(empty) / "cache", bytes=5 * ((1 << 16) + 12))
    cache_of = {"root": "memory://prefetch", "cache": cache if way == "cached" else None}
    far = open_index(folder / "data.index", **cache_of)
    index = open_index(folder / "data.index") if way == "local" else far
    options: dict[str, Any] = {"decode": dict} if name == "reuse" else {}
    feed = Feed(index, STREAMS[name](index), fields=["x"], **options)
    assert feed.spec  # a sample was tried, and fills a cache
    shutil.rmtree(cache.path, ignore_errors=True)
    store = store_of(far.shards_root)
    read, names = store.read, index.shard_paths.tolist()

    def made() -> NumpyLoader:
        return NumpyLoader(feed, prefetch=0, threads=0, readahead=15 * RECORD)

    def noted(path: str, start: int, stop: int) -> Any:
        requests.append(f"{names.index(path)}:{start}+{stop - start}")
        return read(path, start, stop)

    def advised(fd: int, start: int, size: int) -> None:
        shard = Path(f"/proc/self/fd/{fd}").readlink().name
        requests.append(f"{names.index(shard)}:{start}+{size}")

    with (
        mock.patch.object(chunk_cache, "_RECORDS_PER_CHUNK", 1),
        mock.patch.dict(request_pool.request_pool._values, {os.getpid(): Immediately()}),
        mock.patch.object(kernel_readahead, "advise", advised),
        mock.patch.object(store, "read", noted),
    ):
        yield made, requests


def trace(folder: Path, name: str, way: str) -> list[str]:
    """Two epochs, an epoch far from them, half an epoch that is resumed, and a resume elsewhere."""
    lines, most = [], 0
    with traced(folder, name, way) as (made, requests):

        def steps(loader: NumpyLoader, title: str, stop: int | None = None) -> None:
            nonlocal most
            lines.append(title)
            for step, _ in enumerate(loader, 1):
                if way == "local":
                    thread = loader.reader._files().kernel_readahead._thread  # type: ignore[attr-defined]
                    _ = thread and thread.join()  # None: it has ended
                alive = buffered(loader.reader)
                most = max(most, sum(stop - start for _, start, stop in alive))
                after = " ".join(f"{file}:{start}+{stop - start}" for file, start, stop in alive)
                lines.append(f"{' '.join(requests)} | {after}".strip())
                requests.clear()
                if step == stop:
                    break

        with made() as loader:
            for epoch in range(2):
                steps(loader, f"epoch {epoch}")
            loader.set_epoch(7)
            steps(loader, "epoch 7", 4)
            state = loader.state_dict()
            steps(loader, "epoch 7, going on")
            steps(loader, "epoch 8", 2)
        with made() as loader:
            loader.load_state_dict(state)
            steps(loader, "epoch 7, resumed elsewhere", 3)
    return [*lines, f"peak {most}"]


def packed(folder: Path) -> Path:
    """Pack three shards of records that no gap between them joins."""
    draw = np.random.default_rng(0)
    samples = ({"x": draw.bytes(RECORD), "label": n % 7} for n in range(COUNT))
    pack(samples, folder, shards=3)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tmp_path_factory.mktemp("prefetch") / "data")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STREAMS)
def test_requests_of_each_step_equal_the_golden_trace(folder: Path, name: str, way: str) -> None:
    """In this order, no more and no fewer; and no byte is buffered for longer or shorter."""
    assert trace(folder, name, way) == json.loads(TRACES.read_text())[f"{name}, {way}"]


def profiled(folder: Path, name: str, way: str) -> tuple[int, int, int]:
    """Return the median calls, functions and files of a remote batch, of this library's code."""
    found: list[tuple[int, int, int]] = []
    calls: list[Any] = []
    inside = os.sep + "loaders" + os.sep, os.sep + "samplers" + os.sep

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and any(one in frame.f_code.co_filename for one in inside):
            calls.append(frame.f_code)

    with traced(folder, name, way) as (made, _), made() as loader:
        for _ in range(3):
            batches = iter(loader)
            while True:
                calls.clear()
                sys.setprofile(note)
                batch = next(batches, None)
                sys.setprofile(None)
                if batch is None:
                    break
                files = {code.co_filename for code in calls}
                found.append((len(calls), len(set(calls)), len(files)))
    return tuple(int(np.median(one)) for one in zip(*found, strict=True))  # type: ignore[return-value]


def test_request_that_a_batch_waits_for_is_sent_next(
    folder: Path, server: RangeServer, network: Callable[..., None]
) -> None:
    network(requests=1)
    request_pool.request_pool.pop()  # a pool without the threads of earlier tests
    for shard in folder.glob("*.tfrecord"):
        (server.folder / shard.name).write_bytes(shard.read_bytes())
    index = open_index(folder / "data.index", root=server.url)
    server.clear()
    reached, go_on = threading.Event(), threading.Event()

    def wait(_path: str, _start: int) -> None:
        reached.set()
        assert go_on.wait(20)

    server.fail = wait
    with Reader(index) as reader, ThreadPoolExecutor(1) as pool:
        read_ahead(reader, range(0, COUNT, 4), ["x"])
        assert reached.wait(20)  # the first request, and no other
        # As a thread of an earlier test that ends now: the sender tries the second one in vain.
        requests = request_pool.request_pool()
        requests._is_idle = True
        requests._start_threads()
        while requests._is_sending:
            time.sleep(0.001)
        found = pool.submit(reader.read, [COUNT - 4], ["x"])
        rows = index.rows(["x"], np.array([COUNT - 4]))
        while not requests._sendable._urgent:
            time.sleep(0.001)
        go_on.set()
        assert len(found.result()["x"][0]) == RECORD
        assert [start for _, start, _ in server.ranges][1] == int(rows["offset"][0])


def test_failing_batch_releases_its_step(folder: Path) -> None:
    """Who catches the error goes on, and what the failed batch needed does not stay."""
    fsspec.filesystem("memory").put(f"{folder}/", "/prefetch", recursive=True)
    index = open_index(folder / "data.index", root="memory://prefetch")
    calls: list[int] = []

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        calls.append(1)
        if len(calls) == failing:
            raise ValueError("no such picture")
        return {"first": sample["x"][0]}

    feed = Feed(index, STREAMS["uniform"](index), fields=["x"], decode=decode)
    failing = -1
    with Reader(index) as reader, batcher_of(feed, reader=reader) as batcher:
        schedule = Schedule(feed.sampler)
        batcher.start_pass(schedule, 0, 0, readahead=15 * RECORD)
        failing = len(calls) + 9
        for request in feed.requests():
            with pytest.raises(DecodeError) if request.step == 1 else nullcontext():
                batcher(request)
        assert not buffered(reader)


def test_pickled_reader_has_an_empty_buffer(folder: Path) -> None:
    fsspec.filesystem("memory").put(f"{folder}/", "/prefetch", recursive=True)
    with Reader(open_index(folder / "data.index", root="memory://prefetch")) as reader:
        read_ahead(reader, range(0, COUNT, 4), ["x"])
        assert len(buffered(reader)) == COUNT // 4
        assert not buffered(pickle.loads(pickle.dumps(reader)))
    assert not buffered(reader)


def test_a_remote_batch_takes_few_calls(folder: Path) -> None:
    """Calls, functions and files; a Python that inlines comprehensions has fewer."""
    for (name, way), most in MOST_CALLS.items():
        found = profiled(folder, name, way)
        assert all(n <= m for n, m in zip(found, most, strict=True)), (name, way, found)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        folder_ = packed(Path(temporary) / "data")
        traces = {f"{name}, {way}": trace(folder_, name, way) for name in STREAMS for way in WAYS}
        TRACES.write_text(json.dumps(traces, indent=0) + "\n")
        print({key: profiled(folder_, *key) for key in MOST_CALLS})
