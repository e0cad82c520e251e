"""`twinfeed pack`: sizes, roots, and a folder only if it succeeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.inside import _parser, main
from support.shards import tars

from twinfeed.loaders import build_index


def test_sizes_take_units() -> None:
    for text, size in [("7", 7), ("2k", 2000), ("3MB", 3 * 10**6), ("4g", 4 * 10**9)]:
        assert _parser().parse_args(["pack", "x", "y", "--shard-bytes", text]).shard_bytes == size
    assert _parser().parse_args(["pack", "x", "y", "--shard-bytes", "2T"]).shard_bytes == 2 * 10**12


def test_failed_pack_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a/1.png", "b/1.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True)
        (tmp_path / "images" / name).write_bytes(b"...")
    pack_it = ["pack", str(tmp_path / "images"), str(tmp_path / "out"), "-q"]
    assert main([*pack_it, "--split", "a=1", "--seed", "1"]) == 2
    assert not (tmp_path / "out").exists()
    (tmp_path / "images" / "top.png").write_bytes(b"...")
    assert main(pack_it) == 1
    assert "a record lacks a label" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    assert main(pack_it) == 1
    assert (tmp_path / "out").exists()


def test_pack_takes_root_of_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "far").mkdir()
    build_index(tars(tmp_path / "far"), tmp_path / "x.index", root=tmp_path / "far")
    root = ["--root", str(tmp_path / "far")]
    words = ["pack", str(tmp_path / "x.index"), str(tmp_path / "out"), "-q"]
    assert main([*words, *root]) == 0
    assert capsys.readouterr().out.endswith("data.index: 30 records, 1 shard\n")
