"""The reader: any ids in any order, through few files, from threads, processes and far away."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import read_ahead
from support.inside import StoredFields, few_open_files
from support.servers import RangeServer
from support.shards import numbered, tars, tfrecords, total_bytes, write_tar

from twinfeed.loaders import (
    Index,
    IndexFormatError,
    LoaderError,
    Reader,
    StaleIndexError,
    TruncatedShardError,
    UnsafeContentError,
    build_index,
    open_index,
    pack,
    verify,
)
from twinfeed.loaders.building import sources
from twinfeed.loaders.formats.files import Entry
from twinfeed.loaders.index import arrays
from twinfeed.loaders.reading import local
from twinfeed.loaders.reading.local import is_near_previous
from twinfeed.loaders.support.limits import Limits

WANT = [sample["image"] for sample in numbered(0, 200)]

KEYS = [sample["key"].encode() for sample in numbered(0, 200)]


@settings(max_examples=60)
@given(
    ids=st.lists(st.integers(0, 199), max_size=60)
    | st.integers(0, 180).map(lambda n: list(range(n, n + 20))),
    files=st.integers(1, 8),
    verify=st.booleans(),
)
def test_ids_in_any_order_equal_single_reads(
    index: Index, ids: list[int], files: int, verify: bool
) -> None:
    index = open_index(index.path, checksums=verify)
    with few_open_files(files), Reader(index) as reader:
        got = reader.read(np.array(ids, np.int64))
    assert got["image"] == [WANT[n] for n in ids]
    assert got["key"] == [KEYS[n] for n in ids]


def test_repeated_record_is_read_once_and_neighbours_together(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    pread = os.pread

    def counted(fd: int, length: int, offset: int) -> bytes:
        reads.append(length)
        return pread(fd, length, offset)

    monkeypatch.setattr(local.os, "pread", counted)
    with Reader(index) as reader:
        assert reader.read([7, 150, 7, 7], ["image"])["image"] == [WANT[n] for n in (7, 150, 7, 7)]
        assert len(reads) == 2
        reads.clear()
        reader.read(range(40))
        assert len(reads) == 1


def test_fields_and_columns_come_in_requested_order(index: Index) -> None:
    with Reader(index) as reader:
        got = reader.read([3, 1], ["label", "image", "key"])
        assert list(got) == ["label", "image", "key"]
        assert got["label"] == [3, 1]
        assert reader.read([], ["image"]) == {"image": []}
        assert reader.read([3], []) == {}


def test_threads_share_a_reader(tmp_path: Path) -> None:
    """With files opened and closed under each other's hands, every thread still gets its bytes."""
    index = build_index(tfrecords(tmp_path, shards=12, each=20), tmp_path / "x.index")
    want = [sample["image"] for sample in numbered(0, 240)]
    index.checksums = False
    with few_open_files(3), Reader(index) as reader:

        def one(seed: int) -> bool:
            ids = np.random.default_rng(seed).integers(0, 240, 50)
            return reader.read(ids, ["image"])["image"] == [want[n] for n in ids]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(one, range(200)))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_reader_works_in_other_processes(index: Index, method: str) -> None:
    want = sum(map(len, WANT))
    with Reader(index) as reader:
        assert total_bytes(reader) == want
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.map_async(total_bytes, [reader] * 4).get(60) == [want] * 4


