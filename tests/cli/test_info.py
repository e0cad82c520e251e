"""`twinfeed info`: what an index holds, and the options that build it again."""

from __future__ import annotations

import json
import shlex
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.cases import mark_long
from support.inside import main
from support.servers import RangeServer
from support.shards import tars, tfrecords

from twinfeed.loaders import build_index, open_index, pack


def test_info_describes_index_with_changed_shard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shard,) = tars(tmp_path, shards=1)
    index = f"{tmp_path}/x.index"
    build_index(shard, index, label="cls", missing="skip", max_record_bytes=10**6)
    line = "built with: --container tar --max-record-bytes 1000000 --missing skip --label cls\n"
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


@pytest.mark.parametrize(
    "options",
    [
        ["--container", "tar", "--label-json", "json:object.name"],
        ["--incomplete", "--container", "tar", "--label", "cls"],
        ["--background", "none", "--container", "tar", "--label", "txt"],
        ["--background", "b", "--container", "tar", "--field", "x=jpg;png", "--label-folder"],
        ["--container", "tar", "--label-file", r"(\d+)\.tar$"],
        ["--container", "tar", "--label-table", "CSV"],
    ],
)
def test_info_prints_options_of_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    shards = [str(shard) for shard in tars(tmp_path)]
    table = tmp_path / "CSV"
    table.write_text("".join(f"k{n},t{n % 2}\n" for n in range(30)))
    given = [str(table) if word == "CSV" else word for word in options]
    out = str(tmp_path / "x.index")
    assert main(["index", *shards, "--out", out, *given, "-q"]) == 0
    capsys.readouterr()
    assert main(["info", out]) == 0
    assert f"built with: {shlex.join(options)}\n" in capsys.readouterr().out


def test_info_prints_root_and_exclude(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = tfrecords(tmp_path, shards=1)[0].name
    listed = tmp_path / "bad.jsonl"
    listed.write_text(json.dumps({"shard": shard, "record": 3}) + "\n")
    with RangeServer(tmp_path) as server:
        build_index(f"{server.url}/{shard}", tmp_path / "x.index", exclude=listed)
        assert main(["info", str(tmp_path / "x.index"), "--root", server.url]) == 0
    line = f"built with: --container tfrecord --root {server.url} --exclude FILE\n"
    assert capsys.readouterr().out.endswith(line)


def test_info_reports_labels_by_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = tars(tmp_path)
    build_index(shards, tmp_path / "x.index", label=lambda record: len(record["png"]))
    assert main(["info", str(tmp_path / "x.index")]) == 0
    line = "built with: --container tar (and labels by a function, which build_index takes)\n"
    assert capsys.readouterr().out.endswith(line)


NUMBERS = [str(n) for n in range(11)]  # sorted as text, "10" is the third


def test_info_counts_the_bytes_of_loose_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for n in range(1, 4):
        (tmp_path / f"{n}.png").write_bytes(bytes(n))
    build_index(tmp_path, tmp_path / "x.index")
    assert main(["info", str(tmp_path / "x.index")]) == 0
    assert "image: bytes, 1 to 3 bytes per record, 6 bytes in total\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("container", "what"),
    mark_long(
        product(["tfrecord", "tar"], ["folder", "names", "numbers", "nothing", "names of a few"]),
        but_every=2,
    ),
)
@pytest.mark.filterwarnings("ignore:fields that some")
def test_info_prints_options_that_rebuild_packed_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], container: Any, what: str
) -> None:
    """The same labels and the same class names, with nothing but what info printed."""
    for name in NUMBERS:
        (tmp_path / "images" / name).mkdir(parents=True)
        for n in range(2):
            (tmp_path / "images" / name / f"{n}.{'png' if n else 'jpg'}").write_bytes(b"...")
    sources: dict[str, Any] = {
        "folder": tmp_path / "images",
        "names": [{"__key__": f"k{n}", "x": b"1", "label": name} for n, name in enumerate(NUMBERS)],
        "numbers": [{"x": b"1", "label": n} for n in range(11)],
        "nothing": [{"x": b"1"} if n else {"x": b"2", "y": "z"} for n in range(11)],
        "names of a few": [{"x": b"1", "label": name} for name in ("cat", "dog", "emu")],
    }
    source = sources[what]
    split = {"a": 2, "b": (22 if what == "folder" else len(source)) - 2}
    packed = pack(source, tmp_path / "out", container=container, split=split, seed=1)
    for name, index in packed.items():
        assert main(["info", str(index.path)]) == 0
        line = capsys.readouterr().out.splitlines()[-1].removeprefix("built with: ")
        shards = [str(tmp_path / "out" / shard) for shard in index.shard_paths.tolist()]
        out = str(tmp_path / "out" / f"{name}-again.index")
        assert main(["index", *shards, "--out", out, *shlex.split(line), "-q"]) == 0
        again = open_index(out)
        assert (again.fingerprint, again.classes) == (index.fingerprint, index.classes)
        assert main(["index", *shards, "--out", str(index.path), *shlex.split(line), "-q"]) == 0
        assert open_index(index.path).fingerprint == index.fingerprint
