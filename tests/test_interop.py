"""Indexes of other programs: written as those programs do, and read with care."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from format_help import write_records, write_tar

from twinfeed.loaders.errors import (
    IndexFormatError,
    UnsafeContentError,
)
from twinfeed.loaders.formats.interop import (
    read_wids,
    write_tfrecord2idx,
    write_wids,
)

RECORDS = (b"one", b"", b"three" * 50)


def index_like_dali(shard: Path) -> str:
    """Index a shard as the tool of DALI does: lengths believed, nothing checked."""
    lines = []
    with shard.open("rb") as file:
        while head := file.read(8):
            start = file.tell() - 8
            file.seek(4, 1)
            file.read(struct.unpack("<q", head)[0])
            file.read(4)
            lines.append(f"{start} {file.tell() - start}\n")
    return "".join(lines)


def test_tfrecord2idx_is_written_as_dali_writes_it(tmp_path: Path) -> None:
    shard, index = tmp_path / "a.tfrecord", tmp_path / "a.idx"
    write_records(shard, *RECORDS)
    assert write_tfrecord2idx(shard, index) == 3
    assert index.read_text() == index_like_dali(shard)


def test_tfrecord2idx_of_an_empty_shard(tmp_path: Path) -> None:
    write_records(tmp_path / "a")
    assert write_tfrecord2idx(tmp_path / "a", tmp_path / "i") == 0
    assert (tmp_path / "i").read_text() == ""


def two_shards(folder: Path) -> list[Path]:
    """Write two tar shards of two samples and one."""
    return [
        write_tar(folder / "a.tar", {"1.txt": b"one", "1.cls": b"1", "2.txt": b"two"}),
        write_tar(folder / "b.tar", {"3.txt": b"three"}),
    ]


def test_wids_is_written_with_sizes_sums_and_counts_and_read_back(tmp_path: Path) -> None:
    shards = two_shards(tmp_path)
    write_wids(shards, tmp_path / "index.json", name="pair")
    described = json.loads((tmp_path / "index.json").read_text())
    assert described["__kind__"] == "wids-shard-index-v1"
    assert described["wids_version"] == 1
    assert described["name"] == "pair"
    assert described["shardlist"][0] == {
        "url": "a.tar",
        "md5sum": hashlib.md5(shards[0].read_bytes()).hexdigest(),
        "nsamples": 2,
        "filesize": shards[0].stat().st_size,
    }
    found = read_wids(tmp_path / "index.json")
    assert found == [(str(shards[0]), 2), (str(shards[1]), 1)]


def write_index(folder: Path, shards: Any, **more: Any) -> Path:
    """Write a wids index by hand."""
    path = folder / "index.json"
    path.write_text(json.dumps({"wids_version": 1, "shardlist": shards, **more}))
    return path


def test_wids_without_sums_with_a_base_and_with_sets_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    two_shards(tmp_path / "sub")
    listed = [{"url": "a.tar", "nsamples": 2}]
    more = {"shardlist": [{"url": "b.tar", "nsamples": 1}]}
    index = write_index(tmp_path, listed, base="sub", datasets=[more])
    sub = tmp_path / "sub"
    assert read_wids(index) == [(f"{sub}/a.tar", 2), (f"{sub}/b.tar", 1)]


@pytest.mark.parametrize(
    "url", ["/etc/passwd", "../a.tar", "x/../../a.tar", "http://host/a.tar", "pipe:cat a.tar"]
)
def test_wids_paths_that_leave_the_folder_are_refused(url: str, tmp_path: Path) -> None:
    index = write_index(tmp_path, [{"url": url, "nsamples": 1}])
    with pytest.raises(UnsafeContentError, match="outside its folder"):
        read_wids(index)
    base, name = url.rsplit("/", 1) if "/" in url else ("pipe:", "a.tar")
    index = write_index(tmp_path, [{"url": name, "nsamples": 1}], base=base or "/")
    with pytest.raises(UnsafeContentError, match="outside its folder"):
        read_wids(index)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"{}",
        b'{"wids_version": 2, "shardlist": []}',
        b'{"wids_version": 1}',
        b'{"wids_version": 1, "shardlist": []}',
        b'{"wids_version": 1, "shardlist": 5}',
        b'{"wids_version": 1, "shardlist": ["a.tar"]}',
        b'{"wids_version": 1, "shardlist": [{"url": 1, "nsamples": 1}]}',
        b'{"wids_version": 1, "shardlist": [{"url": "a.tar"}]}',
        b'{"wids_version": 1, "shardlist": [{"url": "a.tar", "nsamples": "1"}]}',
        b'{"wids_version": 1, "datasets": 5, "shardlist": []}',
        b'{"wids_version": 1, "base": 5, "shardlist": [{"url": "a.tar", "nsamples": 1}]}',
        b'{"wids_version": 1, "datasets": [{"source_url": "x.json"}]}',
        b"[" * 100_000,
    ],
)
def test_wids_index_that_is_none_is_refused(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(text)
    with pytest.raises(IndexFormatError, match="unreadable wids index"):
        read_wids(tmp_path / "index.json")


def test_wids_shards_outside_the_folder_are_not_written(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / "sub").mkdir()
    with pytest.raises(ValueError, match="must lie below"):
        write_wids([tmp_path / "a.tar"], tmp_path / "sub" / "index.json")
    assert list((tmp_path / "sub").iterdir()) == []
