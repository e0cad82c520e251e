"""A plan names what coming batches read: in time, once, in few ranges, within a bound."""

import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.batches import read_ahead
from support.sampler_cases import CASES
from support.shards import tfrecords
from support.threads import started_threads

from twinfeed.loaders import (
    Feed,
    Index,
    NumpyLoader,
    Reader,
    build_index,
    open_index,
    pack,
    plan,
    shuffled,
)
from twinfeed.loaders.index.sizes import exceeds_memory
from twinfeed.loaders.reading import local
from twinfeed.loaders.reading.prefetch import kernel_readahead
from twinfeed.loaders.reading.prefetch.read_plan import (
    LOCAL_GAP,
    MAX_RANGE_BYTES,
    NO_BLOCK,
    Fetch,
    PlannedFiles,
    ReadPlan,
    Release,
    merge_rows,
    ranges_of_records,
)
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.support import system
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    RandomSampler,
    ReuseSampler,
    SequentialSampler,
    ShardShuffleSampler,
    SubsetSampler,
)

CHOSEN = (
    "sequential",
    "random",
    "subset-random",
    "shards",
    "shards-sections",
    "blocks-replaced",
    "views-all",
)
CHOSEN += ("mixture", "exact-once-pad", "reuse", "pk")
RECORD = LOCAL_GAP + 1000
"""Bytes of a record that is never merged with another but its neighbour."""


