"""The disk cache of remote shards: hits, the bound, kills, damage, several processes."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.batches import made
from support.cases import mark_long
from support.formats import write_records
from support.plain import batches
from support.servers import RangeServer

from twinfeed.loaders import (
    DataCorruptionError,
    DiskCache,
    Feed,
    Index,
    NumpyLoader,
    Reader,
    StaleIndexError,
    build_index,
    open_index,
)
from twinfeed.loaders.reading.prefetch import chunk_cache
from twinfeed.loaders.storage import disk as _disk
from twinfeed.loaders.storage.disk import Disk
from twinfeed.loaders.storage.disk_cache import cache_of_environment
from twinfeed.samplers import BatchSampler, RandomSampler, ShardShuffleSampler, WeightedSampler

CHUNK = 1 << 16
ENTRY = CHUNK + 12
"""The bytes of a chunk, and of its file in the cache."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    (tmp_path / "shards").mkdir()
    with RangeServer(tmp_path / "shards") as serving:
        yield serving


@pytest.fixture(autouse=True)
def one_record_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_cache, "_RECORDS_PER_CHUNK", 1)


def chunk_records(folder: Path, *, shards: int, each: int) -> Path:
    """Index shards whose every record is one chunk of the cache; give the path of the index."""
    data = np.random.default_rng(1)
    for shard in range(shards):
        records = [data.bytes(CHUNK - 16) for _ in range(each)]
        write_records(folder / "shards" / f"d-{shard}.tfrecord", *records)
    pattern = folder / "shards" / "*.tfrecord"
    return build_index(pattern, folder / "x.index", root=folder / "shards", example=False).path


def cached(path: Path, server: RangeServer, folder: Path, entries: int) -> Index:
    return open_index(path, root=server.url, cache=DiskCache(folder, bytes=max(1, entries * ENTRY)))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.chunk"))


def misses(accesses: Sequence[int], room: int) -> int:
    """Return how often a cache is missed that keeps the first `room` chunks."""
    held: set[int] = set()
    count = 0
    for one in accesses:
        count += one not in held
        if len(held) < room:
            held.add(one)
    return count


ORDERS: dict[str, Any] = {
    "random": RandomSampler(48, seed=1),
    "weighted": WeightedSampler(np.arange(1, 49) ** 2, seed=1),
    "blocks": ShardShuffleSampler([24, 24], block=2, window=6, seed=1),
}


@pytest.mark.parametrize(
    ("kind", "room"), mark_long(product(ORDERS, [0, 1, 16, 47, 48]), but_every=4)
)
def test_full_cache_keeps_what_it_has(
    tmp_path: Path, server: RangeServer, kind: str, room: int
) -> None:
    path = chunk_records(tmp_path, shards=2, each=24)
    order, epochs = ORDERS[kind], 4
    feed = Feed(cached(path, server, tmp_path / "cache", room), BatchSampler(order, batch_size=1))
    accesses = [int(one) for epoch in range(epochs) for one in order.ids(epoch, range(48))]
    assert feed.spec  # a sample was tried, and fills a cache
    shutil.rmtree(tmp_path / "cache")
    server.clear()
    with NumpyLoader(feed, readahead=0, threads=0, prefetch=0) as loader:
        for _ in range(epochs):
            assert sum(len(batch["id"]) for batch in loader) == 48
    read = sum(stop - start for _, start, stop in server.ranges)
    expected = CHUNK * misses(accesses, room)
    assert expected - 16 * len(server.ranges) * 2 <= read <= expected  # the framing of a record
    assert len(files(tmp_path / "cache")) == min(room, len(set(accesses)))


def test_block_shuffle_reads_each_byte_once(
    tmp_path: Path, server: RangeServer, network: Callable[..., None]
) -> None:
    """With the cache of a third of the data, ahead of the loop, on many threads."""
    network(requests=8)
    path = chunk_records(tmp_path, shards=2, each=24)
    index = cached(path, server, tmp_path / "cache", 16)
    feed = Feed(index, BatchSampler(ORDERS["blocks"], batch_size=2))
    with NumpyLoader(feed, readahead=16 * CHUNK) as loader:
        for _ in range(6):
            assert sum(len(batch["id"]) for batch in loader) == 48
    read = sum(stop - start for _, start, stop in server.ranges)
    ahead = 16 * CHUNK  # of the epoch after the last
    assert read <= (48 + 5 * (48 - 16)) * CHUNK + ahead


