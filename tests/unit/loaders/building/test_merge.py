"""Parts and their merging: memory that does not grow with the records, and large numbers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import PROGRAMS
from support.shards import made_parts, merged, tars, tfrecords, tree

from twinfeed.loaders import (
    IndexFormatError,
    Reader,
    build_index,
    open_index,
)
from twinfeed.loaders.building import _scan_shard, classes, sources
from twinfeed.loaders.building import writer as _writer
from twinfeed.loaders.building._parts import FieldStats, PartFile, ShardPart
from twinfeed.loaders.formats import tfrecord
from twinfeed.loaders.formats.files import Entry
from twinfeed.loaders.formats.tfrecord import TFRecordWriter
from twinfeed.loaders.index.arrays import row_type
from twinfeed.loaders.index.options import IndexOptions
from twinfeed.loaders.support.temporary import MARK, temporary_folder
from twinfeed.samplers import ClassOrder


def peak(work: Callable[[], Any]) -> int:
    """The most bytes in memory at once, beyond the bytes before."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def synthetic(folder: Path, records: int, offset: int = 1000, length: int = 100) -> Path:
    """The part of a shard that was never there: a field, keys and labels, in batches of 1,000."""
    (folder / "a.tar").touch()
    options = IndexOptions(container="tar", label_from="field", label="cls")
    file = folder / f"{records:032x}.part"
    part = ShardPart(options, "a.tar", 0)
    part.labels = [f"c{n}" for n in range(100)]
    part.first_records = ["a.tar"] * 100
    part.string_sizes = {"keys": (records, 8 * records)}
    part.fields = {"x": FieldStats("bytes", offset, length)}
    with zipfile.ZipFile(file, "w") as archive:
        out = PartFile(archive)
        for start in range(0, records, 1000):
            rows = np.zeros(1000, row_type(offset, length, whole_files=False))
            rows["offset"], rows["length"] = offset, length
            arrays = {
                "rows-0": rows,
                "keys-text": np.full(8000, ord("k"), np.uint8),
                "keys-ends": np.arange(8, 8008, 8, dtype="<u4"),
                "labels": np.arange(start, start + 1000) * 7 % 100,
            }
            out.add(1000, arrays)
            part.num_records += 1000
        out.finish(part)
    return file


def test_merge_memory_does_not_grow_with_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classes, "READ_ITEMS", 5000)
    few, many = (synthetic(tmp_path, records) for records in (50_000, 200_000))

    def merge(part: Path) -> None:
        merged([part], tmp_path / "x.index")

    merge(few)  # what the first use alone needs
    least = peak(lambda: merge(few))
    batches = (200_000 - 50_000) // 1000  # each has entries in the directory of the zip
    assert peak(lambda: merge(many)) < least + 7000 * batches
    index = open_index(tmp_path / "x.index")
    assert len(index) == 200_000
    order = ClassOrder(index.labels)
    assert index.class_order is not None
    assert np.array_equal(index.class_order.records, order.records)
    assert index.keys([199_999]) == ["kkkkkkkk"]


def test_scan_memory_does_not_grow_with_shard_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_scan_shard, "BATCH_FIELDS", 1000)
    peaks = []
    monkeypatch.setattr(tfrecord, "CHUNK_BYTES", 10_000)
    for records in (1000, 2000, 16_000):
        shard = tmp_path / f"{records}.tfrecord"
        with TFRecordWriter(shard) as writer:
            for _ in range(records):
                writer.write(b"some bytes")
        build = partial(made_parts, [shard], example=False)
        peaks.append(peak(partial(build, tmp_path / "once")))
        assert len(merged(build(tmp_path / "again"), tmp_path / "x.index")) == records
    assert peaks[2] < 1.2 * peaks[1] + 100_000


@pytest.mark.parametrize(
    ("offset", "length", "types"),
    [
        (2**32 - 1, 2**31 - 1, ("<u4", "<i4")),
        (2**32, 2**31 - 1, ("<i8", "<i4")),
        (2**32 - 1, 2**31, ("<u4", "<i8")),
        (2**50, 2**40, ("<i8", "<i8")),
    ],
)
def test_table_columns_use_eight_bytes_only_where_needed(
    tmp_path: Path, offset: int, length: int, types: tuple[str, str]
) -> None:
    index = merged([synthetic(tmp_path, 1000, offset, length)], tmp_path / "x.index")
    table = index.table("x")
    assert (table.dtype["offset"].str, table.dtype["length"].str) == types
    (row,) = index.rows(["x"], np.array([7])).tolist()
    assert row == (offset, length, 0, 0)


def test_integer_type_is_eight_bytes_from_four_gigabytes() -> None:
    from twinfeed.loaders.index.arrays import integer_type

    assert [integer_type(size) for size in (0, 2**32 - 1, 2**32)] == ["<u4", "<u4", "<i8"]


