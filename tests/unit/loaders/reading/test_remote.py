"""Shards at URLs: requests in flight, failures that pass and that stay, objects that changed."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.batches import expected, made
from support.inside import fetch_ahead
from support.servers import RangeServer
from support.shards import tars, tfrecords, write_tfrecord

from twinfeed.loaders import (
    Feed,
    FromFolder,
    Index,
    NumpyLoader,
    Reader,
    ShardWarning,
    StaleIndexError,
    build_index,
    open_index,
    pack,
    plan,
)
from twinfeed.loaders.reading.prefetch.read_plan import FILE_RANGE, NO_BLOCK
from twinfeed.loaders.storage import request_pool
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    SequentialSampler,
    ShardShuffleSampler,
    WeightedSampler,
)

MIB = 1 << 20


@pytest.fixture(autouse=True)
def short_pauses(network: Callable[..., None]) -> None:
    network(first_pause=0.01, longest_pause=0.02, retry_seconds=0.09)


def large(folder: Path, *, shards: int, records: int, size: int) -> Index:
    """Pack records of `size` random bytes."""
    data = np.random.default_rng(0)
    samples = ({"x": data.bytes(size)} for _ in range(shards * records))
    return pack(samples, folder, shard_records=records)["data"]


def at(server: RangeServer, index: Index) -> Index:
    """Return the index with its shards at the server."""
    return open_index(index.path, root=server.url)


def extents(index: Index, ids: Any) -> Any:
    """Return a range for each of these records."""
    rows = index.rows(["x"], np.asarray(ids))
    ranges = np.zeros(len(rows), FILE_RANGE)
    ranges["file"], ranges["start"], ranges["block"] = rows["file"], rows["offset"], NO_BLOCK
    ranges["stop"] = rows["offset"] + rows["length"]
    return ranges


def test_label_function_sees_names_of_remote_shards(tmp_path: Path, server: RangeServer) -> None:
    """And not by those of the temporary copies that are scanned."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        write_tfrecord(tmp_path / name / f"{name}.tfrecord", [{"x": [1]}])
    urls = [f"{server.url}/{name}/{name}.tfrecord" for name in ("cat", "dog")]
    index = build_index(urls, tmp_path / "folder.index", label=FromFolder())
    assert [index.classes[label] for label in index.labels] == ["cat", "dog"]
    index = build_index(urls, tmp_path / "f.index", label=lambda sample: sample["__shard__"])
    assert index.classes == tuple(urls)


def test_remote_index_gives_same_batches_as_local_index(
    tmp_path: Path, server: RangeServer
) -> None:
    tfrecords(tmp_path, shards=5, each=40)
    local = build_index(tmp_path / "*.tfrecord", tmp_path / "l.index")
    remote = build_index(
        [f"{server.url}/{name}" for name in local.shard_paths.tolist()], tmp_path / "r.index"
    )
    assert remote.fingerprint == local.fingerprint
    assert remote.root == server.url
    assert server.asked["WHOLE"] == 0
    order = ShardShuffleSampler(local.shard_lengths, block=4, window=4, seed=0)
    sampler = BatchSampler(order, batch_size=16)
    assert expected(local, sampler, epochs=[1]) == expected(remote, sampler, epochs=[1])


def test_adjacent_records_are_one_request(tmp_path: Path, server: RangeServer) -> None:
    index = large(tmp_path, shards=2, records=40, size=10_000)
    with Reader(at(server, index)) as reader:
        found = reader.read([3, 4, 5, 30, 50])["x"]
    with Reader(index) as reader:
        assert found == reader.read([3, 4, 5, 30, 50])["x"]
    assert server.asked == {"GET": 3}, "the size of a shard comes with its ranges"
    assert server.sent < 5 * 10_000 + 2 * 200


def test_requests_in_flight_reach_their_limit(
    tmp_path: Path, server: RangeServer, network: Callable[..., None]
) -> None:
    """Blocks of 4 MiB: 8 at once, of two shards, before any answer comes."""
    network(requests=8, in_flight=64 * MIB)
    index = large(tmp_path, shards=2, records=8, size=4 * MIB)
    server.hold(8)
    with Reader(at(server, index)) as reader:
        fetch_ahead(reader, extents(index, range(16)))
        for record in range(16):
            reader.read([record])
    assert server.most == 8
    assert server.asked == {"GET": 16}