class RecordingReader(PlannedFiles):
    """Reads the batches of a plan, and notes what is fetched; reading waits for a disk, or not."""

    def __init__(self, index: Index, stream: BatchStream, limit: int | None, waiting: bool) -> None:
        fields = list(index.fields)
        self.plan = ReadPlan(index, fields, Schedule(stream), 0, limit=limit, files=self)
        self.fetched: list[list[tuple[int, int, int, int]]] = []
        self.probes = 0
        self.waiting = waiting
        self.released = False

    def read(self, step: int) -> None:
        with self.plan.step(step):
            pass
        assert not self.released, "of local shards nothing is released"

    def are_cached(self, ranges: Any, /) -> bool:
        self.probes += 1
        return not self.waiting

    def apply(self, event: Fetch | Release, /) -> None:
        if isinstance(event, Fetch):
            self.fetched.append(event.ranges[["file", "start", "stop", "step"]].tolist())
        self.released |= isinstance(event, Release)

    @property
    def ranges(self) -> list[tuple[int, int, int, int]]:
        return [row for rows in self.fetched for row in rows]

    @property
    def bytes(self) -> int:
        return sum(stop - start for _, start, stop, _ in self.ranges)

    @property
    def records(self) -> int:
        return self.bytes // RECORD


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Shards of 40, 1, 60 and 99 records, sparse files of zeros."""
    samples = ({"x": bytes(RECORD)} for _ in range(200))
    return pack(samples, tmp_path_factory.mktemp("long"), shard_records=50)["data"]


def recording(
    index: Index, stream: BatchStream, limit: int | None = 10 * RECORD, *, waiting: bool = True
) -> tuple[ReadPlan, RecordingReader]:
    reads = RecordingReader(index, stream, limit, waiting)
    return reads.plan, reads


def rows_of(index: Index, records: Any) -> list[tuple[int, int, int]]:
    """Where records lie: file, start, stop."""
    rows = index.rows(list(index.fields), np.asarray(records))
    return [(file, start, start + length) for start, length, file, _ in rows.tolist()]


@pytest.mark.parametrize("name", CHOSEN)
def test_plan_fetches_every_range_before_its_batch(name: str, long: Index) -> None:
    """For every sampler, within the bound, and with as many uses as there are."""
    stream = dict(CASES)[name]()
    assert stream.num_records <= len(long)
    plan, reader = recording(long, stream)
    consumed: set[tuple[int, int]] = set()
    for step, ids in enumerate(stream.batches(0, 0, len(stream))):
        reader.read(step)
        records = stream.records(ids[ids >= 0])
        for file, start, stop in rows_of(long, records):
            assert any(f == file and a <= start and stop <= b for f, a, b, _ in reader.ranges)
            consumed.add((file, start))
        if not stream.traits.reads_blocks:
            most = 11 + 2 * stream.batch_size  # records: the bound, and the last to exceed it
            assert reader.bytes <= (len(consumed) + most) * RECORD + LOCAL_GAP * len(long)
    assert plan.next_step == len(stream)


@pytest.mark.parametrize("limit", [1, 20 * RECORD, 10**12])
def test_each_block_is_fetched_once_as_a_whole(limit: int, long: Index) -> None:
    """For any bound; the few ranges that a segment boundary cuts may be requested twice."""
    order = ShardShuffleSampler(long.shard_lengths, seed=0, block=10, window=4)
    plan, reader = recording(long, BatchSampler(order, batch_size=4), limit=limit)
    for step in range(50):
        reader.read(step)
        assert plan.next_step > step
    assert len(reader.ranges) <= 20
    assert reader.records == 200


def test_next_batch_is_fetched_for_any_limit(long: Index) -> None:
    """Else it would be read only when it is asked for."""
    plan, reader = recording(long, BatchSampler(RandomSampler(200, seed=0), batch_size=4), limit=1)
    for step in range(49):
        reader.read(step)
        assert plan.next_step == step + 2


def test_reused_image_is_fetched_once(long: Index) -> None:
    stream = BatchSampler(ReuseSampler(200, reuse=5, live=20, seed=0), batch_size=10)
    _, reader = recording(long, stream, limit=1)
    for step in range(len(stream)):
        reader.read(step)
    assert 200 * RECORD <= reader.bytes <= 240 * (RECORD + LOCAL_GAP)


def test_sequential_records_are_few_large_ranges(long: Index) -> None:
    _, reader = recording(long, BatchSampler(SequentialSampler(200), batch_size=4), limit=10**12)
    for step in range(50):
        reader.read(step)
    assert len(reader.ranges) <= 16
    assert reader.records == 200


def test_adjacent_rows_are_merged_up_to_a_gap_and_a_length() -> None:
    """Overlapping rows too, as hard links in a tar give them."""
    rows = np.zeros(6, [("offset", "<i8"), ("length", "<i8"), ("file", "<i4")])
    rows["offset"] = [0, 0, 10, 100 + LOCAL_GAP, 101 + 2 * LOCAL_GAP + 5, 0]
    rows["length"] = [5, 5, 90, 5, 1, 7]
    rows["file"] = [0, 0, 0, 0, 0, 1]
    steps = np.arange(6)[::-1]
    found = merge_rows(rows[::-1], NO_BLOCK, steps, LOCAL_GAP)[
        ["file", "start", "stop", "step"]
    ].tolist()
    gap = LOCAL_GAP
    want = [(0, 0, 105 + gap, 3), (0, 106 + 2 * gap, 107 + 2 * gap, 4), (1, 0, 7, 5)]
    assert found == want
    many = np.zeros(100, rows.dtype)
    many["offset"] = np.arange(100) * (MAX_RANGE_BYTES // 10)
    many["length"] = MAX_RANGE_BYTES // 10
    lengths = [stop - start for _, start, stop, *_ in merge_rows(many, 1, 1, LOCAL_GAP).tolist()]
    assert sum(lengths) == 100 * (MAX_RANGE_BYTES // 10)
    assert max(lengths) <= MAX_RANGE_BYTES + MAX_RANGE_BYTES // 10


def test_plan_without_limit_probes_disk_at_first_batch(long: Index) -> None:
    stream = BatchSampler(RandomSampler(200, seed=0), batch_size=1)
    plan, reader = recording(long, stream, limit=None, waiting=False)
    for step in range(200):
        reader.read(step)
    assert reader.fetched == []
    assert reader.probes == 1
    assert not plan.continue_at(200)
    plan, reader = recording(long, stream, limit=None)
    for step in range(200):
        reader.read(step)
    assert reader.ranges
    assert reader.probes == 1


def test_cold_pages_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as file:
        assert system.is_uncached(file.fileno(), 5000) in (False, None)
        os.fsync(file.fileno())
        if not hasattr(os, "posix_fadvise"):
            return
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if system.is_uncached(file.fileno(), 5000) is None:
            pytest.skip("this file system cannot tell")
        assert file.read(1) == b"\0"


def test_close_stops_the_readahead_thread(long: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[int] = []
    started, go_on = threading.Event(), threading.Event()

    def slow(fd: int, *_: Any) -> None:
        advised.append(fd)
        started.set()
        assert go_on.wait(20)

    monkeypatch.setattr(kernel_readahead, "advise", slow)
    reader = Reader(long)
    for _ in range(2):
        advised.clear()
        read_ahead(reader, [0, 50, 150])  # in three shards
        assert started.wait(20)
        read_ahead(reader, [60])
        closing = threading.Thread(target=reader.close)
        closing.start()
        while not reader._files().kernel_readahead._stopped:  # type: ignore[attr-defined]
            time.sleep(0.001)
        go_on.set()
        closing.join()
        assert len(advised) == 1
        assert not started_threads()
        started.clear()
        go_on.clear()
    go_on.set()
    advised.clear()
    read_ahead(reader, [0])
    thread = reader._files().kernel_readahead._thread  # type: ignore[attr-defined]
    _ = thread and thread.join()
    assert len(advised) == 1, "and nothing from before"


def test_memory_is_at_most_that_of_the_machine(long: Index) -> None:
    assert system.memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert not exceeds_memory(long)


def test_data_larger_than_memory_are_read_ahead_without_a_probe(
    long: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "memory", lambda: 300 * RECORD)
    assert exceeds_memory(long)
    stream = BatchSampler(RandomSampler(200, seed=0), batch_size=10)
    _, reader = recording(long, stream, limit=None, waiting=False)
    reader.read(0)
    assert reader.ranges


def batches(index: Index, order: Any, **options: Any) -> Iterator[Any]:
    with NumpyLoader(Feed(index, BatchSampler(order, batch_size=4)), **options) as loader:
        yield from loader


@pytest.mark.parametrize("readahead", [None, 0, 1, 10**9])
def test_missing_shard_raises_only_when_it_is_read(tmp_path: Path, readahead: int) -> None:
    """Nothing that can be read is lost, however far ahead it is looked."""
    tfrecords(tmp_path, shards=3, each=8)
    index = build_index(tmp_path / "*.tfrecord", tmp_path / "x.index")
    Path(index.root, index.shard_paths[2]).unlink()
    coming = batches(index, SequentialSampler(24), readahead=readahead)
    assert [next(coming)["id"].tolist()[0] for _ in range(4)] == [0, 4, 8, 12]
    with pytest.raises(FileNotFoundError, match="no such file any more"):
        next(coming)


@pytest.mark.parametrize("readahead", [0, 1000])
def test_sampler_error_is_raised_at_its_own_batch(long: Index, readahead: int) -> None:
    class Failing(RandomSampler):
        def draw(self, epoch: int, positions: Any) -> Any:
            if (positions >= 100).any():
                raise RuntimeError("no such position")
            return super().draw(epoch, positions)

    feed = Feed(long, BatchSampler(Failing(200, seed=0), batch_size=1))
    coming = iter(NumpyLoader(feed, prefetch=0, readahead=readahead))
    assert len([next(coming) for _ in range(60)]) == 60
    with pytest.raises(RuntimeError, match="no such position"):
        list(coming)


@pytest.mark.usefixtures("mapped_arrays")
def test_row_outside_its_shard_raises_when_it_is_read(tmp_path: Path) -> None:
    tfrecords(tmp_path, shards=1, each=8)
    index = build_index(tmp_path / "*.tfrecord", tmp_path / "x.index")
    rows = np.load(next(index.path.glob("columns-*/field-0.npy")), mmap_mode="r+")
    rows["length"][7] ^= np.int32(-1) << 31
    rows["length"][6] ^= np.int32(1) << 30
    rows.flush()
    again = open_index(index.path)
    ids, fields = np.arange(8), list(again.fields)[:1]
    (range_,) = ranges_of_records(again, fields, ids, ids, NO_BLOCK, LOCAL_GAP).tolist()
    row = again.rows(fields, np.array([5]))[0]
    assert range_[2:] == (row["offset"] + row["length"], NO_BLOCK, 5)


def test_shuffled_depends_on_index_and_options(long: Index, tmp_path: Path) -> None:
    order = shuffled(long, seed=3)
    assert repr(order) == repr(shuffled(long, seed=3))
    assert "200 blocks of 1, window=128" in repr(order)
    many = pack([{"x": bytes(8000)} for _ in range(12_500)], tmp_path, shards=3)["data"]
    assert "blocks of 64, window=128, sections=1" in repr(shuffled(many, seed=0))
    assert "blocks of 64, window=4, " in repr(shuffled(many, seed=0, memory=2_100_000))
    assert "window=126, sections=3" in repr(shuffled(many, seed=0, sections=3))
    with pytest.raises(ValueError, match="memory must be at least a block for each section"):
        shuffled(many, seed=0, memory=1000)


def test_shuffled_subset_has_its_own_blocks(tmp_path: Path) -> None:
    index = pack([{"x": bytes(1000)} for _ in range(4000)], tmp_path, shards=3)["data"]
    assert index.shard_lengths.tolist() == [1333, 1333, 1334]
    part = np.flatnonzero(np.arange(4000) % 5)
    order = shuffled(index, seed=3, records=part[::-1])
    blocks = ShardShuffleSampler([1066, 1066, 1068], seed=3, block=16, window=128)
    same = SubsetSampler(part, of=4000, order=blocks)
    assert repr(order) == repr(same)
    assert order.ids(1, np.arange(3200)).tolist() == same.ids(1, np.arange(3200)).tolist()
    found = plan(Feed(index, BatchSampler(order, batch_size=32)))
    assert found.requests < 400, "blocks, not records"


@pytest.mark.parametrize(
    "name", ["shards", "random", "shards-sections", "blocks-replaced", "exact-once"]
)
def test_next_epoch_is_fetched_before_it_begins(name: str, long: Index) -> None:
    """Once passes follow each other; each block once an epoch; an evaluation reads on nowhere."""
    stream = dict(CASES)[name]()
    plan, reader = recording(long, stream, limit=30 * RECORD)
    steps = len(stream)
    for epoch in range(4):
        if epoch:
            assert not plan.continue_at(epoch * steps + 1)
            assert not plan.continue_at((epoch + 1) * steps)
            assert plan.continue_at(epoch * steps)
        for step, ids in enumerate(stream.batches(epoch, 0, steps)):
            assert not plan.continue_at((epoch + 1) * steps)
            reader.read(epoch * steps + step)
            for row in rows_of(long, stream.records(ids[ids >= 0])):
                assert any(
                    row[0] == f and a <= row[1] and row[2] <= b for f, a, b, _ in reader.ranges
                )
        ahead = plan.next_step - (epoch + 1) * steps
        assert ahead >= 0
        assert (ahead > 0) == (epoch > 0 and name != "exact-once")
        assert ahead <= 70


@pytest.mark.parametrize("prefetch", [0, 2])
def test_reading_into_next_epoch_does_not_move_the_loader(
    prefetch: int, long: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions, states and batches are those of a loader that reads nothing ahead."""
    order = ShardShuffleSampler(long.shard_lengths, seed=0, block=10, window=4)
    sampler = BatchSampler(order, batch_size=20)
    feed = Feed(long, sampler)
    steps: list[int] = []
    monkeypatch.setattr(
        local.LocalFiles,
        "apply",
        lambda _self, event: steps.extend(event.ranges["step"]),
    )
    with NumpyLoader(feed, prefetch=prefetch, readahead=30 * RECORD) as loader:
        for epoch in (0, 1, 2, 9, 10):
            if epoch == 9:
                loader.set_epoch(9)
            ids = [batch["id"].tolist() for batch in loader]
            assert ids == [one.tolist() for one in sampler.batches(epoch, 0, 10)]
            assert (loader.epoch, loader.step) == (epoch + 1, 0)
            assert loader.state_dict()["fingerprint"] == sampler.fingerprint
            follows = epoch in (1, 2, 10)
            has_read_ahead = max(steps) >= 10 * (epoch + 1)
            # With a thread, the next epoch's batches may be begun already.
            assert has_read_ahead if follows else prefetch or not has_read_ahead
            assert max(steps) < 10 * (epoch + 2)
        assert not pickle.loads(pickle.dumps(loader.schedule))._chunks


@pytest.mark.parametrize(("limit", "least", "most"), [(None, 1000, 1300), (1 << 26, 2000, 3000)])
def test_plan_requests_at_most_a_thousand_small_ranges_ahead_unless_limit_is_set(
    tmp_path: Path, limit: int | None, least: int, most: int
) -> None:
    """More would keep the threads of requests so busy that the loop waits for the processor."""
    index = pack(({"x": bytes(5000)} for _ in range(3000)), tmp_path)["data"]
    kind, arguments = index.__reduce__()[:2]  # type: ignore[misc]
    remote = kind(arguments[0], "http://127.0.0.1:9", *arguments[2:])  # type: ignore[operator]
    stream = BatchSampler(RandomSampler(3000, seed=0), batch_size=50)
    plan = ReadPlan(remote, ["x"], Schedule(stream), 0, limit=limit)
    events = iter(lambda: list(plan.next_events(0)), [])
    fetches = [event for found in events for event in found if isinstance(event, Fetch)]
    assert least < sum(len(fetch.ranges) for fetch in fetches) <= most
