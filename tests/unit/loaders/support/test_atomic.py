"""Whatever an output path names stays as it is, unless it is an older output of the same kind."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.shards import tfrecords

from twinfeed.loaders import Results, build_index, verify
from twinfeed.loaders.command_line import main
from twinfeed.loaders.formats import TarWriter, TFRecordWriter

Write = Callable[[Path], object]


def write_bad_list(path: Path) -> None:
    verify(tfrecords(path.parent, shards=1), bad_list=path)


def write_results(path: Path) -> None:
    results = Results(2)
    results.add(np.arange(2), score=np.ones(2))
    results.save(path)


def write_picture(path: Path) -> None:
    file = path.parent / "looks.py"
    file.write_text(
        "import numpy as np\nfrom twinfeed import *\n"
        "sampler = BatchSampler(SequentialSampler(2), batch_size=2)\n"
        "feed = Feed({'image': np.zeros((2, 4, 4), np.uint8)}, sampler)\n"
    )
    if main(["show", "--feed", f"{file}:feed", "--out", str(path)]) != 0:
        raise FileExistsError


def write_index(path: Path) -> None:
    build_index(tfrecords(path.parent, shards=1), path)


def write_shard(writer: Any) -> Write:
    def write(path: Path) -> None:
        with writer(path) as shard:
            shard.write(*(["k", {"txt": b"x"}] if writer is TarWriter else [b"x"]))

    return write


WRITERS: dict[str, Write] = {
    "bad.jsonl": write_bad_list,
    "r.npz": write_results,
    "m.png": write_picture,
    "m.svg": write_picture,
    "x.index": write_index,
    "a.tar": write_shard(TarWriter),
    "a": write_shard(TFRecordWriter),
}


def make_socket(path: Path) -> None:
    os.chdir(path.parent)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


OBSTACLES: dict[str, Write] = {
    "fifo": os.mkfifo,
    "socket": make_socket,
    "device": lambda path: path.symlink_to("/dev/null"),
    "dangling link": lambda path: path.symlink_to(path.parent / "missing"),
    "link": lambda path: path.symlink_to(path.parent / "own"),
    "program": lambda path: path.write_text("import twinfeed\n"),
    "manifest": lambda path: path.write_text('{"shard": "a.tar", "records": 7}\n'),
}


def identity(path: Path) -> tuple[int, bytes]:
    """Return what replacing or writing `path` would change."""
    return path.lstat().st_ino, path.read_bytes() if path.is_file() else b""


# Pictures need matplotlib, which an environment without frameworks lacks, too.
PICTURES = {"m.png", "m.svg"}
NAMES = [
    pytest.param(name, marks=[pytest.mark.frameworks] if name in PICTURES else [])
    for name in WRITERS
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_only_an_older_output_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, obstacle: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write, path = WRITERS[name], tmp_path / name
    if obstacle == "link" and name != "x.index":  # an index may lie behind the link of a folder
        write(path)
        path.rename(tmp_path / "own")
    OBSTACLES[obstacle](path)
    before = identity(path)
    with pytest.raises(FileExistsError if name != "x.index" else OSError):
        write(path)
    assert identity(path) == before
    assert not (tmp_path / "missing").exists()
    path.unlink()
    write(path)
    write(path)  # an older output may be replaced
    assert not list(tmp_path.glob(f".{name}-*"))


def test_empty_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "r.npz").touch()
    write_results(tmp_path / "r.npz")
    assert Results.load(tmp_path / "r.npz").gather()["score"].tolist() == [1, 1]


def test_link_in_an_index_is_kept(tmp_path: Path) -> None:
    index = build_index(tfrecords(tmp_path, shards=1), tmp_path / "x.index")
    for file in (index.path / "manifest.json", next(index.path.glob("columns-*/*.npy"))):
        file.rename(tmp_path / "moved")
        file.symlink_to(tmp_path / "moved")
        with pytest.raises(FileExistsError, match="not a regular file, so it is kept"):
            build_index(tfrecords(tmp_path, shards=1), index.path)
        assert file.is_symlink()
        os.replace(tmp_path / "moved", file)


def test_bad_list_whose_file_was_forgotten_replaces_no_shard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = tfrecords(tmp_path, shards=3)
    before = [shard.read_bytes() for shard in shards]
    assert main(["verify", "-q", "--bad-list", *map(str, shards)]) == 1
    assert f"{shards[0]}: it exists and is not a bad list" in capsys.readouterr().err
    assert [shard.read_bytes() for shard in shards] == before


@pytest.mark.parametrize("name", ["a.tfrecord", "a.tar"])
def test_shard_without_records_is_a_finding(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(bytes(10240 if name == "a.tar" else 0))
    report = verify(tmp_path / name)
    assert not report.ok
    assert str(report.findings[0]).endswith("it has no records")