def test_bytes_in_flight_stay_within_their_limit(
    tmp_path: Path, server: RangeServer, network: Callable[..., None]
) -> None:
    network(requests=8, in_flight=3 * MIB)
    index = large(tmp_path, shards=1, records=16, size=MIB)
    server.hold(2)
    with Reader(at(server, index)) as reader:
        fetch_ahead(reader, extents(index, range(16)))
        reader.read(range(16))
    assert 2 * MIB <= server.most_bytes <= 3 * MIB


def test_range_is_fetched_once_and_released_after_use(tmp_path: Path, server: RangeServer) -> None:
    index = large(tmp_path, shards=1, records=8, size=1000)
    ranges = np.array([(0, 0, int(index.shards["bytes"][0]), NO_BLOCK, 3)], FILE_RANGE)
    with Reader(at(server, index)) as reader:
        fetch_ahead(reader, ranges)
        for record in range(8):
            reader._files().buffer.release_before(3)
            reader.read([record])
        assert server.asked["GET"] == 1
        reader._files().buffer.release_before(4)
        reader.read([0])
        assert server.asked["GET"] == 2


@pytest.mark.parametrize("batch_size", [4, pytest.param(16, marks=pytest.mark.long), 64])
def test_open_blocks_stay_buffered_beyond_buffer_bytes(
    tmp_path: Path, server: RangeServer, network: Callable[..., None], batch_size: int
) -> None:
    """Else a block that made room would be asked for record by record."""
    network(buffer_bytes=20_000)
    index = large(tmp_path, shards=2, records=1024, size=900)
    sampler = ShardShuffleSampler(index.shard_lengths, block=8, window=16, seed=0)
    feed = Feed(at(server, index), BatchSampler(sampler, batch_size=batch_size))
    asked = plan(feed, readahead=30_000).requests
    server.clear()
    for epoch in range(2):
        ids = [batch["id"] for batch in made(feed, epoch, ahead=30_000)]
        assert np.array_equal(np.sort(np.concatenate(ids)), np.arange(len(index)))
    assert server.asked["GET"] <= 2.2 * asked


def test_ranges_may_be_read_in_another_order_than_announced(
    tmp_path: Path, server: RangeServer, network: Callable[..., None]
) -> None:
    """All ranges come, even if not all can begin at once, and none drops another of its batch."""
    network(buffer_bytes=1000)
    index = large(tmp_path, shards=1, records=8, size=900)
    with Reader(at(server, index)) as reader, Reader(index) as local:
        fetch_ahead(reader, extents(index, [5, 3, 7, 1]))
        for ids in ([3, 5], [7], [1]):
            assert reader.read(ids) == local.read(ids)
    assert server.asked["GET"] == 4


@pytest.mark.parametrize("fate", [500, 503, 429, "reset", "short"])
def test_transient_errors_are_retried(tmp_path: Path, server: RangeServer, fate: int | str) -> None:
    index = large(tmp_path, shards=1, records=8, size=1000)
    fates = iter([fate, fate])
    server.fail = lambda _path, _start: next(fates, None)
    with Reader(at(server, index)) as reader, Reader(index) as local:
        assert reader.read([5]) == local.read([5])
    assert server.asked["GET"] == 3


def test_range_that_failed_in_prefetch_is_requested_again(
    tmp_path: Path, server: RangeServer, network: Callable[..., None]
) -> None:
    """After an outage a loader goes on, and does not raise old errors one by one."""
    network(retry_seconds=0)
    index = large(tmp_path, shards=1, records=8, size=1000)
    server.fail = lambda _path, _start: 503
    with Reader(at(server, index)) as reader, Reader(index) as local:
        fetch_ahead(reader, extents(index, range(8)))
        held = reader._files().buffer._ranges  # type: ignore[attr-defined]
        while not all(one.failed for one in held.values()):
            time.sleep(0.01)
        server.fail = lambda _path, _start: None
        for record in range(8):
            assert reader.read([record]) == local.read([record])


