"""An index whose checksums are right and whose values are not, from a disk and from a URL."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside import LIMITS, arrays, digest_of, file_digest, manifest
from making_shards import tars
from range_server import RangeServer

from twinfeed.loaders import (
    DiskCache,
    Index,
    IndexFormatError,
    LoaderError,
    StaleIndexError,
    build_index,
    open_index,
)
from twinfeed.samplers import PKBatchSampler


def made(folder: Path) -> Index:
    names = [f"class {n}" for n in range(7)]
    return build_index(
        tars(folder, shards=1), folder / "x.index", label="cls", classes=names, digest=True
    )


def rewrite(index: Index, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of an index, with the right checksum."""
    file = index.path / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["checksum"]
    change(manifest)
    file.write_text(json.dumps(manifest | {"checksum": digest_of(manifest)}))


@pytest.mark.parametrize("cached", [True, False])
def test_fault_78_a_manifest_that_differs_at_each_request(
    tmp_path: Path, server: RangeServer, cached: bool
) -> None:
    """And whose arrays are not there: a few attempts, then an error."""
    index = made(tmp_path)

    def changes(path: str, _: int) -> int | None:
        if path != "manifest.json":
            return 404
        rewrite(index, lambda manifest: manifest["options"].update(left_out=len(server.ranges)))
        return None

    server.fail = changes
    cache = DiskCache(tmp_path / "c", bytes=10**6) if cached else None
    with pytest.raises(StaleIndexError, match="replaced 3 times while it was copied") as caught:
        open_index(f"{server.url}/x.index", cache=cache)
    assert caught.value.path == f"{server.url}/x.index"
    asked = [name for name, _, _ in server.ranges]
    assert asked.count("x.index/manifest.json") < 10


GONE = object()


def at(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: Any) -> None:
        for step in path[:-1]:
            manifest = manifest[step]
        if value is GONE:
            del manifest[path[-1]]
        else:
            manifest[path[-1]] = value

    return change


BAD = {
    f"{'.'.join(map(str, path))}={value!r:.20}": at(*path, value=value)
    for path, values in {
        ("arrays", "shards"): ([], None, "x", 1, GONE),
        ("arrays", "shardlengths"): (GONE,),
        ("arrays", "shardsums"): (GONE,),
        ("arrays", "field-0"): (GONE,),
        ("arrays", "classes-text"): (GONE,),
        ("arrays", "keys-text"): (GONE,),
        ("arrays",): ([], None, "x", {"../x": {}}),
        ("arrays", "shards", "bytes"): (float("inf"), -1, 1 << 64, True, 1.5, "9", None, []),
        ("arrays", "shardsums", "shape"): ([3, 16], [-3, -32]),
        ("arrays", "shards", "shape"): (1, [], [-1], [1.0], [[1]], [1, 1, 1], "1", None),
        ("arrays", "shards", "dtype"): ([], None, "x", {}, [["bytes"]], "O", [[[]]]),
        ("arrays", "shards", "sha256"): ([], None, 0),
        ("records",): (float("inf"), -1, 1.0, None, [], "3", 1 << 63, 10**15, 29, GONE),
        ("columns",): ([[]], None, "label", [1], ["x", "x"], ["a", "b"]),
        ("fields",): ([[]], None, "x", {}, [None], [{}], [{"name": []}]),
        ("fields", 0, "name"): ([], None, 1),
        ("fields", 0, "kind"): ([], None, 1, "x", True),
        ("fields", 0, "missing"): ([], None, -1, float("inf")),
        ("class_order",): ([], 1, {}),
        ("digests",): ([], None, {"a": []}),
        ("fingerprint",): ([], None),
        ("folder",): ([], None, "columns-../../../../x", "/etc", "columns-0123456789abcdeF"),
        ("options",): ([], None, {}, {"root": None, "what": 1}, {"missing": "never"}),
        ("options", "root"): ([], 1, {}),
        ("container",): ([], None, "zip"),
    }.items()
    for value in values
}


@pytest.mark.parametrize("bad", BAD)
def test_a_manifest_of_wrong_values_is_refused(
    tmp_path: Path, server: RangeServer, bad: str
) -> None:
    index = made(tmp_path)
    rewrite(index, BAD[bad])
    for place in (index.path, f"{server.url}/x.index"):
        with pytest.raises(IndexFormatError):
            _ = open_index(place).class_order


