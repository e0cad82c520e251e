"""The index: opening, its content, and that it stays small, equal and shared."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.open_files import open_below
from support.refusals import Call, Refused, check_refused
from support.shards import flip, tars, tfrecords, tree, write_tar

from twinfeed.loaders import (
    Index,
    IndexFormatError,
    LoaderError,
    Reader,
    StaleIndexError,
    build_index,
    open_index,
    pack,
)
from twinfeed.loaders.building.writer import index_writer
from twinfeed.loaders.index import arrays as _arrays
from twinfeed.loaders.index import paths
from twinfeed.loaders.index.arrays import StringColumn, row_type
from twinfeed.loaders.index.index import SHARD
from twinfeed.loaders.index.manifest import MANIFEST
from twinfeed.loaders.index.options import Reading
from twinfeed.loaders.support.temporary import temporary_folder
from twinfeed.samplers import PKBatchSampler


def big_index(folder: Path, records: int, shards: int, classes: int = 0) -> Path:
    """An index of many records over empty files, written without the records."""
    names = [f"d-{n:07d}.tar" for n in range(shards)]
    stops = np.linspace(0, records, shards + 1).astype(np.int64)
    arrays = {
        "shards": np.zeros(shards, SHARD),
        "shardstops": stops[1:],
        "shardlengths": np.diff(stops),
        "field-0": np.zeros(records, row_type(0, 0, whole_files=False)),
        "column-0": np.arange(records) % 1000,
        **StringColumn.of(names).arrays("shardpaths"),
    }
    if classes:
        arrays |= StringColumn.of(f"class {n:07d}" for n in range(classes)).arrays("classes")
        arrays |= StringColumn.of(f'"tag {n:07d}"' for n in range(shards)).arrays("tags")
    facts = {
        "container": "tar",
        "records": records,
        "columns": ["label"],
        "fields": [{"name": "image", "kind": "bytes", "missing": 0}],
        "digests": {},
        "class_order": None,
    }
    path = folder / "big.index"
    with temporary_folder(path) as work, index_writer(path, work) as store:
        store.add(arrays)
        store.finish(facts, {"missing": "error", "root": os.fspath(folder)})
    for name in names:
        (folder / name).touch()
    return folder / "big.index"


def test_open_cost_does_not_grow_with_records(tmp_path: Path) -> None:
    """Ten million rows are mapped, not read: a process has the pages that it touched."""
    path = big_index(tmp_path, 10_000_000, 1000)
    code = textwrap.dedent("""
        import os, sys
        from twinfeed.loaders.index import open_index

        def held():
            lines = open("/proc/self/status").read().splitlines()
            return int([line.split()[1] for line in lines if line.startswith("VmRSS")][0]) * 1024

        before, files = held(), len(os.listdir("/proc/self/fd"))
        index = open_index(sys.argv[1])
        index.keys([9_999_999]), index.labels[[5, 6_000_000]], index.table("image")[4_000_000]
        print(held() - before, len(os.listdir("/proc/self/fd")) - files)
    """)
    command = [sys.executable, "-c", code, os.fspath(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert sum(file.stat().st_size for file in path.rglob("*.npy")) > 180_000_000
    memory, files = map(int, done.stdout.split())
    assert memory < 30_000_000
    assert files == 2  # the labels and the table of the field; what is small is read


def test_open_cost_does_not_grow_with_classes_and_tags(tmp_path: Path) -> None:
    """Their names are mapped: the manifest has none of them, and nothing is made of them."""
    path = big_index(tmp_path, 300_000, 1000, classes=300_000)
    assert len((path / MANIFEST).read_bytes()) < 5_000
    open_index(path)
    tracemalloc.start()
    try:
        index = open_index(path)
        assert (index.classes[0], index.classes[-1]) == ("class 0000000", "class 0299999")
        again = pickle.loads(pickle.dumps(index))
        assert (again.tag(999), len(again.classes)) == ('"tag 0000999"', 300_000)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert index.classes == [f"class {n:07d}" for n in range(300_000)]
    assert "class 0000099', … 300,000 strings)" in repr(index.classes)


def test_small_indexes_keep_no_file_open(tmp_path: Path) -> None:
    """So that hundreds may be open at once."""
    path = build_index(tars(tmp_path), tmp_path / "x.index", label="cls").path
    held = [open_index(path) for _ in range(20)]
    assert open_below(tmp_path) == []
    assert held[-1].keys([29]) == ["k29"]


def test_index_moves_with_its_shards_or_opens_with_root(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    tars(data)
    index = build_index(data / "*.tar", data / "x.index", label="cls")
    moved = tmp_path / "moved"
    data.rename(moved)
    assert open_index(moved / "x.index").fingerprint == index.fingerprint
    (moved / "x.index").rename(tmp_path / "x.index")
    with pytest.raises(FileNotFoundError, match=r"3 of 3 shards .* give root= the folder"):
        open_index(tmp_path / "x.index")
    again = open_index(tmp_path / "x.index", root=moved)
    assert again.fingerprint == index.fingerprint
    with Reader(again) as reader:
        assert reader.read([0], ["cls" if "cls" in again.fields else "png"])


def test_fingerprint_changes_only_with_data_labels_and_classes(tmp_path: Path) -> None:
    shards = tars(tmp_path)
    path = tmp_path / "x.index"
    one = build_index(shards, path, label="cls").fingerprint
    assert build_index(shards, path, label="cls", missing="skip").fingerprint == one
    assert build_index(shards, path).fingerprint != one
    names = [f"class {n}" for n in range(7)]
    assert build_index(shards, path, label="cls", classes=names).fingerprint != one
    write_tar(shards[0], [("k0", {"png": b"other", "cls": b"1"})])
    assert build_index(shards, path, label="cls").fingerprint != one


def test_index_pickles_as_its_path(tmp_path: Path) -> None:
    index = build_index(tars(tmp_path), tmp_path / "x.index", label="cls")
    index.checksums = False
    data = pickle.dumps(index)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert not again.checksums
    assert again.fingerprint == index.fingerprint
    build_index(tmp_path / "*.tar", tmp_path / "x.index")
    with pytest.raises(StaleIndexError, match="rebuilt while it was in use"):
        pickle.loads(data)


@pytest.mark.parametrize("read_whole", [_arrays.MAX_READ_BYTES, 0])
def test_open_index_survives_a_rebuild(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_whole: int
) -> None:
    monkeypatch.setattr(_arrays, "MAX_READ_BYTES", read_whole)
    index = build_index(tars(tmp_path), tmp_path / "x.index", label="cls")
    build_index(tmp_path / "*.tar", tmp_path / "x.index")
    assert index.labels.tolist() == [n % 7 for n in range(30)]
    assert index.keys([29]) == ["k29"]
    assert not open_index(tmp_path / "x.index").has_labels
    assert len(list((tmp_path / "x.index").glob("columns-*"))) == 1


def test_keys_that_are_not_utf8_round_trip() -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    column = StringColumn.of([name, "kōen", ""])
    assert column.tolist() == [name, "kōen", ""]


def test_keys_takes_ids_or_returns_all(tmp_path: Path) -> None:
    index = build_index(tars(tmp_path), tmp_path / "x.index")
    assert index.keys([]) == []
    assert index.keys() == index.keys(range(30))
    assert index.columns.get("label") is None


def test_index_files_contain_no_time_or_path(tmp_path: Path) -> None:
    index = build_index(tars(tmp_path), tmp_path / "x.index")
    for name, data in tree(index.path).items():
        assert os.fsencode(tmp_path) not in data, name
    manifest = json.loads((index.path / MANIFEST).read_text())
    assert str(time.localtime().tm_year) not in json.dumps(manifest["options"])


def test_arrays_are_mapped_and_shared(tmp_path: Path) -> None:
    index = build_index(tars(tmp_path), tmp_path / "x.index", label="cls")
    assert not index.labels.flags.writeable
    assert isinstance(index, Index)
    with pytest.raises(ValueError, match="read-only"):
        index.labels[0] = 1
    assert open_index(index.path, digest=index.digest).fingerprint == index.fingerprint


def test_one_index_serves_two_copies_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    tfrecords(tmp_path / "a")
    build_index(tmp_path / "a" / "*.tfrecord", tmp_path / "a" / "x.index")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    flip(tmp_path / "b" / "d-00000-of-00003.tfrecord", 60)
    with Reader(open_index(tmp_path / "a" / "x.index")) as reader:
        reader.read(range(30))
    with (
        Reader(open_index(tmp_path / "b" / "x.index")) as reader,
        pytest.raises(ValueError, match="corrupted bytes"),
    ):
        reader.read(range(30))


def test_open_checks_few_shards_and_reads_no_large_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = big_index(tmp_path, 20_000, 20_000)
    monkeypatch.setattr(_arrays, "MAX_READ_BYTES", 1 << 12)
    stats: list[str] = []
    sums: list[int] = []
    stat, digest = os.stat, _arrays._mapped_digest

    def counted(name: Any, *args: Any, **more: Any) -> os.stat_result:
        stats.append(str(name))
        return stat(name, *args, **more)

    def summed(mapped: Any) -> str:
        sums.append(1)
        return digest(mapped)

    monkeypatch.setattr(paths.os, "stat", counted)
    monkeypatch.setattr(_arrays, "_mapped_digest", summed)
    index = open_index(path)
    looked = {name for name in stats if name.endswith(".tar")}
    assert len(looked) == 16
    assert f"{tmp_path}/d-0000000.tar" in looked
    assert f"{tmp_path}/d-0019999.tar" in looked
    assert sums == []
    assert index.location(19_999) == ("d-0019999.tar", 0)
    assert len(sums) == 3  # the shards, and their paths


@pytest.mark.parametrize("read_whole", [_arrays.MAX_READ_BYTES, 0])
def test_class_order_draws_as_labels_and_pickles_as_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_whole: int
) -> None:
    monkeypatch.setattr(_arrays, "MAX_READ_BYTES", read_whole)
    built = build_index(tars(tmp_path, each=400), tmp_path / "x.index", label="cls")
    index = open_index(built.path)
    assert index.class_order is not None
    samplers = [PKBatchSampler(of, p=3, k=2, seed=0) for of in (index.labels, index.class_order)]
    for step in range(20):
        assert samplers[0].batch(0, step).tolist() == samplers[1].batch(0, step).tolist()
    assert samplers[0].fingerprint == samplers[1].fingerprint
    if read_whole == 0:
        assert len(pickle.dumps(index.class_order)) < 1000
    again = pickle.loads(pickle.dumps(index.class_order))
    assert again.records.tolist() == index.class_order.records.tolist()
    assert build_index(tmp_path / "*.tar", tmp_path / "y.index").class_order is None


def test_rebuild_repairs_damaged_arrays(tmp_path: Path) -> None:
    index = build_index(tars(tmp_path), tmp_path / "x.index", label="cls")
    (file,) = index.path.glob("columns-*/shards.npy")
    flip(file, file.stat().st_size - 1)
    with pytest.raises(IndexFormatError):
        open_index(index.path)
    assert build_index(tmp_path / "*.tar", index.path, label="cls").digest == index.digest
    assert len(open_index(index.path)) == len(index)


def opened(name: str, **options: Any) -> Call:
    """A call that opens an index of the world."""
    return lambda world: open_index(world / name, **options)


def of(use: Callable[[Index], object]) -> Call:
    """A call that uses an index of a text, of no labels, and of a column of two numbers."""
    return lambda world: use(open_index(world / "data.index"))


IDS = "ids must be integers in one dimension, got "

# What is wrong, the class of the error, and a word that names what is there or what to do.
REFUSED: Refused = [
    (opened("nowhere/x"), FileNotFoundError, r"no index here \(no manifest.*twinfeed index SHARDS"),
    (opened("."), FileNotFoundError, r"no index here .* --out .*/train\.index"),
    (opened("a/d-000000.tar"), FileNotFoundError, "no index here .*build one: twinfeed index"),
    (opened("a.index"), FileNotFoundError, r"7 of 12 .* missing here: a/.*03\.tar.*; .* root="),
    (opened("a.index", root="/proc"), FileNotFoundError, "12 of 12 .* give root= the folder"),
    (lambda world: open_index(world / "a.index", root=world / "b"), StaleIndexError, "has changed"),
    (opened("data.index", digest="0"), StaleIndexError, "another index.*expected: digest 0"),
    (opened("data.index", cache="/tmp"), TypeError, "cache must be a DiskCache, got '/tmp'"),
    (of(lambda index: Reader(index.path)), TypeError, r"got a PosixPath: open_index\(path\)"),  # type: ignore[arg-type]
    (
        of(lambda index: index.labels),
        LoaderError,
        r"no labels.*label=, .* \['text'\].*FromFile.*a folder",
    ),
    (of(lambda index: index.columns["text"]), KeyError, r"column 'text': .* \['box'\]; a Reader"),
    (of(lambda index: index.table("jpg")), KeyError, r"no field 'jpg': .* fields \['text'\]"),
    (of(lambda index: index.keys([2])), IndexError, r"ids must lie in \[0, 2\), got 2"),
    (of(lambda index: index.keys([-1, 1])), IndexError, r"ids must lie in \[0, 2\), got -1"),
    (of(lambda index: index.keys([0.5])), TypeError, f"{IDS}float64"),  # type: ignore[list-item]
    (of(lambda index: index.keys(1)), TypeError, rf"{IDS}.* shape \(\)"),  # type: ignore[arg-type]
    *(
        (lambda _, options=options: Reading(**options), kind, word)
        for options, kind, word in (
            ({"container": "zip"}, ValueError, "one of 'tar', 'tfrecord', 'files', got 'zip'"),
            ({"missing": "ignore"}, ValueError, "one of 'error', 'skip', 'empty', got 'ignore'"),
            ({"lists": "png"}, TypeError, "lists must be a list of names, got 'png'"),
            ({"example": "no"}, TypeError, "example must be True or False, got 'no'"),
            ({"join": 1}, TypeError, "join must be True or False, got 1"),
            ({"max_record_bytes": 0}, ValueError, "max_record_bytes must be at least 1, got 0"),
            ({"container": "files", "key": "a"}, ValueError, "are for tfrecord, got files"),
            *(
                ({"background": one}, ValueError, "background must be an int64 or a name, got")
                for one in (0.5, True, "", 2**63, "\ud800")
            ),
        )
    ),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index, and one that lacks shards, which lie elsewhere with other bytes."""
    world = tmp_path_factory.mktemp("world")
    pack([{"text": b"a", "box": [1, 2], "__key__": f"{n}"} for n in range(2)], world)
    for name, each in (("a", 1), ("b", 2)):
        (world / name).mkdir()
        tars(world / name, shards=12, each=each)
    build_index(world / "a" / "*.tar", world / "a.index")
    build_index(world / "a" / "*.tar", world / ".old.index")
    for number in range(3, 10):
        (world / "a" / f"d-{number:06d}.tar").unlink()
    (world / "b" / "a").symlink_to(".")
    return world