def test_shard_without_extension_is_detected_by_its_bytes(
    tmp_path: Path, server: RangeServer
) -> None:
    tars(tmp_path, shards=1)[0].rename(tmp_path / "shard")
    assert build_index(f"{server.url}/shard", tmp_path / "x.index").container == "tar"


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_changed_object_is_an_error_with_both_tags(
    tmp_path: Path, server: RangeServer, when: str
) -> None:
    """Another tag, at the same size: an error at the first reading, and at the next."""
    name = large(tmp_path, shards=1, records=8, size=1000).shard_paths[0]
    server.tags[name] = '"old"'
    index = build_index(f"{server.url}/{name}", tmp_path / "x.index")
    assert index.tag(0) == '"old"'
    with Reader(index) as reader:
        if when == "meanwhile":
            reader.read([1])
        server.tags[name] = '"new"'
        with pytest.raises(StaleIndexError, match=r'tag "old"\n  found: .*tag "new"'):
            reader.read([2])
    (tmp_path / "mirror").symlink_to(tmp_path)
    mirror = open_index(index.path, root=f"{server.url}/mirror")
    with Reader(mirror) as reader:
        reader.read([2])  # another place has other tags, and the bytes are checked


def test_object_of_another_size_is_stale(tmp_path: Path, server: RangeServer) -> None:
    index = large(tmp_path, shards=1, records=8, size=1000)
    shard = tmp_path / index.shard_paths[0]
    shard.write_bytes(shard.read_bytes()[:-2000])
    size = shard.stat().st_size
    for record in (0, 7):  # within what is left, and beyond
        with (
            Reader(at_url(server, index)) as reader,
            pytest.raises(StaleIndexError, match=f"found: {size} bytes"),
        ):
            reader.read([record])


def at_url(server: RangeServer, index: Index) -> Index:
    """Return the index as a pickle gives it elsewhere: its local shards are not looked at."""
    kind, arguments = index.__reduce__()[:2]  # type: ignore[misc]
    return kind(arguments[0], server.url, *arguments[2:])  # type: ignore[operator, no-any-return]


def _read(reader: Reader, queue: Any) -> None:
    fetch_ahead(reader, extents(reader.index, [5, 6, 7]))
    queue.put((os.getpid(), reader.read([5, 6, 7])["x"]))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_process_uses_its_own_connections(
    tmp_path: Path, server: RangeServer, method: str
) -> None:
    """The parent has read, so that its threads and connections are there to be inherited."""
    index = at(server, large(tmp_path, shards=1, records=8, size=1000))
    context: Any = multiprocessing.get_context(method)
    with Reader(index) as reader:
        want = reader.read([5, 6, 7])["x"]
        fetch_ahead(reader, extents(index, [0, 1]))
        queue = context.Queue()
        process = context.Process(target=_read, args=(reader, queue), daemon=True)
        process.start()
        pid, found = queue.get(timeout=300)
        process.join(60)
    assert process.exitcode == 0
    assert (pid, found) == (process.pid, want)


def test_process_exit_does_not_wait_for_pending_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = SimpleNamespace(is_alive=lambda: False)
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    assert all(
        request_pool.RequestPool().submit(int, 1, urgent=urgent).cancelled()
        for urgent in (True, False)
    )


def scattered(folder: Path, server: RangeServer, count: int) -> tuple[Index, list[int]]:
    """Return an index of shards at the server, and records that are a request each."""
    index = large(folder, shards=1, records=4 * count, size=1000)
    return at(server, index), np.random.default_rng(0).permutation(4 * np.arange(count)).tolist()


def test_small_requests_are_sent_ahead_of_their_responses(
    tmp_path: Path, server: RangeServer, network: Callable[..., None]
) -> None:
    """More of them than there are threads, once connections are open, and no more than allowed."""
    network(requests=2, small_requests=9)
    index, ids = scattered(tmp_path, server, 300)
    server.delay = 0.005
    with Reader(index) as reader, Reader(open_index(index.path)) as local:
        fetch_ahead(reader, extents(index, ids))
        assert reader.read(ids)["x"] == local.read(ids)["x"]
    assert 9 <= server.most <= 2 + 9
    assert server.asked == {"GET": 300}


