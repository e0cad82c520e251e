"""Building an index: its bytes, its options, its folder, and what the build reports."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from support.shards import numbered, tars, tfrecords, tree, write_tar

from twinfeed.loaders import (
    DecodeError,
    Reader,
    ShardWarning,
    build_index,
    open_index,
)
from twinfeed.loaders.index.options import IndexOptions, ReadingOptions
from twinfeed.loaders.support import temporary
from twinfeed.loaders.support.temporary import remove_temporary


def test_tfrecord_records_read_as_written(tmp_path: Path) -> None:
    tfrecords(tmp_path)
    index = build_index(tmp_path / "*.tfrecord", tmp_path / "x.index")
    want = numbered(0, 30)
    assert len(index) == 30
    assert index.shard_lengths.tolist() == [10, 10, 10]
    assert index.labels.tolist() == [sample["label"] for sample in want]
    with Reader(index) as reader:
        got = reader.read(range(30))
    assert got["image"] == [sample["image"] for sample in want]
    assert got["key"] == [sample["key"].encode() for sample in want]


def test_tar_records_read_as_written(tmp_path: Path) -> None:
    index = build_index(tars(tmp_path), tmp_path / "x.index", label="cls")
    assert index.keys(range(30)) == [f"k{n}" for n in range(30)]
    assert index.labels.tolist() == [n % 7 for n in range(30)]
    assert index.classes == ()
    with Reader(index) as reader:
        got = reader.read([29, 0, 7], ["png", "json"])
    assert got["png"] == [f"{n:06d}".encode() * (3 + n % 3) for n in (29, 0, 7)]
    assert list(index.fields) == ["json", "png"]


@pytest.mark.parametrize("kind", ["threads", "spawned processes"])
def test_build_with_executor_writes_same_bytes(tmp_path: Path, kind: str) -> None:
    shards = tfrecords(tmp_path)
    build_index(shards, tmp_path / "a.index", label="label")
    pool = (
        ThreadPoolExecutor(2)
        if kind == "threads"
        else ProcessPoolExecutor(2, mp_context=get_context("spawn"))
    )
    with pool as executor:
        build_index(shards, tmp_path / "b.index", label="label", executor=executor)
    assert tree(tmp_path / "a.index") == tree(tmp_path / "b.index")


def test_shard_error_is_raised_while_other_shards_are_scanned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another worker writes may get its final name while the build removes what it made."""
    failed = threading.Event()

    def label(record: dict[str, Any]) -> int:
        if record["__shard__"].endswith("0.tar"):
            raise RuntimeError("no label")
        assert failed.wait(60)
        return 1

    def remove(folder: Path) -> None:
        failed.set()
        remove_temporary(folder)

    monkeypatch.setattr(temporary, "remove_temporary", remove)
    shards = [write_tar(tmp_path / f"{n}.tar", [("a", {"txt": b"."})]) for n in range(2)]
    with ThreadPoolExecutor(2) as executor, pytest.raises(DecodeError, match="no label"):
        build_index(shards, tmp_path / "x.index", label=label, executor=executor)


def test_index_bytes_do_not_depend_on_folder_or_time(tmp_path: Path) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        build_index(tars(tmp_path / place), tmp_path / place / "x.index", label="cls")
    assert tree(tmp_path / "one" / "x.index") == tree(tmp_path / "two" / "x.index")


def test_index_options_record_how_it_was_built(tmp_path: Path) -> None:
    reading: ReadingOptions = {"key": "key", "lists": ["image"], "missing": "skip"}
    built = build_index(
        tfrecords(tmp_path), tmp_path / "x.index", label="label", fields=["image"], **reading
    )
    options = open_index(built.path).options
    assert options == IndexOptions(
        container="tfrecord",
        key="key",
        lists=["image"],
        missing="skip",
        label_from="field",
        label="label",
        fields={"image": "image"},
    )


def test_empty_shard_warns(tmp_path: Path) -> None:
    shards = tfrecords(tmp_path, shards=2)
    shards[0].write_bytes(b"")
    with pytest.warns(ShardWarning, match="1 of 2 shards have no records"):
        index = build_index(shards, tmp_path / "x.index")
    assert index.shard_lengths.tolist() == [0, 10]
    assert index.describe(0).startswith("record 0 (d-00001-of-00002.tfrecord, number 0")
    with Reader(index) as reader:
        assert reader.read([0])["key"] == [b"k10"]


def test_sound_data_do_not_warn(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_index(tars(tmp_path), tmp_path / "x.index")


def test_index_folder_may_hold_own_leftovers_and_notes(tmp_path: Path) -> None:
    shards = tars(tmp_path)
    for name in (".hidden", "columns-0123456789abcdef"):
        out = tmp_path / f"{name}.index"
        (out / name).mkdir(parents=True)
        build_index(shards, out)
    (out / "notes.txt").write_text("mine")
    assert len(build_index(shards, out)) == 30


def test_build_keeps_folders_of_others(tmp_path: Path) -> None:
    """A folder of the same name that was there before is somebody's work."""
    shards = tars(tmp_path)
    mine = tmp_path / "project" / "columns-2024" / "thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(FileExistsError, match=r"it holds other files .columns-2024."):
        build_index(shards, mine.parent.parent)
    assert mine.read_text() == "mine"
    mine.unlink()
    mine.parent.rmdir()
    index = build_index(shards[:1], mine.parent.parent)
    mine.parent.mkdir()
    mine.write_text("mine")
    assert len(build_index(shards, index.path)) == 30
    assert mine.read_text() == "mine"
    assert not open_index(index.path).has_labels