def test_forked_child_does_not_wait_for_a_lock_of_its_parent(index: Index) -> None:
    with Reader(index) as reader:
        reader.read([0])
        lock = reader._files().handles._lock  # type: ignore[attr-defined]
        with lock:
            child = os.fork()
            if child == 0:
                signal.alarm(10)
                os._exit(0 if reader.read([0], ["image"])["image"] == WANT[:1] else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_reading_ahead_does_not_change_results(index: Index) -> None:
    with Reader(index) as reader:
        read_ahead(reader, [5, 3, 199], ["image", "label"])
        read_ahead(reader, [])
        assert reader.read([5], ["image"])["image"] == [WANT[5]]


@pytest.fixture
def memory() -> Any:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/bucket", recursive=True)


def upload(memory: Any, paths: list[Path]) -> None:
    for path in paths:
        memory.pipe_file(f"/bucket/{path.name}", path.read_bytes())


def test_remote_shards_are_indexed_and_read_by_ranges(tmp_path: Path, memory: Any) -> None:
    upload(memory, tfrecords(tmp_path, shards=3, each=10))
    index = build_index(
        [f"memory://bucket/d-{n:05d}-of-00003.tfrecord" for n in range(3)], tmp_path / "x.index"
    )
    assert index.root == "memory://bucket"
    again = open_index(index.path, root="memory://bucket")
    assert verify(again).ok
    with Reader(again) as reader:
        assert reader.read([29, 3, 3, 4], ["image"])["image"] == [WANT[n] for n in (29, 3, 3, 4)]
        read_ahead(reader, [1])
    with Reader(pickle.loads(pickle.dumps(again))) as reader:
        assert reader.read([29], ["image"])["image"] == [WANT[29]]


def test_remote_shards_are_named_by_a_glob(tmp_path: Path, memory: Any) -> None:
    upload(memory, tars(tmp_path))
    index = build_index("memory://bucket/*-00000{0,2}.t*", tmp_path / "x.index")
    assert index.keys([0, 19]) == ["k0", "k29"]
    with Reader(index) as reader:
        assert len(reader.read(range(20))["png"]) == 20


def test_file_url_equals_path(tmp_path: Path) -> None:
    tars(tmp_path)
    for name in ("d-000000.tar", "*.tar"):
        index = build_index(f"file://{tmp_path}/{name}", tmp_path / "x.index")
        assert index.root == f"file://{tmp_path}"
        with Reader(index) as reader:
            assert reader.read([3], ["png"])["png"] == [b"000003" * 3]


def test_changed_remote_shard_is_refused(tmp_path: Path, memory: Any) -> None:
    shards = tars(tmp_path, shards=1)
    upload(memory, shards)
    index = build_index(["memory://bucket/d-000000.tar"], tmp_path / "x.index")
    data = bytearray(shards[0].read_bytes())
    offset = int(index.table("png")["offset"][4])
    data[offset] ^= 1
    memory.pipe_file("/bucket/d-000000.tar", bytes(data))
    with Reader(index) as reader:
        reader.read([3])
        with pytest.raises(ValueError, match="corrupted bytes"):
            reader.read([3, 4])
    index.checksums = False
    with Reader(index) as reader:
        reader.read([3])
        memory.pipe_file("/bucket/d-000000.tar", bytes(data[: offset + 1]))
        with pytest.raises(TruncatedShardError):
            reader.read([4], ["png"])
    memory.pipe_file("/bucket/d-000000.tar", bytes(data) + b"more")
    index = open_index(index.path, root="memory://bucket")
    with Reader(index) as reader, pytest.raises(StaleIndexError):
        reader.read([3])


def test_missing_field_is_none_and_an_error_of_a_feed_that_names_the_record(
    tmp_path: Path,
) -> None:
    write_tar(tmp_path / "a.tar", [("a", {"jpg": b"1", "txt": b"x"}), ("b", {"jpg": b"2"})])
    index = build_index(tmp_path / "a.tar", tmp_path / "x.index")
    assert index.fields["txt"].missing == 1
    with Reader(index) as reader:
        assert reader.read([1, 0], ["jpg"])["jpg"] == [b"2", b"1"]
        assert reader.read([0, 1], ["txt", "jpg"]) == {"txt": [b"x", None], "jpg": [b"1", b"2"]}
        stored = StoredFields(index, ("txt", "jpg"))
        with pytest.raises(LoaderError, match=r"record 1 \(a.tar, number 1.*'b'\) lacks .*'txt'"):
            stored.read(reader, np.array([0, 1]))


@pytest.mark.usefixtures("mapped_arrays")
def test_row_with_wrong_file_number_is_an_index_error(tmp_path: Path) -> None:
    """A bit of a large table flipped on the disk: opening checks only sizes, reading finds it."""
    (tmp_path / "to.txt").write_bytes(b"to")
    index = build_index([Entry("to", {"word": "to.txt"})], tmp_path / "x.index")
    (table,) = index.path.glob("columns-*/field-0.npy")
    rows = np.load(table, mmap_mode="r+")
    rows["file"] = 7
    rows.flush()
    message = r"a file number below 1\n  found: 7\n  what to do: "
    with Reader(open_index(index.path)) as reader, pytest.raises(IndexFormatError, match=message):
        reader.read([0])
    with pytest.raises(IndexFormatError, match="field-0 does not match its digest"):
        verify(open_index(index.path))


def test_short_preads_are_continued(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """One os.pread gives at most 2 GiB."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 3), at))
    for ids in ([7, 150], range(40)):
        with Reader(index) as reader:
            assert reader.read(ids, ["image"])["image"] == [WANT[n] for n in ids]


@pytest.mark.parametrize("container", ["tar", "files"])
def test_shard_replaced_by_special_file_is_refused_at_once(tmp_path: Path, container: str) -> None:
    """Opening a FIFO waits for a writer, and a device may never end."""
    (tmp_path / "images" / "c").mkdir(parents=True)
    (tmp_path / "images" / "c" / "1.png").write_bytes(b"png")
    source = tmp_path / "images" if container == "files" else tars(tmp_path, shards=1)[0]
    index = build_index(source, tmp_path / "x.index")
    file = tmp_path / index.files[0]
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        file.unlink()
        make(file)
        refused = "not a regular file|leads out of its folder|leaves its root"
        with Reader(index) as reader, pytest.raises(LoaderError, match=refused):
            reader.read([0])


@pytest.mark.parametrize("container", ["tar", "files"])
def test_link_out_of_the_root_is_not_followed(tmp_path: Path, container: str) -> None:
    root = tmp_path / "root"
    (root / "images" / "c").mkdir(parents=True)
    (root / "images" / "c" / "1.png").write_bytes(b"png")
    source = root / "images" if container == "files" else tars(root, shards=1)[0]
    index = build_index(source, root / "x.index")
    file = root / index.files[0]
    file.rename(tmp_path / "secret")
    file.symlink_to(tmp_path / "secret")
    with Reader(index) as reader, pytest.raises(UnsafeContentError):
        reader.read([0])
    with pytest.raises(UnsafeContentError):
        build_index(source, root / "y.index")
    file.unlink()
    (tmp_path / "secret").rename(root / "real")
    file.symlink_to(root / "real")
    with Reader(index) as reader:
        assert len(reader.read([0])["image" if container == "files" else "png"]) == 1


def test_batch_larger_than_its_shards_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where all rows of a hostile index are of one large record."""
    samples = [{"x": bytes(1 << 23)}] + [{"x": b"x"}] * 99
    index = pack(samples, tmp_path / "a", container="tar")["data"]
    (file,) = index.path.glob("columns-*/field-0.npy")
    rows = np.load(file, mmap_mode="r+")
    rows[:] = rows[0]
    rows.flush()
    monkeypatch.setattr(arrays.Arrays, "_check_digest", lambda *_: None)
    with Reader(open_index(index.path)) as reader:
        with pytest.raises(LoaderError, match="a batch has too many bytes") as caught:
            reader.read(range(9))
        assert caught.value.found == f"{9 << 23} bytes"
        assert len(reader.read([5] * 99)["x"]) == 99  # reads it once


def test_download_stops_at_download_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LIMITS", Limits(download_bytes=1 << 20))
    (shard,) = tars(tmp_path, shards=1)
    os.truncate(shard, 1 << 26)
    with RangeServer(tmp_path) as server:
        with pytest.raises(LoaderError, match="a file is too large") as caught:
            build_index(f"{server.url}/{shard.name}", tmp_path / "x.index")
        assert server.sent < 1 << 25
    assert caught.value.expected == "at most 1048576 bytes"


def test_rows_in_one_file_within_the_gap_are_near() -> None:
    dtype = [("file", np.int64), ("offset", np.int64), ("length", np.int64)]
    places = [(0, 0, 10), (0, 4106, 10), (0, 8213, 10), (1, 8223, 10), (1, 8233, 1 << 15)]
    assert is_near_previous(np.array(places, dtype)).tolist() == [True, False, False, False]