@pytest.mark.parametrize("fate", ["reset", "short", "hang", 503, "moved", "closes"])
def test_request_sent_ahead_that_fails_is_made_again(
    tmp_path: Path, server: RangeServer, network: Callable[..., None], fate: int | str
) -> None:
    """Every tenth range meets its fate once. A server that closes each connection is no fault."""
    network(requests=2, first_pause=0.01, request_seconds=0.5 if fate == "hang" else 60)
    index, ids = scattered(tmp_path, server, 40)
    (shard,) = index.shard_paths.tolist()
    (tmp_path / f"moved-{shard}").write_bytes((tmp_path / shard).read_bytes())
    server.tags = dict.fromkeys((shard, f"moved-{shard}"), '"1"')
    met: set[int] = set()

    def fail(_path: str, start: int) -> int | str | None:
        if len(server.ranges) < 8 or start // 1000 % 10 or start in met:
            return None
        met.add(start)
        return fate

    if fate == "closes":
        server.headers = {"Connection": "close"}
    elif fate == "moved":
        server.fail = lambda _path, _start: server.moved.update({f"/{shard}": f"/moved-{shard}"})
    else:
        server.fail = fail
    with Reader(index) as reader, Reader(open_index(index.path)) as local:
        fetch_ahead(reader, extents(index, ids))
        assert reader.read(ids)["x"] == local.read(ids)["x"]
    assert met or fate in ("moved", "closes")


def test_idle_request_threads_end(tmp_path: Path, server: RangeServer) -> None:
    index = large(tmp_path, shards=1, records=8, size=1000)
    with Reader(at(server, index)) as reader:
        reader.read(range(8))
    mine = [thread for thread in threading.enumerate() if thread.name == "twinfeed-request"]
    for thread in mine:
        thread.join(60)
    assert not any(thread.is_alive() for thread in mine)
    assert request_pool.request_pool()._num_threads == 0
    assert not request_pool.request_pool()._is_sending


def test_loader_keeps_requests_in_flight_at_their_limit(
    tmp_path: Path, server: RangeServer, network: Callable[..., None]
) -> None:
    """Blocks of 4 MiB of a shuffle: behind the first batches, the plan fills the pool."""
    network(requests=8)
    index = large(tmp_path, shards=4, records=16, size=MIB)
    server.hold(8, after=5)  # the size of a shard, and the blocks of the first batches
    order = ShardShuffleSampler(index.shard_lengths, block=4, window=4, seed=0)
    sampler = BatchSampler(order, batch_size=4)
    with NumpyLoader(Feed(at(server, index), sampler), prefetch=1) as loader:
        server.clear()
        assert sum(len(batch["id"]) for batch in loader) == 64
    assert server.most == 8
    assert server.asked["GET"] <= 32, "a block is one request; a few are cut, or of the next epoch"


@pytest.mark.parametrize("readahead", [pytest.param(0, marks=pytest.mark.long), None])
@pytest.mark.parametrize("kind", ["random", "weighted", "shards", "once", "pk", "stored"])
def test_every_sampler_gives_same_batches_remotely(
    tmp_path: Path, server: RangeServer, kind: str, readahead: int | None
) -> None:
    samples = ({"x": b"%d" % n, "label": n % 7} for n in range(70))
    index = pack(samples, tmp_path, shards=3)["data"]
    orders: dict[str, Any] = {
        "random": RandomSampler(70, seed=1),
        "weighted": WeightedSampler(np.arange(1, 71), seed=1),
        "shards": ShardShuffleSampler(index.shard_lengths, block=5, window=3, seed=1),
        "stored": SequentialSampler(70),
    }
    sampler: Any = {
        "once": ExactOnceBatchSampler(70, batch_size=16, last_batch="pad"),
        "pk": PKBatchSampler(index.class_order, p=4, k=2, seed=1),
    }.get(kind) or BatchSampler(orders[kind], batch_size=16)
    for rank in range(2):
        feeds = [Feed(one, sampler).shard(rank, 2) for one in (index, at(server, index))]
        for epoch in range(2):
            pairs = zip(*(made(feed, epoch, ahead=readahead) for feed in feeds), strict=True)
            for one, other in pairs:
                assert one.keys() == other.keys()
                for name in one:
                    assert np.array_equal(one[name], other[name])


