"""`twinfeed info`: what an index holds, and the options that it was built with."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.inside import main
from support.shards import tars

from twinfeed.loaders import build_index


def test_info_describes_index_with_changed_shard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shard,) = tars(tmp_path, shards=1)
    index = f"{tmp_path}/x.index"
    build_index(shard, index, label="cls", missing="skip", max_record_bytes=10**6)
    line = "options: container='tar', missing='skip', max_record_bytes=1000000, "
    line += "label_from='field', label='cls'\n"
    assert main(["info", index]) == 0
    assert line in capsys.readouterr().out
    shard.write_bytes(shard.read_bytes() + b"more")
    assert main(["info", index]) == 1
    out, error = capsys.readouterr()
    name = "d-000000.tar"
    assert out.startswith("10 records in 1 shard, 10 records per shard\n")
    assert f"\nshards: {name} to {name}\n" in out
    assert "\n7 classes, 1 to 2 records per class" in out
    assert out.endswith(line)
    assert "with the same options as before (`twinfeed info` prints them)" in error


def test_info_counts_classes_without_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shard,) = tars(tmp_path, shards=1)
    classes = [str(number) for number in range(9)]
    build_index(shard, tmp_path / "x.index", label="cls", classes=classes)
    assert main(["info", f"{tmp_path}/x.index"]) == 0
    out = capsys.readouterr().out
    assert "\n7 classes (num_classes=9), 1 to 2 records per class" in out
    assert "\nclass names: 0, 1, 2, 3, 4, 5, 6, 7, 8\n" in out


def test_info_counts_the_bytes_of_loose_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for n in range(1, 4):
        (tmp_path / f"{n}.png").write_bytes(bytes(n))
    build_index(tmp_path, tmp_path / "x.index")
    assert main(["info", str(tmp_path / "x.index")]) == 0
    assert "image: bytes, 1 to 3 bytes per record, 6 bytes in total\n" in capsys.readouterr().out
