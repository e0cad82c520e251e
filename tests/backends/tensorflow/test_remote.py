"""TensorFlow over shards at a URL: the same batches, and what a failed pass leaves behind."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import TESTS, tensorflow_feeds
from support.cases import mark_long
from support.programs import PYTHON, QUIET
from support.servers import RangeServer

from twinfeed.loaders import Feed, LoaderError, NumpyLoader, open_index, pack
from twinfeed.loaders.storage.request_pool import RequestPool
from twinfeed.samplers import BatchSampler, SequentialSampler

RECORDS, SHARDS, SIZE = 96, 4, 3000


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    monkeypatch.setenv("TWINFEED_PATIENCE", "0.1")
    draw = np.random.default_rng(0)
    samples = ({"x": draw.bytes(SIZE), "label": n % 7} for n in range(RECORDS))
    pack(samples, tmp_path, shards=SHARDS)
    with RangeServer(tmp_path) as serving:
        yield serving


def feed_of(server: RangeServer) -> Feed:
    """A feed of the shards at the server's URL."""
    index = open_index(f"{server.url}/data.index")
    return Feed(index, BatchSampler(SequentialSampler(RECORDS), batch_size=8))


def fail_late(server: RangeServer) -> None:
    """Refuse the third shard."""
    server.fail = lambda path, _start: 503 if path.startswith("data-00002") else None


def iterators() -> int:
    """How many iterators of TensorFlow live, those in garbage included."""
    kinds = map(type, gc.get_objects())  # not isinstance, which asks objects for their class
    return sum(issubclass(kind, tf.data.Iterator) for kind in kinds)


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What lies in a cycle stays there."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "more", mark_long([{"decode": lambda sample: {"size": len(sample["x"])}}, {}], but_every=2)
)
def test_remote_batches_equal_local_batches(
    tmp_path: Path, server: RangeServer, more: dict[str, Any]
) -> None:
    sampler = BatchSampler(SequentialSampler(RECORDS), batch_size=8)
    local = Feed(open_index(tmp_path / "data.index"), sampler, **more)
    with tensorflow_feeds.loader(open_index(f"{server.url}/data.index"), sampler, **more) as loader:
        server.clear()
        for _ in range(2):
            for one, other in zip(loader, NumpyLoader(local), strict=True):
                assert one.keys() == other.keys()
                for name, value in other.items():
                    assert list(one[name].numpy()) == list(value)
    assert server.asked["GET"]


def test_remote_error_names_url_and_next_pass_continues(server: RangeServer) -> None:
    feed = feed_of(server)
    received: list[list[int]] = []
    with tensorflow_feeds.loader(feed.index, feed.sampler) as loader:
        fail_late(server)
        with pytest.raises(LoaderError) as caught:
            received.extend(batch["id"].numpy().tolist() for batch in loader)
        assert f"{server.url}/data-00002" in str(caught.value)
        assert loader.step == len(received)
        server.fail = lambda _path, _start: None
        with tensorflow_feeds.loader(feed.index, feed.sampler) as another:
            assert len(list(another)) == 12
        received += [batch["id"].numpy().tolist() for batch in loader]
    assert received == [list(range(8 * n, 8 * n + 8)) for n in range(12)]


@pytest.mark.usefixtures("without_collector")
def test_loop_ended_early_frees_iterator_without_collector(server: RangeServer) -> None:
    def stop(loader: Any) -> None:
        for _ in loader:
            break

    def fail(loader: Any) -> None:
        for _ in loader:
            raise KeyError("of the loop")

    def fail_and_keep(loader: Any) -> None:
        kept = None
        try:
            fail(loader)
        except KeyError as error:
            kept = error
        assert kept is not None
        raise kept

    feed, before = feed_of(server), iterators()
    with tensorflow_feeds.loader(feed.index, feed.sampler) as loader:
        stop(loader)
        assert iterators() == before
        for way in (fail, fail_and_keep):
            try:
                way(loader)
            except KeyError as error:
                kept = error
            assert kept.args == ("of the loop",)
            assert iterators() == before


