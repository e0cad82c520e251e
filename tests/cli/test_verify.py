"""`twinfeed verify`: indexes and shards, whatever is bad."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
from support.inside import main
from support.shards import flip, tars, tfrecords, write_tar

from twinfeed.loaders import ShardWarning, build_index, pack


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
    assert line.startswith("what to do: restore the shards; or twinfeed verify SHARDS")
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


def test_verify_takes_one_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several targets are shards: an index among them is an error that names it."""
    shards = [str(shard) for shard in tars(tmp_path)]
    build_index(shards, f"{tmp_path}/x.index")
    assert main(["verify", f"{tmp_path}/x.index", *shards, "-q"]) == 1
    out, error = capsys.readouterr()
    assert (out, error.count("x.index")) == ("", 1)