@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_index_refuses_bad_arguments(
    world: Path, call: Call, kind: type[Exception], word: str
) -> None:
    check_refused(world, call, kind, word)


def test_index_item_is_a_dict_of_fields_and_columns(tmp_path: Path) -> None:
    index = build_index(tars(tmp_path), tmp_path / "x.index", label="cls")
    with Reader(index) as reader:
        fields = [*index.fields]
        for record in (0, 29, -1):
            found = index[record]
            assert list(found) == [*fields, "label"]
            read = reader.read([range(30)[record]], fields)
            assert {name: [found[name]] for name in fields} == read
            assert found["label"] == index.labels[record]
    assert len(list(index)) == 30


def test_index_item_has_none_for_a_missing_field(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [("a", {"x": b"1", "y": b"2"}), ("b", {"x": b"3"})])
    index = build_index(
        tmp_path / "x.tar", tmp_path / "x.index", fields=["x", "y"], missing="empty"
    )
    assert [index[0], index[1]] == [{"x": b"1", "y": b"2"}, {"x": b"3", "y": None}]


def test_summary_shows_sizes(tmp_path: Path) -> None:
    labels = np.repeat(np.arange(5), [1, 2, 3, 40, 100])
    records = [{"word": b"w" * (1 + n % 7), "label": int(label)} for n, label in enumerate(labels)]
    index = pack(records, tmp_path, container="tfrecord", shards=3)["data"]
    assert index.summary().splitlines() == [
        "146 records in 3 shards, 48 to 49 records per shard",
        "word: bytes, 1 to 7 bytes per record, 581 bytes in total",
        "label: column, int64[146]",
        "5 classes, 1 to 100 records per class, median 3",
    ]
    index = pack([{"word": b"w", "label": n} for n in (0, 2)], tmp_path / "gap")["data"]
    assert index.summary().splitlines() == [
        "2 records in 1 shard, 2 records per shard",
        "word: bytes, 1 byte per record, 2 bytes in total",
        "label: column, int64[2]",
        "2 classes (num_classes=3), 1 record per class, median 1",
    ]
