"""Shards and files that change, shrink or go after they were indexed, also while they are read."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.inside import (
    REBUILD,
)
from support.shards import (
    flip,
    numbered,
    tfrecords,
    write_tfrecord,
)

from twinfeed.loaders import (
    DataCorruptionError,
    Index,
    Reader,
    StaleIndexError,
    TruncatedShardError,
    build_index,
    open_index,
    verify,
)


def test_fault_29_shard_changed_after_indexing_is_refused(index: Index) -> None:
    shard = Path(index.root, index.shard_paths[2])
    with open(shard, "ab") as file:
        file.write(b"more")
    with pytest.raises(StaleIndexError, match="the file has changed since") as caught:
        open_index(index.path)
    size = shard.stat().st_size
    assert caught.value.path == str(shard)
    assert (caught.value.expected, caught.value.found) == (f"{size - 4} bytes", f"{size} bytes")
    assert REBUILD in str(caught.value)
    with Reader(index) as reader, pytest.raises(StaleIndexError, match="has changed"):
        reader.read([29])


def test_fault_29_shard_of_same_size_with_other_records_is_refused(tmp_path: Path) -> None:
    shard = write_tfrecord(tmp_path / "a.tfrecord", numbered(0, 10))
    index = build_index(shard, tmp_path / "x.index")
    size = shard.stat().st_size
    samples = numbered(0, 10)
    write_tfrecord(shard, [samples[1], samples[0], *samples[2:]])
    assert shard.stat().st_size == size
    again = open_index(index.path)  # the size tells nothing
    with Reader(again) as reader:
        reader.read([5])
        with pytest.raises((DataCorruptionError, StaleIndexError)):
            reader.read([0])
    assert [bad.record for bad in verify(again).findings] == [0, 1]


def test_fault_29_changed_loose_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "images" / "c" / "a.png"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"12345")
    index = build_index(tmp_path / "images", tmp_path / "x.index")
    file.write_bytes(b"123456")
    with Reader(index) as reader:
        with pytest.raises(StaleIndexError, match="the file has changed"):
            reader.read([0])
        file.write_bytes(b"12354")
        with pytest.raises(DataCorruptionError, match=r"a\.png"):
            reader.read([0])
    assert [bad.record for bad in verify(index).findings] == [0]


@pytest.mark.parametrize("workers", [0, 2])
def test_fault_30_verify_reports_missing_and_changed_shards(tmp_path: Path, workers: int) -> None:
    shards = tfrecords(tmp_path, shards=4)
    index = build_index(shards, tmp_path / "x.index")
    flip(shards[3], int(index.table("image")["offset"][35]))
    size = shards[0].stat().st_size
    os.truncate(shards[0], size - 1)
    shards[1].unlink()
    with ThreadPoolExecutor(2) as pool:
        report = verify(index.path, executor=pool if workers else None)
    assert (report.shards, report.records) == (4, 40)
    assert [
        (bad.shard, bad.record, bad.problem.partition(" at")[0]) for bad in report.findings
    ] == [
        (
            shards[0].name,
            -1,
            f"the file has changed since it was indexed: {size - 1} bytes, not {size} bytes",
        ),
        (shards[1].name, -1, "no such file any more: restore the file, or build the index again"),
        (shards[3].name, 5, "corrupted bytes in field 'image'"),
    ]
    plain = verify(shards, root=tmp_path).findings
    assert [bad.shard for bad in plain] == [shards[0].name, shards[1].name, shards[3].name]


def test_fault_30_verify_reports_missing_and_changed_loose_files(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "images" / "c"
    folder.mkdir(parents=True)
    for n in range(5):
        (folder / f"{n}.png").write_bytes(b"12345")
    index = build_index(tmp_path / "images", tmp_path / "x.index")
    (folder / "1.png").unlink()
    (folder / "2.png").write_bytes(b"123456")
    (folder / "4.png").write_bytes(b"54321")
    report = verify(index)
    assert [
        (bad.shard, bad.record, bad.problem.partition(" in field")[0]) for bad in report.findings
    ] == [
        (
            str(folder / "1.png"),
            -1,
            "no such file any more: restore the file, or build the index again",
        ),
        (
            str(folder / "2.png"),
            -1,
            "the file has changed since it was indexed: 6 bytes, not 5 bytes",
        ),
        ("files-00000", 4, "corrupted bytes"),
    ]
    with Reader(index) as reader, pytest.raises(DataCorruptionError) as caught:
        reader.read([4])
    assert caught.value.offset is None, "a field is a whole file"


def test_fault_30_loose_files_in_another_folder_are_missed_on_open(tmp_path: Path) -> None:
    """Opening names root=, as it does for shards. A single missing file is missed when read."""
    folder = tmp_path / "photos" / "c"
    folder.mkdir(parents=True)
    for n in range(3):
        (folder / f"{n}.png").write_bytes(b"12345")
    path = tmp_path / "kept" / "x.index"
    path.parent.mkdir()
    build_index(tmp_path / "photos", path, root=tmp_path)
    with pytest.raises(FileNotFoundError, match="give root= the folder") as caught:
        open_index(path)
    assert caught.value.filename == str(path.parent)
    (folder / "1.png").unlink()
    with Reader(open_index(path, root=tmp_path)) as reader:
        assert reader.read([2])["image"] == [b"12345"]


def test_fault_31_shard_deleted_while_reading_is_named(index: Index) -> None:
    """Open files go on; a file to be opened is missed."""
    with Reader(index) as reader:
        reader.read([0])
        for name in index.shard_paths.tolist():
            Path(index.root, name).unlink()
        assert reader.read([5], ["image"])["image"] == [numbered(5, 6)[0]["image"]]
        gone = r"no such file any more: restore the file, or build the index again: '.*tfrecord'"
        with pytest.raises(FileNotFoundError, match=gone):
            reader.read([15])
        reader.close()
        with pytest.raises(FileNotFoundError, match=gone):
            reader.read([0])


def test_fault_56_shard_that_shrinks_while_reading_is_refused(index: Index) -> None:
    """An error, where a mapped file would kill the process."""
    with Reader(index) as reader:
        reader.read([10])
        os.truncate(Path(index.root, index.shard_paths[1]), 100)
        with pytest.raises(TruncatedShardError, match="the shard ends within field 'image'"):
            reader.read([19], ["image"])
    index.checksums = False
    with Reader(index) as reader, pytest.raises(StaleIndexError):
        reader.read([19], ["image"])


def test_shard_replaced_by_rename_while_reading_is_refused(index: Index) -> None:
    """An open shard is the old file, whose bytes are right. A new reader refuses the new file."""
    shard = Path(index.root, index.shard_paths[1])
    other = write_tfrecord(shard.with_suffix(".new"), reversed(numbered(10, 20)))
    assert other.stat().st_size == shard.stat().st_size
    with Reader(index) as reader:
        before = reader.read(range(10, 20))
        os.replace(other, shard)
        assert reader.read(range(10, 20)) == before
    with Reader(index) as reader, pytest.raises(DataCorruptionError):
        reader.read(range(10, 20))
    shutil.copy(Path(index.root, index.shard_paths[0]), other)
    with other.open("ab") as file:
        file.write(b"more")
    os.replace(other, shard)
    with Reader(index) as reader, pytest.raises(StaleIndexError):
        reader.read(range(10, 20))
