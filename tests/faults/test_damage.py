"""The corpus of damage, row by row: the class of the error, its place, and what is left to read."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from support.damage import INDEXES, PARTS, SHARDS
from support.formats import no_hang
from support.inside import tar, tfrecord
from support.servers import RangeServer
from support.shards import made_parts, merged, tars

from twinfeed.loaders import DataCorruptionError, IndexFormatError, build_index, open_index, pack
from twinfeed.samplers import PKBatchSampler


def packed(path: Path) -> None:
    """Pack a shard, which writes nothing if it is damaged."""
    try:
        pack(path, path.with_suffix(".out"))
    finally:
        assert not path.with_suffix(".out").exists()


def raw(path: Path, **options: Any) -> list[int]:
    return [record.number for record in tfrecord.scan(path, **{"example": False} | options)]


def samples(path: Path, **options: Any) -> list[int]:
    return [record.number for record in tar.scan(path, **options)]


READ: dict[str, Callable[..., Any]] = {"tfrecord": raw, "tar": samples, "compressed": packed}


@pytest.mark.parametrize("form", SHARDS)
def test_damaged_shard_is_named_with_offset_and_record(tmp_path: Path, form: str) -> None:
    """And where bad records are left out, the others are read."""
    for number, row in enumerate(SHARDS[form]()):
        path = tmp_path / f"{number}"
        path.write_bytes(row.data)
        with no_hang(), pytest.raises(row.kind) as caught:
            READ[form](path, **row.options)
        error, told = caught.value, str(caught.value)
        words = (row.words,) if isinstance(row.words, str) else row.words
        found = type(error), error.offset, [word for word in words if word not in told]
        assert found == (row.kind, row.offset, []), (row.what, told)
        assert str(error.path).partition(", ")[0] == str(path), row.what
        assert f"byte offset: {row.offset}" in told or row.offset is None, row.what
        assert "what to do: " in told
        assert error.record == row.record or row.record is None, (row.what, told)
        assert error.record is not None or form == "compressed", row.what
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), told, vars(error))
        if form == "compressed":
            continue
        heard: list[DataCorruptionError] = []
        try:
            beside = READ[form](path, on_bad=heard.append, **row.options)
        except DataCorruptionError:
            beside = None
        assert beside == (None if row.beside is None else [*row.beside]), row.what
        assert tuple(bad.record for bad in heard) == row.bad, row.what


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an index and of its shard."""
    folder = tmp_path_factory.mktemp("whole")
    names = [f"class {n}" for n in range(7)]
    shards = tars(folder, shards=1)
    build_index(shards, folder / "x.index", label="cls", classes=names, digest=True)
    return folder


@pytest.mark.parametrize("what", INDEXES)
def test_index_of_wrong_values_is_refused(
    tmp_path: Path, index: Path, server: RangeServer, what: str
) -> None:
    """From a disk and from a URL. The checksums are right, as an attacker would have them.

    A wrong class order would give wrong records, or an error of numpy in the middle of a training.
    """
    change, word = INDEXES[what]
    shutil.copytree(index, tmp_path, dirs_exist_ok=True)
    change(tmp_path / "x.index")
    for place in (str(tmp_path / "x.index"), f"{server.url}/x.index"):
        with pytest.raises(IndexFormatError) as caught:
            PKBatchSampler(open_index(place).class_order, p=2, k=2, seed=0)
        assert word in str(caught.value)
        assert str(caught.value.path).startswith(place)


@pytest.mark.parametrize(("entry", "old", "new"), PARTS)
def test_part_of_wrong_values_is_refused(
    tmp_path: Path, entry: str, old: bytes, new: bytes
) -> None:
    """Its checksums are right, as an attacker would have it."""
    (file,) = made_parts(tars(tmp_path, shards=1), tmp_path / "p")
    with ZipFile(file) as part:
        entries = {name: part.read(name) for name in part.namelist()}
    assert old in entries[entry]
    entries[entry] = entries[entry].replace(old, new)
    with ZipFile(file, "w") as part:
        for name, data in entries.items():
            part.writestr(name, data)
    with pytest.raises(IndexFormatError, match="missing or damaged"):
        merged([file], tmp_path / "x.index")
    assert not list((tmp_path / "x.index").glob("*"))