labels = st.one_of(
    st.lists(st.integers(-3, 3), min_size=1, max_size=60),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20),
    st.lists(st.just(5), min_size=1, max_size=40),
)


@given(labels=labels, at_once=st.sampled_from([1, 3, 7, 1000]))
def test_class_order_written_in_chunks_equals_one_in_memory(
    tmp_path_factory: pytest.TempPathFactory, labels: list[int], at_once: int
) -> None:
    values = np.array(labels, np.int64)
    expected = ClassOrder(values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classes, "READ_ITEMS", at_once)
        path = tmp_path_factory.mktemp("order") / "x.index"
        with temporary_folder(path) as work, _writer.index_writer(path, work) as store:
            digest = classes.write_class_order(store, values, ())
            written = {
                name: store.finish_array(f"classorder-{name}").tolist()
                for name in ("records", "starts", "sizes")
            }
    assert digest == expected.digest
    assert written == {
        "records": expected.records.tolist(),
        "starts": expected.starts.tolist(),
        "sizes": expected.sizes.tolist(),
    }


def test_loose_files_split_into_parts_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "FILES_PER_PART", 3)
    entries = []
    for n in range(9):
        names = {"a": f"{n}.a", "b": f"{n}.b"} if n % 3 else {"b": f"{n}.b"}
        for name in names.values():
            (tmp_path / name).write_bytes(name.encode())
        entries.append(Entry(f"k{n}", names))
    entries += [Entry(f"k{n}", {}) for n in range(9, 12)]  # a part without files
    index = build_index(entries, tmp_path / "x.index", missing="empty")
    assert (len(index.shards), list(index.fields)) == (4, ["a", "b"])
    with Reader(index) as reader:
        read = reader.read(range(12))
    assert read["b"] == [b"%d.b" % n for n in range(9)] + [None] * 3
    assert read["a"] == [b"%d.a" % n if n % 3 else None for n in range(9)] + [None] * 3
    assert index.table("a")[3].tolist() == (0, -1, 0)


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("before", [None, "d-00000*"])
def test_build_killed_at_any_change_leaves_old_or_new_index(
    tmp_path: Path, before: str | None, step: int
) -> None:
    """Whatever was left, either index is built again with the same bytes, and no work is left."""

    def indexed(folder: Path, pattern: str) -> dict[str, bytes]:
        shards = f"{folder}/{pattern}"
        index = build_index(shards, folder / "x.index", label="label", complete=False)
        for path in index.path.iterdir():  # a folder may not have been marked before the kill
            is_unmarked = path.name.startswith(".twinfeed-") and {*os.listdir(path)} <= {MARK}
            assert path.name.startswith(("columns-", "manifest")) or is_unmarked
        return tree(index.path / index.manifest["folder"])

    start = tmp_path / "start"
    start.mkdir()
    tfrecords(start, shards=2, each=2)
    wanted = {pattern: indexed(start, pattern) for pattern in ("d-*", "d-00000*")}
    if before is None:
        shutil.rmtree(start / "x.index")
    (tmp_path / "killed").mkdir()
    script = str(PROGRAMS / "killed_pack.py")
    command = [sys.executable, script, str(start), str(tmp_path / "killed"), "build", "d-*"]
    subprocess.run([*command, str(step)], check=True)
    seen = set()
    for out in (tmp_path / "killed").iterdir():
        with suppress(FileNotFoundError, IndexFormatError):
            seen.add(len(open_index(out / "x.index")))
        for pattern, held in wanted.items():
            again = shutil.copytree(out, tmp_path / "again")
            assert indexed(again, pattern) == held, (out.name, pattern)
            shutil.rmtree(again)
    assert seen == ({4} if before is None else {2, 4})


def test_build_keeps_user_files_in_and_beside_old_arrays(tmp_path: Path) -> None:
    """The user's folders beside the manifest, and the user's file in the folder of old arrays."""
    (tmp_path / "shards").mkdir()
    shards = tars(tmp_path / "shards", shards=2)
    index = build_index(shards[:1], tmp_path / "x.index", root=tmp_path / "shards")
    mine = index.path / "columns-0123456789abcdef" / "mydata.npy"
    mine.parent.mkdir()
    among = index.path / index.manifest["folder"] / "mine.npy"
    for file in (mine, among):
        file.write_text("mine")
    again = build_index(shards, index.path, root=tmp_path / "shards")
    assert len(again) == 20
    assert [file.read_text() for file in (mine, among)] == ["mine"] * 2
    assert [file.name for file in among.parent.iterdir()] == ["mine.npy"]


def test_index_finished_by_another_process_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its folder is looked at: its manifest was taken for a file of somebody else."""
    path = build_index(tars(tmp_path), tmp_path / "x.index").path
    assert _writer.check_own_folder(path) == path
    monkeypatch.setattr(_writer, "is_index", lambda folder: False)
    with pytest.raises(FileExistsError, match="it holds other files"):
        _writer.check_own_folder(path)
