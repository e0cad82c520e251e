"""The corpus of damage to any file, to indexes and to parts of builds.

An index is a folder that is changed with the right checksums. The bytes of shards are in
`damaged_shards`.
"""

from __future__ import annotations

import json
import random
import zipfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from support.inside import LIMITS, MANIFEST, VERSION, StringColumn, file_digest, json_digest

# What is left of a file that was cut. A byte less at its end may be a mere newline less.
CUTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "half": lambda data: data[: len(data) // 2],
    "two bytes short": lambda data: data[:-2],
}

NUMBERS = (0, 1, -1, 127, 128, 255, 256, 511, 512, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1)


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Return bytes with a few changes of the kinds that break parsers."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 8))):
        place = draw.randrange(len(out) + 1)
        kind = draw.randrange(7)
        if kind == 0 and place < len(out):
            out[place] ^= 1 << draw.randrange(8)
        elif kind == 1 and place < len(out):
            out[place] = draw.randrange(256)
        elif kind == 2:
            number = draw.choice(NUMBERS) & (1 << 64) - 1
            out[place : place + 8] = number.to_bytes(8, draw.choice(("little", "big")))
        elif kind == 3:
            del out[place : place + draw.choice((1, 7, 512, 1024))]
        elif kind == 4:
            out[place:place] = draw.randbytes(draw.choice((1, 7, 512)))
        elif kind == 5:
            start = draw.randrange(len(out) + 1)
            out[place:place] = out[start : start + draw.choice((4, 512, 1024))]
        else:
            del out[place:]
    return bytes(out)


def change(value: Any, draw: random.Random) -> None:
    """Change something within a JSON value."""
    while isinstance(value, (dict, list)) and value:
        place = draw.choice(sorted(value) if isinstance(value, dict) else range(len(value)))
        inner = value[place]
        if not isinstance(inner, (dict, list)) or not inner or draw.random() < 0.2:
            choices = (None, True, "", "../x", -1, 1.5, 1 << 62, [], {}, [[]], "a" * 99, "\udcff")
            value[place] = draw.choice((*choices, inner))
            if draw.random() < 0.2 and isinstance(value, dict):
                del value[place]
            return
        value = inner


def with_entry(file: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change an entry of a zip, with the right checksum."""
    with zipfile.ZipFile(file) as archive:
        entries = {entry: archive.read(entry) for entry in archive.namelist()}
    entries[name] = change(entries[name])
    with zipfile.ZipFile(file, "w") as archive:
        for entry, data in entries.items():
            archive.writestr(entry, data)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of an index, with the right checksum."""
    file = folder / MANIFEST
    manifest = json.loads(file.read_text())
    del manifest["checksum"]
    change(manifest)
    file.write_text(json.dumps(manifest | {"checksum": json_digest(manifest)}))


def with_array(folder: Path, name: str, array: np.ndarray[Any, Any]) -> None:
    """Put another array into an index, with the right checksums."""
    (file,) = folder.glob(f"columns-*/{name}.npy")
    np.save(file, array)
    entry = {"bytes": file.stat().st_size, "sha256": file_digest(file)}
    entry |= {"shape": list(array.shape), "dtype": np.lib.format.dtype_to_descr(array.dtype)}
    rewrite(folder, lambda manifest: manifest["arrays"].update({name: entry}))


def with_shard_names(folder: Path, *names: str) -> None:
    """Have an index name these shards, with the right checksums."""
    for array, values in StringColumn.of(names).arrays("shardpaths").items():
        with_array(folder, array, values)


def with_root(folder: Path, root: str) -> Path:
    """Have an index name this root, with the right checksum."""
    rewrite(folder, lambda manifest: manifest["options"].update(root=root))
    return folder


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


MANIFESTS: dict[tuple[Any, ...], tuple[Any, ...]] = {
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
    ("fields",): ([[]], None, "x", [None], [{}], [{"name": []}]),
    ("fields", 0, "name"): ([], None, 1),
    ("fields", 0, "kind"): ([], None, 1, "x", True),
    ("fields", 0, "missing"): ([], None, -1, float("inf")),
    ("class_order",): ([], 1, {}),
    ("digests",): ([], None),
    ("fingerprint",): ([], None),
    ("folder",): ([], None, "columns-../../../../x", "/etc", "columns-0123456789abcdeF"),
    ("options",): ([], None, {}, {"root": None, "what": 1}, {"missing": "never"}),
    ("options", "root"): ([], 1, {}),
    ("container",): ([], None, "zip"),
}


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
    "shifted": lambda a: a + 1,
}

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


def with_many_arrays(manifest: dict[str, Any]) -> None:
    entry = manifest["arrays"]["shards"]
    manifest["arrays"] |= {f"more-{n}": entry for n in range(LIMITS.arrays)}


def changed_indexes() -> Iterator[tuple[str, Callable[[Path], object], str]]:
    """What is wrong, how an index is changed, a word of the error."""
    for path, values in MANIFESTS.items():
        for value in values:
            change = at(*path, value=value)
            what = f"{'.'.join(map(str, path))}={value!r:.20}"
            yield what, lambda folder, change=change: rewrite(folder, change), ""
    for name, how in product(("records", "starts", "sizes"), ORDERS):

        def reorder(folder: Path, name: str = f"classorder-{name}", how: str = how) -> None:
            with_array(folder, name, ORDERS[how](array_of(folder, name)))

        yield f"classorder-{name} {how}", reorder, ""
    for expression, names in ARRAYS.items():
        for name in names:

            def rearrange(folder: Path, name: str = name, expression: str = expression) -> None:
                found = eval(expression, {"np": np, "array": array_of(folder, name)})
                with_array(folder, name, found)

            yield f"{name}: {expression}", rearrange, "damaged index"
    objects = at("arrays", "shardsums", "dtype", value="|O")
    yield "objects", lambda folder: rewrite(folder, objects), "shardsums.npy cannot be read"
    yield "many arrays", lambda folder: rewrite(folder, with_many_arrays), "bad arrays"
    newer = at("version", value=VERSION + 2)
    word = f"index version {VERSION + 2}, and this library reads version {VERSION}"
    yield "a newer version", lambda folder: rewrite(folder, newer), word
    for text, word in (("[]", "not an index"), ("[" * 200_000, "is not JSON")):
        yield text[:2], lambda folder, text=text: (folder / MANIFEST).write_text(text), word


INDEXES = {what: (change, word) for what, change, word in changed_indexes()}


def array_of(folder: Path, name: str) -> np.ndarray[Any, Any]:
    (file,) = folder.glob(f"columns-*/{name}.npy")
    return np.load(file)