@pytest.mark.usefixtures("without_collector")
def test_loader_works_after_failed_fit(server: RangeServer) -> None:
    """At once, and the collector is not needed: while the error is kept, and when it is gone."""
    feed = feed_of(server)
    network = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    network.compile("sgd", "mse")

    def pairs(batch: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        labels = tf.cast(batch["label"], tf.float32)[:, None]
        return labels, labels

    with tensorflow_feeds.loader(feed.index, feed.sampler) as loader:
        for _ in range(2):
            fail_late(server)
            with pytest.raises(tf.errors.OpError, match="data-00002") as kept:
                network.fit(loader.dataset.map(pairs), verbose=0, shuffle=False)
            server.fail = lambda path, _start: None
            assert [len(batch["id"]) for batch in loader] == [8] * (RECORDS // 8)
            fail_late(server)
            with pytest.raises(tf.errors.OpError, match="data-00002"):
                network.fit(loader.dataset.map(pairs), verbose=0, shuffle=False)
            loader.close()
            del kept


HOSTILE = """
import faulthandler, gc, sys, threading
from pathlib import Path
from support import tensorflow_feeds
from support.servers import RangeServer
from twinfeed.loaders import open_index
from twinfeed.loaders.errors import LoaderError
from twinfeed.samplers import BatchSampler, SequentialSampler

gc.disable()
gc.freeze()  # what exists now need not be examined
start = threading.Thread.start

def start_hostile(thread):
    if thread.name == "twinfeed-request":
        gc.collect()  # as an allocation may
    start(thread)

threading.Thread.start = start_hostile
folder, records = sys.argv[1], int(sys.argv[2])
sampler = BatchSampler(SequentialSampler(records), batch_size=8)
with RangeServer(Path(folder)) as server:
    index = open_index(f"{server.url}/data.index")
    for _ in range(2):
        loader = tensorflow_feeds.loader(index, sampler)
        server.fail = lambda path, start: 503 if path.startswith("data-00002") else None
        loader.dataset
        faulthandler.dump_traceback_later(100, exit=True)  # nothing slow is left but TensorFlow
        try:
            for batch in loader:
                pass
        except LoaderError:
            print("failed", flush=True)
        server.fail = lambda path, start: None
        list(loader)
        faulthandler.cancel_dump_traceback_later()
        print("went on", flush=True)
"""


HOSTILE_FIT = """
import faulthandler, gc, sys
from pathlib import Path
import keras
import tensorflow as tf
from support import tensorflow_feeds
from support.servers import RangeServer
from twinfeed.loaders import LoaderError, open_index
from twinfeed.loaders.reading.prefetch.buffer import RangeBuffer
from twinfeed.loaders.keras import ResumeCallback
from twinfeed.samplers import BatchSampler, SequentialSampler

gc.disable()
gc.freeze()  # what exists now need not be examined

def hostile(method):
    def call(*arguments, **options):
        gc.collect()  # as an allocation may, while the lock is held
        return method(*arguments, **options)
    return call

for name in ("_find", "clear", "_set_last_steps", "_drop", "_prefetch"):
    setattr(RangeBuffer, name, hostile(getattr(RangeBuffer, name)))
network = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
network.compile("sgd", "mse")

def pairs(batch):
    labels = tf.cast(batch["label"], tf.float32)[:, None]
    return labels, labels

def fit(loader):
    kept = None
    try:
        ResumeCallback(loader, Path(folder) / "saves").fit(network, pairs, verbose=0)
    except LoaderError as error:
        kept = error  # in a cycle with this frame, as is the iterator of the pass
    print("failed" if kept else "trained", flush=True)

folder, records = sys.argv[1], int(sys.argv[2])
sampler = BatchSampler(SequentialSampler(records), batch_size=8)
with RangeServer(Path(folder)) as server:
    index = open_index(f"{server.url}/data.index")
    for _ in range(2):
        decode = lambda sample: {"size": float(len(sample["x"]))}  # so several threads read
        loader = tensorflow_feeds.loader(index, sampler, decode=decode)
        server.fail = lambda path, start: 503 if path.startswith("data-00002") else None
        loader.dataset
        faulthandler.dump_traceback_later(100, exit=True)  # nothing slow is left but TensorFlow
        fit(loader)
        server.fail = lambda path, start: None
        list(loader)
        faulthandler.cancel_dump_traceback_later()
        print("went on", flush=True)
"""


PLAIN_FIT = HOSTILE_FIT.replace(
    'ResumeCallback(loader, Path(folder) / "saves").fit(network, pairs, verbose=0)',
    "network.fit(tf.data.Dataset.zip(loader.dataset.map(pairs), tf.data.Dataset.range(99))"
    ".map(lambda pair, _: pair).prefetch(1), verbose=0, shuffle=False)",
).replace("LoaderError as", "(LoaderError, tf.errors.OpError) as")


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(HOSTILE, id="loop"),
        pytest.param(HOSTILE_FIT, id="fit"),
        pytest.param(PLAIN_FIT, id="plain", marks=pytest.mark.long),
    ],
)
def test_garbage_collection_after_failed_pass_does_not_block_next(
    tmp_path: Path, server: RangeServer, script: str
) -> None:
    """The collector runs while its thread has locks that TensorFlow's threads wait for."""
    done = subprocess.run(
        [PYTHON, "-c", script, str(tmp_path), str(RECORDS)],
        cwd=TESTS,
        env=os.environ | QUIET,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split("\n") == ["failed", "went on"] * 2 + [""]


def test_request_thread_starts_without_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may run while a thread starts, and a destructor may wait for who submits."""
    pool, start, held = RequestPool(), threading.Thread.start, []

    def looking(thread: threading.Thread) -> None:
        held.append(pool._lock.locked())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", looking)
    for future in [pool.submit(threading.Event, 1) for _ in range(3)]:
        future.result(10)
    assert held
    assert not any(held)