def with_array(index: Index, name: str, array: np.ndarray[Any, Any]) -> Index:
    """Put another array into an index, with the right checksums."""
    file = index.path / index.manifest["folder"] / f"{name}.npy"
    np.save(file, array)
    entry = {"bytes": file.stat().st_size, "sha256": file_digest(file)}
    entry |= {"shape": list(array.shape), "dtype": np.lib.format.dtype_to_descr(array.dtype)}
    rewrite(index, lambda manifest: manifest["arrays"].update({name: entry}))
    return open_index(index.path)


ORDERS: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "one more": lambda a: np.append(a, a[-1:]),
    "one less": lambda a: a[:-1],
    "none": lambda a: a[:0],
    "of floats": lambda a: a.astype(np.float64),
    "of unsigned": lambda a: a.astype(np.uint32),
    "of bytes": lambda a: a.astype("S4"),
    "of two dimensions": lambda a: np.stack([a, a]),
    "of one number": lambda a: a[0],
    "huge": lambda a: np.append(a[:-1].astype(np.int64), 1 << 62),
    "negative": lambda a: np.append(a[:-1], -1),
    "doubled": lambda a: np.append(a[:-1], a[0]),
    "shifted": lambda a: a + 1,
}


@pytest.mark.parametrize("how", ORDERS)
@pytest.mark.parametrize("name", ["records", "starts", "sizes"])
def test_a_class_order_that_is_none_is_refused(tmp_path: Path, name: str, how: str) -> None:
    """It would give wrong records, or an error of numpy in the middle of a training."""
    index = made(tmp_path)
    order = index.class_order
    assert order
    array = ORDERS[how](np.array(getattr(order, name)))
    with pytest.raises(IndexFormatError):
        PKBatchSampler(with_array(index, f"classorder-{name}", array).class_order, p=2, k=2, seed=0)


ARRAYS: dict[str, tuple[str, ...]] = {
    "array[:-1]": ("shardlengths", "classes-text", "shardpaths-text", "keys-ends", "field-0"),
    "array[1:]": ("column-0", "shardsums"),
    "np.stack([array, array], axis=1)": ("shards", "shardstops", "field-0", "keys-ends"),
    "array[0]": ("shards", "shardstops", "field-0", "keys-ends", "keys-text"),
    "array[['bytes']].copy()": ("shards",),
    "array[['offset', 'length']].copy()": ("field-0",),
    "array.astype('<f8')": ("shardstops",),
    "array.astype('<u2')": ("shardpaths-ends", "classes-ends"),
    "array.astype('<i4')": ("column-0",),
    "array - 1": ("shardstops",),
}


@pytest.mark.parametrize("change", ARRAYS)
def test_an_array_of_another_type_length_or_dimension_is_refused(
    tmp_path: Path, change: str
) -> None:
    for name in ARRAYS[change]:
        index = made(tmp_path)
        array = eval(change, {"np": np, "array": np.array(index._arrays[name])})
        with pytest.raises(IndexFormatError, match="damaged index"):
            with_array(index, name, array)


@pytest.mark.parametrize("read_whole", [arrays.READ_WHOLE, 0])
def test_an_archive_or_objects_in_place_of_an_array_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_whole: int
) -> None:
    """numpy.load would open an archive, and unpack much from a few bytes."""
    monkeypatch.setattr(arrays, "READ_WHOLE", read_whole)
    index = made(tmp_path)
    rewrite(index, at("arrays", "shardsums", "dtype", value="|O"))
    with pytest.raises(IndexFormatError, match=r"shardsums\.npy cannot be read"):
        open_index(index.path)
    index = made(tmp_path)
    (file,) = index.path.glob("columns-*/column-0.npy")
    with file.open("wb") as out:
        np.savez_compressed(out, np.zeros(1000))
    entry = {"bytes": file.stat().st_size, "sha256": file_digest(file)}
    rewrite(index, lambda manifest: manifest["arrays"]["column-0"].update(entry))
    with pytest.raises(IndexFormatError, match=r"column-0\.npy cannot be read"):
        open_index(index.path)


@pytest.mark.parametrize("values", ["[]", "{}", '"ab"', "[[1,1]]", "1.5"])
def test_fault_79_a_manifest_takes_little_memory(
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
        with pytest.raises(IndexFormatError, match=r"a file of too many bytes|of another kind"):
            open_index(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak * part < 300 << 20


def test_more_arrays_than_an_index_has_are_refused(tmp_path: Path) -> None:
    index = made(tmp_path)
    entry = json.loads((index.path / "manifest.json").read_text())["arrays"]["shards"]
    many = {f"more-{n}": entry for n in range(LIMITS.arrays)}
    rewrite(index, lambda manifest: manifest["arrays"].update(many))
    with pytest.raises(LoaderError, match="bad arrays"):
        open_index(index.path)
