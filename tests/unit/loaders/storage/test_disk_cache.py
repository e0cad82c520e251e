"""The disk cache of remote shards: hits, the bound, kills, damage, several processes."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
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
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.reading.read_step import ReadStep, plan_pass
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
    return sorted(folder.glob("??/*.chunk"))


def fewest_misses(accesses: Sequence[int], room: int) -> int:
    """Return the misses of the best cache there can be, over every choice of what it keeps."""

    @cache
    def best(place: int, held: frozenset[int]) -> int:
        if place == len(accesses):
            return 0
        one = accesses[place]
        if one in held:
            return best(place + 1, held)
        choices = [held]
        if len(held) < room:
            choices.append(held | {one})
        choices += [held - {other} | {one} for other in held if room]
        return 1 + min(best(place + 1, each) for each in choices)

    return best(0, frozenset())


@pytest.mark.parametrize("room", mark_long([0, 1, 2, 3, 5, 8], but_every=3))
@pytest.mark.parametrize("kind", ["random", "weighted", "shards"])
def test_hits_equal_the_brute_force_optimum(
    tmp_path: Path, server: RangeServer, room: int, kind: str
) -> None:
    """Equal to the optimum by brute force, over four epochs: the next epoch is known too."""
    path = chunk_records(tmp_path, shards=2, each=4)
    order: Any = {
        "random": RandomSampler(8, seed=3),
        "weighted": WeightedSampler([9, 1, 1, 5, 1, 3, 1, 1], seed=3, num_samples=8),
        "shards": ShardShuffleSampler([4, 4], block=2, window=2, seed=3),
    }[kind]
    index = cached(path, server, tmp_path / "cache", room)
    feed = Feed(index, BatchSampler(order, batch_size=1))
    accesses = [int(one) for epoch in range(4) for one in order.ids(epoch, range(8))]
    server.clear()
    with Reader(index) as reader:
        stream = Schedule(feed.sampler)
        for epoch in range(4):
            reads = plan_pass(reader, stream, list(feed.fields), 8 * epoch, 0)
            for step, record in enumerate(accesses[8 * epoch : 8 * epoch + 8], 8 * epoch):
                with ReadStep(reader, step, reads):
                    reader.read([record])
    assert server.asked["GET"] == fewest_misses(tuple(accesses), room)
    assert len(files(tmp_path / "cache")) <= room


def furthest_first(accesses: Sequence[int], room: int) -> int:
    """Return the misses of a cache that drops what is needed last, which has the fewest."""
    held: set[int] = set()
    misses = 0
    for place, one in enumerate(accesses):
        if one not in held:
            misses += 1
            held.add(one)
            rest = accesses[place + 1 :]
            if len(held) > room:
                held.remove(max(held, key=lambda n: rest.index(n) if n in rest else len(rest)))
    return misses


@pytest.mark.parametrize(
    ("batches", "kind"), mark_long(product([1, 8], ["random", "weighted", "blocks"]), but_every=2)
)
@pytest.mark.parametrize("room", [16, pytest.param(32, marks=pytest.mark.long)])
def test_reading_ahead_loses_no_hits(
    tmp_path: Path,
    server: RangeServer,
    network: Callable[..., None],
    kind: str,
    room: int,
    batches: int,
) -> None:
    """A chunk that was read ahead of its batch is needed next at its use after that batch."""
    network(requests=1)
    path = chunk_records(tmp_path, shards=2, each=24)
    orders: dict[str, Any] = {
        "random": RandomSampler(48, seed=1),
        "weighted": WeightedSampler(np.arange(1, 49) ** 2, seed=1),
        "blocks": ShardShuffleSampler([24, 24], block=2, window=6, seed=1),
    }
    order, epochs = orders[kind], 8
    index = cached(path, server, tmp_path / "cache", room)
    feed = Feed(index, BatchSampler(order, batch_size=2))
    accesses = []
    for epoch in range(epochs):
        ids = [int(one) for one in order.ids(epoch, range(48))]
        if kind == "blocks":  # read as a whole when it is entered
            first = dict.fromkeys(n // 2 for n in ids)
            ids = [record for block in first for record in (2 * block, 2 * block + 1)]
        accesses += ids
    server.clear()
    with NumpyLoader(feed, readahead=batches * 2 * CHUNK) as loader:
        for _ in range(epochs):
            assert sum(len(batch["id"]) for batch in loader) == 48
    misses = sum(stop - start for _, start, stop in server.ranges) / CHUNK
    assert misses <= 1.1 * furthest_first(accesses, room)
    assert len(files(tmp_path / "cache")) <= room


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


def test_reader_without_a_schedule_evicts_least_recently_used(
    tmp_path: Path, server: RangeServer
) -> None:
    path = chunk_records(tmp_path, shards=1, each=4)
    index = cached(path, server, tmp_path / "cache", 2)
    with Reader(index) as reader:
        for record in (0, 1, 0, 2):
            reader.read([record])
            time.sleep(0.05)  # the clock of files may tick every hundredth of a second
        server.clear()
        reader.read([0])
        assert not server.asked
        reader.read([1])
        assert server.asked["GET"] == 1


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
    with Reader(index, checksums=False) as unchecked:
        assert b"wrong" in unchecked.read([0])["data"][0]
    shard.write_bytes(right)
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
    disk = Disk(DiskCache(tmp_path / "cache", bytes=1000))
    name = f"{'a' * 24}-0"
    disk.put(name, b"x" * 100, iter(()))
    others = [tmp_path / "cache" / "aa" / "mine.chunk", tmp_path / "cache" / "notes.txt"]
    for other in others:
        other.write_text("mine")
    assert [found for found, _ in disk.entries()] == [name]
    disk.put(f"{'a' * 24}-1", b"x" * 950, (name for name, _ in disk.entries()))
    assert disk.get(name, 100) is None
    assert all(other.exists() for other in others)


def test_full_disk_does_not_stop_reading(
    tmp_path: Path, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = chunk_records(tmp_path, shards=1, each=2)
    index = cached(path, server, tmp_path / "cache", 2)
    assert index.cache
    Disk(index.cache)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_disk.os, "replace", full)
    with Reader(index) as reader:
        with pytest.warns(RuntimeWarning, match="some bytes are not cached: .*No space"):
            reader.read([0])
        reader.read([1])
    assert not list((tmp_path / "cache").glob("??/.*"))


KILLED = """
import sys, random
from pathlib import Path
from twinfeed.loaders.storage.disk import Disk
from twinfeed.loaders.storage.disk_cache import DiskCache
disk = Disk(DiskCache(sys.argv[1], bytes=20 * 4108))
draw = random.Random(int(sys.argv[2]))
print("begins", flush=True)
while True:
    name = f"{draw.randrange(60):024x}-0"
    if disk.get(name, 4096) is None:
        found = sorted(disk.entries(), key=lambda one: one[1])
        disk.put(name, (name.encode() * 200)[:4096], (one for one, _ in found))
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
    assert not list(folder.glob("??/.*"))
    used = sum(file.stat().st_size for file in files(folder))
    assert disk._load_used() == used
    for file in files(folder):
        want = (file.stem.encode() * 200)[:4096]
        assert disk.get(file.stem, 4096) == want


def _bytes(folder: Path) -> int:
    """Count the bytes of all files, half-written files too, while other processes change them."""
    total = 0
    for file in [*folder.glob("??/.*"), *folder.glob("??/*.chunk")]:
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total
