"""`twinfeed verify`: indexes and shards, whatever is bad."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
from support.inside import main
from support.shards import flip, tars, tfrecords, write_tar

from twinfeed.loaders import ShardWarning, build_index, pack


def test_verify_checks_each_index_alone_and_shards_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = [str(shard) for shard in tars(tmp_path)]
    one, two = f"{tmp_path}/1.index", f"{tmp_path}/2.index"
    build_index(shards[0], one)
    offset = int(build_index(shards[1:], two).table("png")["offset"][3])
    flip(Path(shards[1]), offset)
    assert main(["verify", one, two, *shards, "--root", str(tmp_path), "-q"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{one}: 10 records in 1 shard: all is well"
    assert "d-000001.tar, record 3: corrupted" in out[1]
    assert out[2:4] == [
        f"{two}: 20 records in 2 shards: 1 bad",
        "30 records in 3 shards: all is well",  # a tar has no checksum of its members
    ]
    assert out[4].startswith("what to do: restore the shards")
    assert main(["verify", one, two, "--bad-list", f"{tmp_path}/bad", "-q"]) == 2
    assert "--bad-list takes one index, or shards" in capsys.readouterr().err


def test_verify_reports_changed_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shard is cut, and another has a bad record: the advice leads to an index."""
    monkeypatch.chdir(tmp_path)
    cut, flipped = tfrecords(tmp_path, shards=2)
    build_index("d-*.tfrecord", "x.index")
    os.truncate(cut, cut.stat().st_size - 5)
    flip(flipped, 20)
    assert main(["verify", "x.index", "--bad-list", "bad.jsonl", "-q"]) == 1
    (line,) = capsys.readouterr().out.splitlines()[3:]
    assert line.startswith("what to do: restore what is missing or has changed")
    assert main(["verify", "d-*.tfrecord", "--bad-list", "bad.jsonl", "-q"]) == 1
    assert main(["index", "d-*.tfrecord", "--out", "x.index", "--exclude", "bad.jsonl", "-q"]) == 0
    assert main(["verify", "x.index", "-q"]) == 0


@pytest.mark.parametrize("kind", ["shards", "images"])
def test_verify_finds_targets_in_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    for name in ("here", "data/a", "data/b", "images/x"):
        (tmp_path / name).mkdir(parents=True)
    shards = [tmp_path / "data" / "a" / "1.tar", tmp_path / "data" / "b" / "2.tar"]
    for shard in shards:
        write_tar(shard, [("k", {"txt": b"..."})])
    (tmp_path / "images" / "x" / "1.png").write_bytes(b"...")
    targets = {
        "shards": list(map(str, shards)),
        "images": [f"{tmp_path}/images"],
    }
    monkeypatch.chdir(tmp_path / "here")
    assert main(["verify", *targets[kind], "-q"]) == 0
    assert "all is well" in capsys.readouterr().out


def test_folder_without_data_is_one_line_of_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pack([{"a": 1}], "out")
    (tmp_path / "empty").mkdir()
    for command in (["verify"], ["index", "--out", "x.index"]):
        for folder in ("out", "empty"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ShardWarning)
                assert main([*command, folder, "-q"]) == 1
            out, error = capsys.readouterr()
            assert out == ""
            assert f"below the folder '{folder}': give a folder that" in error.splitlines()[-1]
    assert main(["verify", "out/data.index", "--bad-list", "/proc/bad", "-q"]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error == "twinfeed: error: /proc/bad: No such file or directory\n"


def test_verify_continues_to_last_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = tars(tmp_path, shards=4)
    made = [f"{tmp_path}/{n}.index" for n in range(3)]
    for index, shard in zip(made, shards, strict=False):
        build_index(shard, index)
    shards[0].unlink()
    (column,) = Path(made[1]).glob("columns-*/shards.npy")
    flip(column, column.stat().st_size - 1)
    root = ["--root", str(tmp_path), "-q"]
    assert main(["verify", *made, str(shards[0]), str(shards[3]), *root]) == 1
    out, error = capsys.readouterr()
    assert [line.split(": ")[2] for line in error.splitlines()] == [
        str(tmp_path),
        "damaged index",
    ]
    assert out.splitlines()[:3] == [
        f"{made[2]}: 10 records in 1 shard: all is well",
        f"{shards[0].name}: No such file or directory",
        "10 records in 2 shards: 1 bad",
    ]
    assert out.splitlines()[3].startswith("what to do: restore what is missing or has changed")
    assert len(out.splitlines()) == 4