def test_full_cache_fetches_no_more_than_no_cache(tmp_path: Path, server: RangeServer) -> None:
    """Records of a sixteenth of a chunk in random order."""
    records = [bytes([n]) * (CHUNK // 16 - 16) for n in range(200)]
    write_records(server.folder / "d.tfrecord", *records)
    path = build_index(
        server.folder / "d.tfrecord", tmp_path / "x.index", root=server.folder, example=False
    ).path
    read = []
    for index in (open_index(path, root=server.url), cached(path, server, tmp_path / "cache", 3)):
        feed = Feed(index, BatchSampler(RandomSampler(200, seed=0), batch_size=4))
        with NumpyLoader(feed, threads=0, prefetch=0, readahead=0) as loader:
            for _ in range(2):
                server.clear()
                assert all(batch["data"][0] == records[batch["id"][0]] for batch in loader)
        read.append(sum(stop - start for _, start, stop in server.ranges))
    assert read[1] < read[0]


@pytest.fixture
def three(tmp_path: Path, server: RangeServer) -> list[Index]:
    """Three indexes of a shard each, of two chunks, and a cache of four chunks."""
    chunk_records(tmp_path, shards=3, each=2)
    shards = [server.folder / f"d-{number}.tfrecord" for number in range(3)]
    made = [
        build_index(shard, tmp_path / f"{shard.stem}.index", root=server.folder, example=False)
        for shard in shards
    ]
    return [cached(index.path, server, tmp_path / "cache", 4) for index in made]


def aged(folder: Path, *hours: float) -> list[Path]:
    """Set how long ago the shards of a cache were used, and return their folders."""
    folders = sorted({file.parent for file in files(folder)}, key=lambda one: one.stat().st_mtime)
    for place, since in zip(folders, hours, strict=True):
        os.utime(place, times=(time.time() - 3600 * since,) * 2)
    return folders


@pytest.mark.parametrize("hours", [(2, 3), (3, 2), (2, 0.9), (0.9, 0.8)])
def test_shards_that_no_run_has_used_for_an_hour_go_first(
    tmp_path: Path, three: list[Index], hours: tuple[float, float]
) -> None:
    """The least recently used one, and only as many as make room."""
    for index in three[:2]:
        with Reader(index) as reader:
            reader.read([0, 1])
    folders = aged(tmp_path / "cache", *hours)
    with Reader(three[2]) as reader:
        reader.read([0, 1])
    left = {file.parent for file in files(tmp_path / "cache")}
    old = [place for age, place in zip(hours, folders, strict=True) if age > 1]
    gone = folders[hours.index(max(hours))] if old else None
    assert [place for place in folders if place not in left] == ([gone] if gone else [])
    assert len(files(tmp_path / "cache")) == 4


def test_run_keeps_shards_that_it_does_not_read_for_a_while(
    tmp_path: Path, three: list[Index], server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch may take longer than an hour: the run marks all its shards."""
    path = build_index(
        [server.folder / f"d-{n}.tfrecord" for n in (0, 1)],
        tmp_path / "both.index",
        root=server.folder,
        example=False,
    ).path
    with Reader(cached(path, server, tmp_path / "cache", 4)) as reader:
        reader.read(range(4))
        folders = aged(tmp_path / "cache", 2, 2)
        monkeypatch.setattr(_disk, "_MARK_SECONDS", 0.0)
        reader._files().cache._disk._next_mark = 0.0  # type: ignore[union-attr]
        reader.read([0])
        with Reader(three[2]) as other:
            other.read([0, 1])
    assert {file.parent for file in files(tmp_path / "cache")} == set(folders)


def test_chunk_that_several_threads_read_is_fetched_once(
    tmp_path: Path, server: RangeServer
) -> None:
    records = [bytes([n]) * (CHUNK // 16 - 16) for n in range(64)]
    write_records(server.folder / "d.tfrecord", *records)
    path = build_index(
        server.folder / "d.tfrecord", tmp_path / "x.index", root=server.folder, example=False
    ).path
    server.clear()
    server.fail = lambda _path, _start: time.sleep(0.1)
    with (
        Reader(cached(path, server, tmp_path / "cache", 4)) as reader,
        ThreadPoolExecutor(8) as pool,
    ):
        found = pool.map(lambda n: bytes(reader.read([n])["data"][0]), range(64))
        assert list(found) == records
    assert sorted(server.ranges) == [
        ("d.tfrecord", start, start + CHUNK) for start in range(0, 4 * CHUNK, CHUNK)
    ]


def test_second_epoch_is_read_from_the_cache(tmp_path: Path, server: RangeServer) -> None:
    path = chunk_records(tmp_path, shards=3, each=4)
    index = cached(path, server, tmp_path / "cache", 12)
    local = open_index(path, root=tmp_path / "shards")
    sampler = BatchSampler(RandomSampler(12, seed=0), batch_size=4)
    server.clear()
    for epoch in range(3):
        pairs = zip(
            made(Feed(index, sampler), epoch),
            batches(Feed(local, sampler), epoch),
            strict=True,
        )
        for one, other in pairs:
            assert np.array_equal(one["id"], other["id"])
            assert list(one["data"]) == list(other["data"])
        assert sum(stop - start for _, start, stop in server.ranges) == 12 * CHUNK
    assert len(files(tmp_path / "cache")) == 12


def test_ranks_read_through_one_cache(tmp_path: Path, server: RangeServer) -> None:
    """Both ranks of a machine: once the first batch was refused as sharded a second time."""
    path = chunk_records(tmp_path, shards=2, each=4)
    feed = Feed(
        cached(path, server, tmp_path / "cache", 4),
        BatchSampler(RandomSampler(8, seed=3), batch_size=4),
    )
    with NumpyLoader(feed.shard(0, 2)) as first, NumpyLoader(feed.shard(1, 2)) as second:
        for _ in range(2):
            got = [[*one["id"], *two["id"]] for one, two in zip(first, second, strict=True)]
            epoch = first.epoch - 1
            assert got == [ids.tolist() for ids in feed.sampler.batches(epoch, 0, 2)]
    assert len(files(tmp_path / "cache")) <= 4


def test_damaged_entry_is_fetched_again(tmp_path: Path, server: RangeServer) -> None:
    path = chunk_records(tmp_path, shards=1, each=4)
    index = cached(path, server, tmp_path / "cache", 4)
    with Reader(index) as reader:
        want = reader.read(range(4))
        for number, file in enumerate(files(tmp_path / "cache")):
            data = bytearray(file.read_bytes())
            if number == 0:
                data[100] ^= 1
            else:
                data = data[: number * 20_000] if number < 3 else data + b"x"
            file.write_bytes(data)
        server.clear()
        assert reader.read(range(4)) == want
        assert sum(stop - start for _, start, stop in server.ranges) == 4 * CHUNK
        server.clear()
        assert reader.read(range(4)) == want
        assert not server.asked


def test_wrong_bytes_of_a_changed_object_are_not_kept(tmp_path: Path, server: RangeServer) -> None:
    """Without tags, a shard that was changed for a while leaves what does not fit the index."""
    path = chunk_records(tmp_path, shards=1, each=2)
    index = cached(path, server, tmp_path / "cache", 2)
    shard = tmp_path / "shards" / "d-0.tfrecord"
    right = shard.read_bytes()
    shard.write_bytes(right[: CHUNK + 20] + b"wrong" + right[CHUNK + 25 :])
    with Reader(index) as reader, pytest.raises(DataCorruptionError, match="corrupted bytes"):
        reader.read([1])
    shard.write_bytes(right[:100] + b"wrong" + right[105:])
    index.checksums = False
    with Reader(index) as unchecked:
        assert b"wrong" in unchecked.read([0])["data"][0]
    shard.write_bytes(right)
    index.checksums = True
    with Reader(index) as reader, Reader(open_index(path, root=tmp_path / "shards")) as local:
        for _ in range(2):
            assert reader.read([0, 1]) == local.read([0, 1])


def test_object_with_another_tag_has_its_own_entries(tmp_path: Path, server: RangeServer) -> None:
    """The bytes of the old object, of the same size, are not served for the new object."""
    chunk_records(tmp_path, shards=1, each=2)
    shard = tmp_path / "shards" / "d-0.tfrecord"
    for turn, letter in enumerate((b"a", b"b")):
        write_records(shard, *[letter * (CHUNK - 16)] * 2)
        server.tags[shard.name] = f'"{turn}"'
        path = build_index(
            f"{server.url}/d-0.tfrecord",
            tmp_path / f"{turn}.index",
            example=False,
        ).path
        cache = DiskCache(tmp_path / "cache", bytes=9 * ENTRY)
        index = open_index(path, root=server.url, cache=cache)
        with Reader(index) as reader:
            assert reader.read([1])["data"] == [letter * (CHUNK - 16)]


def test_shard_keeps_its_entries_in_a_larger_index(tmp_path: Path, server: RangeServer) -> None:
    for shards in (1, 2):
        path = chunk_records(tmp_path, shards=shards, each=2)
        server.clear()
        with Reader(cached(path, server, tmp_path / "cache", 9)) as reader:
            reader.read([0, 1])
        assert len(server.ranges) == (shards == 1)


def test_loose_files_are_cached_and_size_changes_are_stale(
    tmp_path: Path, server: RangeServer
) -> None:
    """Files of nothing, of less than a chunk and of several chunks."""
    folder, draw = tmp_path / "shards", np.random.default_rng(0)
    for number, size in enumerate([0, 100, 3 * CHUNK, CHUNK, 0, 70_000, 5]):
        (folder / f"{number}.png").write_bytes(draw.bytes(size))
    local = build_index(folder, tmp_path / "x.index", root=folder)
    cache = DiskCache(tmp_path / "cache", bytes=10**7)
    index = open_index(local.path, root=server.url, cache=cache)
    sampler = BatchSampler(RandomSampler(7, seed=0), batch_size=2)
    for epoch in range(3):
        pairs = zip(
            made(Feed(index, sampler), epoch), batches(Feed(local, sampler), epoch), strict=True
        )
        assert all(list(one["image"]) == list(other["image"]) for one, other in pairs)
        asked = sum(stop - start for _, start, stop in server.ranges)
        assert asked == sum(file.stat().st_size for file in folder.iterdir())
    with (folder / "1.png").open("ab") as file:
        file.write(b"more")
    with (
        Reader(open_index(local.path, root=server.url)) as reader,
        pytest.raises(StaleIndexError, match="expected: 100 bytes\n  found: 104 bytes"),
    ):
        reader.read([1])


def test_environment_variable_sets_the_cache(
    tmp_path: Path, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = chunk_records(tmp_path, shards=1, each=2)
    monkeypatch.setenv("TWINFEED_CACHE", str(tmp_path / "cache"))
    assert open_index(path, root=tmp_path / "shards").cache is None, "nothing here is remote"
    monkeypatch.setenv("TWINFEED_CACHE_BYTES", "1MB")
    index = open_index(path, root=server.url)
    assert index.cache == DiskCache(tmp_path / "cache", bytes="1M")
    assert pickle.loads(pickle.dumps(index)).cache == index.cache
    with Reader(index) as reader:
        reader.read([1])
    assert len(files(tmp_path / "cache")) == 1


def test_cache_folder_is_private_to_its_owner(tmp_path: Path) -> None:
    Disk(DiskCache(tmp_path / "new" / "cache", bytes=1000))
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700


def test_tilde_expands_to_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("TWINFEED_CACHE", "~/cache")
    monkeypatch.setenv("TWINFEED_CACHE_BYTES", "1G")
    assert cache_of_environment() == DiskCache("/home/me/cache", bytes=10**9)


def test_reading_continues_when_cache_folder_is_deleted(
    tmp_path: Path, server: RangeServer
) -> None:
    path = chunk_records(tmp_path, shards=1, each=8)
    index = cached(path, server, tmp_path / "cache", 3)
    with Reader(index) as reader, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some bytes are not cached
        for record in range(8):
            if record == 4:  # the cache is full
                shutil.rmtree(tmp_path / "cache")
            assert len(reader.read([record])["data"]) == 1


def test_cache_deletes_only_its_own_files(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", bytes=1000)
    Disk(cache).put(f"{'a' * 24}/0", b"x" * 100)
    (folder,) = {file.parent for file in files(cache.path)}
    (tmp_path / "elsewhere").mkdir()
    (cache.path / ("b" * 24)).symlink_to(tmp_path / "elsewhere")
    (folder / "1.chunk").symlink_to(folder / "mine.chunk")
    others = [folder / "mine.chunk", cache.path / "notes.txt", tmp_path / "elsewhere" / "0.chunk"]
    for other in others:
        other.write_text("mine")
    for place in (folder, tmp_path / "elsewhere"):
        os.utime(place, (0, 0))
    Disk(cache).put(f"{'c' * 24}/1", b"x" * 950)
    assert [file.name for file in files(cache.path) if file.parent == folder] == [
        "1.chunk",
        "mine.chunk",
    ]
    assert all(other.read_text() == "mine" for other in others)
    assert (cache.path / f"{'c' * 24}" / "1.chunk").exists()


def test_full_disk_does_not_stop_reading(
    tmp_path: Path, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = chunk_records(tmp_path, shards=1, each=2)
    index = cached(path, server, tmp_path / "cache", 2)
    assert index.cache
    Disk(index.cache)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, Reader(index) as reader:
        patch.setattr(_disk.os, "replace", full)
        with pytest.warns(RuntimeWarning, match="some bytes are not cached: .*No space"):
            reader.read([0])
        reader.read([1])
    assert not files(tmp_path / "cache")
    with Reader(index) as reader:  # there is space again: what was not written takes none
        reader.read([0, 1])
    assert len(files(tmp_path / "cache")) == 2
    assert not (tmp_path / "cache" / "writing").exists()


KILLED = """
import sys, random
from pathlib import Path
from twinfeed.loaders.storage.disk import Disk
from twinfeed.loaders.storage.disk_cache import DiskCache
disk = Disk(DiskCache(sys.argv[1], bytes=20 * 4108))
draw = random.Random(int(sys.argv[2]))
print("begins", flush=True)
while True:
    name = f"{draw.randrange(60):024x}/0"
    if disk.get(name, 4096) is None:
        disk._full_until = 0
        disk.put(name, (name.encode() * 200)[:4096])
    elif draw.random() < 0.5:
        disk.drop(name)
"""


def test_cache_killed_at_any_moment_stays_usable_and_bounded(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    for turn in range(6):
        both = [
            subprocess.Popen(
                [sys.executable, "-c", KILLED, folder, str(2 * turn + n)], stdout=subprocess.PIPE
            )
            for n in range(2)
        ]
        for process in both:
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(random.Random(turn).uniform(0.02, 0.15))
        assert _bytes(folder) <= 20 * 4108
        for process in both:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
        assert _bytes(folder) <= 20 * 4108
    disk = Disk(DiskCache(folder, bytes=20 * 4108))
    found = files(folder)
    assert found
    (used,) = struct.unpack("<q", (folder / "used").read_bytes())
    assert used >= sum(file.stat().st_size for file in found)
    for file in found:
        name = f"{file.parent.name}/0"
        assert disk.get(name, 4096) == (name.encode() * 200)[:4096]
        disk.drop(name)
    disk.put(f"{0:024x}/0", bytes(4096))
    assert _bytes(folder) == 4108, "nothing of the killed processes is left"


def _bytes(folder: Path) -> int:
    """Count the bytes of all entries, half-written ones too, while other processes change them."""
    total = 0
    for file in [folder / "writing", *files(folder)]:
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total
