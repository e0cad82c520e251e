"""Damaged and hostile indexes, beside the corpus of test_damage.py."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import mark_long
from support.damage import rewrite
from support.formats import flipped
from support.inside import (
    LIMITS,
    MANIFEST,
    REBUILD,
    manifest,
)
from support.servers import RangeServer
from support.shards import (
    flip,
    numbered,
    tars,
    tfrecords,
    write_tfrecord,
)

from twinfeed.loaders import (
    DataCorruptionError,
    DiskCache,
    Index,
    IndexFormatError,
    Reader,
    StaleIndexError,
    build_index,
    open_index,
    pack,
    verify,
)


def test_fault_33_flipped_bit_of_manifest_is_refused(index: Index) -> None:
    """Unless it changes no value, as one of a blank."""
    file = index.path / MANIFEST
    whole = file.read_bytes()
    for place in range(0, len(whole), 7):
        file.write_bytes(flipped(whole, place, 1 << place % 8))
        if json_or_none(file) != json.loads(whole):
            with pytest.raises(IndexFormatError):
                open_index(index.path)
    file.write_bytes(whole)
    open_index(index.path)


def json_or_none(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


@pytest.mark.usefixtures("mapped_arrays")
def test_fault_33_changed_large_array_is_found_before_use(
    tmp_path: Path,
) -> None:
    """Of the shards, a column and the keys when they are first asked for; of where the fields lie
    by each reading, and by verify.
    """
    index = build_index(tars(tmp_path), tmp_path / "x.index", label="cls")
    for file in index.path.glob("columns-*/*.npy"):
        at = file.stat().st_size - (
            9 if file.stem.endswith(("ends", "stops")) else 1
        )  # the last end is read
        flip(file, at)
        changed = f"the bytes of {file.name} have changed"
        if file.stem.startswith("shard"):
            with pytest.raises(IndexFormatError, match=changed):
                _ = attrgetter("shard_paths", "shard_stops", "shards", "shard_lengths")(
                    open_index(index.path)
                )
            flip(file, at)
            continue
        again = open_index(index.path)
        if file.stem == "column-0":
            assert "label" in again.columns
            with pytest.raises(IndexFormatError, match=changed):
                _ = again.labels
            with pytest.raises(IndexFormatError, match=changed):
                list(again.columns.values())
        elif file.stem.startswith("keys"):
            assert again.describe(0)  # a message says what it can
            with pytest.raises(IndexFormatError, match=changed):
                again.keys([0])
        elif file.stem.startswith("classorder"):
            with pytest.raises(IndexFormatError, match=changed):
                _ = again.class_order
        else:
            assert file.stem.startswith("field")
            with Reader(again) as reader, pytest.raises(DataCorruptionError):
                reader.read(range(30))
        with pytest.raises(IndexFormatError, match=f"{file.stem} does not match"):
            verify(again)
        flip(file, at)


@pytest.mark.usefixtures("mapped_arrays")
def test_array_is_checked_once(tmp_path: Path) -> None:
    """Not again by the same index, nor by a process that it is sent to."""
    index = build_index(tars(tmp_path), tmp_path / "x.index", label="cls")
    labels = index.labels.tolist()
    (file,) = index.path.glob("columns-*/column-0.npy")
    flip(file, file.stat().st_size - 8)
    again = pickle.loads(pickle.dumps(index))
    assert len(again.labels) == len(index.labels) == len(labels)
    with pytest.raises(IndexFormatError, match=r"column-0\.npy have changed"):
        _ = open_index(index.path).labels


@pytest.mark.usefixtures("mapped_arrays")
@pytest.mark.parametrize("container", ["tfrecord", "tar"])
@pytest.mark.parametrize(
    ("column", "value"),
    [("offset", (1 << 32) - 1), ("offset", 1 << 20), ("length", -9), ("length", (1 << 31) - 1)],
)
def test_fault_33_row_outside_its_shard_is_refused(
    tmp_path: Path, container: str, column: str, value: int
) -> None:
    """A bit of a large table flipped on the disk: opening checks only sizes, reading finds it."""
    made = tfrecords(tmp_path) if container == "tfrecord" else tars(tmp_path)
    index = build_index(made, tmp_path / "x.index")
    number = list(index.fields).index("image" if container == "tfrecord" else "png")
    rows = np.load(next(index.path.glob(f"columns-*/field-{number}.npy")), mmap_mode="r+")
    rows[column][13] = value
    rows.flush()
    for verified in (True, False):
        with Reader(open_index(index.path, checksums=verified)) as reader:
            for ids in ([13], [12, 13, 14], [20, 13, 2]):
                with pytest.raises(
                    IndexFormatError, match="does not lie within its shard"
                ) as caught:
                    reader.read(ids, [list(index.fields)[number]])
                assert caught.value.record == 3
                assert f"of record 13 ({index.shard_paths[1]}, number 3)" in str(caught.value)
                assert REBUILD in str(caught.value)


@pytest.mark.usefixtures("mapped_arrays")
def test_fault_33_damaged_length_is_no_missing_field(tmp_path: Path) -> None:
    """Though both are negative: it is neither filled up nor left out."""
    samples = [*numbered(0, 5), {"label": 0, "key": "none"}]
    shard = write_tfrecord(tmp_path / "a.tfrecord", samples)
    index = build_index(shard, tmp_path / "x.index", fields=["image", "key"], missing="empty")
    assert index.fields["image"].missing == 1
    rows = np.load(next(index.path.glob("columns-*/field-0.npy")), mmap_mode="r+")
    rows["length"][3] ^= np.int32(-1) << 31  # the sign bit
    rows.flush()
    again = open_index(index.path)
    with Reader(again) as reader:
        assert reader.read([5], ["image"]) == {"image": [None]}
        with pytest.raises(IndexFormatError, match="does not lie within its shard"):
            reader.read([3], ["image"])
    with pytest.raises(IndexFormatError, match="does not lie within its shard"):
        pack(again, tmp_path / "out")


@pytest.mark.parametrize("cached", [True, False])
def test_fault_78_manifest_changing_at_each_request_is_refused(
    tmp_path: Path, index: Index, server: RangeServer, cached: bool
) -> None:
    """And whose arrays are not there: a few attempts, then an error."""

    def changes(path: str, _: int) -> int | None:
        if path != "manifest.json":
            return 404
        rewrite(
            index.path, lambda manifest: manifest["options"].update(left_out=len(server.ranges))
        )
        return None

    server.fail = changes
    cache = DiskCache(tmp_path / "c", bytes=10**6) if cached else None
    with pytest.raises(StaleIndexError, match="replaced 3 times during its download") as caught:
        open_index(f"{server.url}/x.index", cache=cache)
    assert caught.value.path == f"{server.url}/x.index"
    asked = [name for name, _, _ in server.ranges]
    assert asked.count("x.index/manifest.json") < 10


@pytest.mark.parametrize("values", mark_long(["[]", "{}", '"ab"', "[[1,1]]", "1.5"], but_every=3))
def test_fault_79_huge_manifest_takes_little_memory(
    tmp_path: Path, values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list takes twenty times its bytes: of 45 MB of lists 900 MB, and so a manifest is short.

    The longest manifest is tried in an eighth of its size.
    """
    for part, size in ((1, 45 << 20), (8, LIMITS.manifest_bytes // 8 - 10)):
        limits = replace(LIMITS, manifest_bytes=LIMITS.manifest_bytes // part)
        monkeypatch.setattr(manifest, "LIMITS", limits)
        many = ",".join([values] * (size // (len(values) + 1)))
        (tmp_path / "manifest.json").write_text(f"[{many}]")
        tracemalloc.start()
        with pytest.raises(IndexFormatError, match=r"a file has too many bytes|of another kind"):
            open_index(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak * part < 300 << 20
