"""`twinfeed plan` on an index, with its shards or without."""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec
import pytest
from support.inside import main

from twinfeed.loaders import pack


def test_plan_compares_blocks_with_uniform_shuffle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = pack([{"x": bytes(1000)} for _ in range(600)], tmp_path)["data"]
    fsspec.filesystem("memory").put(f"{tmp_path}/", "/plan", recursive=True)
    assert main(["plan", str(index.path), "--root", "memory://plan", "--batch-size", "10"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("uniform: an epoch of 60 batches")  # the shuffle to take is last
    assert "\nblocks of 4, 128 at once: an epoch of 60 batches, 600 samples\n" in said
    assert main(["plan", str(index.path), "--block", "50", "--window", "3"]) == 0
    assert "blocks of 50, 3 at once" in capsys.readouterr().out


def test_plan_needs_no_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The index alone says how long shards and records are."""
    index = pack([{"x": bytes(1000)}] * 90, tmp_path / "data")["data"]
    assert main(["plan", str(index.path)]) == 0
    with_shards = capsys.readouterr().out
    copied_index = shutil.copytree(index.path, tmp_path / "elsewhere" / "data.index")
    assert main(["plan", str(copied_index)]) == 0
    assert capsys.readouterr().out == with_shards
    assert main(["cat", str(copied_index), "0"]) == 1  # which needs the shards