def test_random_epoch_requests_little_more_than_its_bytes(
    tmp_path: Path, server: RangeServer
) -> None:
    """Ranges are merged over a gap of a record at most. The next epoch is read ahead."""
    index = at(server, large(tmp_path, shards=2, records=48, size=10_000))
    feed = Feed(index, BatchSampler(RandomSampler(96, seed=0), batch_size=16))
    server.clear()
    with NumpyLoader(feed, prefetch=2) as loader:
        assert sum(len(batch["id"]) for batch in loader) == 96
    assert server.sent <= 1.1 * 2 * 96 * 10_000


def test_shuffled_repack_requests_each_byte_once(tmp_path: Path, server: RangeServer) -> None:
    """Not for every field of every record by itself; the index and its classes stay the same."""
    samples = [
        {"x": bytes([n % 251]) * 900, "y": b"y" * (n % 40), "label": f"class {n % 7}"}
        for n in range(1000)
    ]
    samples[3].pop("y")
    with pytest.warns(ShardWarning, match="lack"):
        pack(samples, tmp_path, shards=4)
    far = at(server, open_index(tmp_path / "data.index"))
    server.clear()
    with pytest.warns(ShardWarning, match="lack"):
        again = pack(far, tmp_path / "near", seed=1)["data"]
    assert server.asked["GET"] < 100
    assert server.sent < 1.2 * int(far.shards["bytes"].sum())
    assert sorted(again.classes) == sorted(far.classes)
    with Reader(again) as reader:
        packed_ = reader.read(range(1000))
    assert Counter(zip(*packed_.values(), strict=True)) == Counter(
        (one["x"], one.get("y")) for one in samples
    )
    assert not (tmp_path / "near" / "cache").exists()


def test_empty_field_sends_no_request(tmp_path: Path, server: RangeServer) -> None:
    """As a list of boxes is where an image has none."""
    samples = (
        {"x": bytes(2000), "boxes": np.ones(number % 3, np.float32)} for number in range(2000)
    )
    pack(samples, tmp_path, shards=4)
    index = at(server, open_index(tmp_path / "data.index"))
    order = ShardShuffleSampler(index.shard_lengths, block=100, window=8, seed=0)
    feed = Feed(index, BatchSampler(order, batch_size=50), fields=["boxes"], collate="ragged")
    asked = plan(feed).requests
    server.clear()
    with NumpyLoader(feed, prefetch=2) as loader:
        assert sum(len(batch["id"]) for batch in loader) == 2000
    assert server.asked["GET"] <= 1.25 * 2 * asked, "of this epoch, and of the next one"


@pytest.mark.parametrize("kind", ["random", "shards"])
def test_consecutive_epochs_request_each_byte_once(
    tmp_path: Path, server: RangeServer, kind: str
) -> None:
    """What is read over the end of an epoch is what the next epoch then reads, not more."""
    records, size = 96, 20_000
    index = at(server, large(tmp_path, shards=2, records=48, size=size))
    order: Any = RandomSampler(records, seed=0)
    if kind == "shards":
        order = ShardShuffleSampler(index.shard_lengths, block=6, window=4, seed=0)
    feed = Feed(index, BatchSampler(order, batch_size=16))
    server.clear()
    with NumpyLoader(feed, prefetch=2, readahead=20 * size) as loader:
        for epoch in range(5):
            assert sum(len(batch["id"]) for batch in loader) == records
            # Ahead: three batches, `readahead` with its last batch, open blocks; 108 records.
            assert server.sent <= 1.05 * ((epoch + 1) * records + 108) * size
            if epoch > 1:
                assert server.sent >= 0.7 * epoch * records * size, "nothing is kept for long"
