"""Read and validate the manifest of an index."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from twinfeed.loaders.errors import IndexFormatError, LoaderError
from twinfeed.loaders.formats.records import CONTAINERS
from twinfeed.loaders.storage.url import Location
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import open_file, read_file

MANIFEST = "manifest.json"
FORMAT = "twinfeed index"
VERSION = 3
"""The file that makes a folder an index, and the format and version that the file names."""

CHUNK = 1 << 24
"""The number of bytes hashed at a time."""


def is_index(path: Path, /) -> bool:
    """Return whether a folder is that of an index."""
    manifest = path / MANIFEST
    with suppress(LoaderError):  # too long, or no longer a file
        return manifest.is_file() and FORMAT.encode() in read_file(manifest, LIMITS.manifest_bytes)
    return False


def read_manifest(path: Path, source: object = None) -> dict[str, Any]:
    """Read and check the manifest of the index in the folder `path`; errors name `source`."""
    file, source = path / MANIFEST, source or path
    error = partial(IndexFormatError, path=source)
    try:
        text = read_file(file, LIMITS.manifest_bytes)
    except (FileNotFoundError, NotADirectoryError):
        raise no_index_error(path) from None
    except LoaderError as reason:
        problem = f"damaged index: {MANIFEST} is {reason.problem}"
        raise error(problem, expected=reason.expected, found=reason.found) from None
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise error(f"incomplete index: {MANIFEST} is not JSON", found=reason) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise error(f"not an index: {MANIFEST} is of another kind")
    version = manifest.get("version")
    if version != VERSION:
        raise error(f"index version {version}, and this library reads version {VERSION}")
    checksum = manifest.pop("checksum", None)
    found = json_digest(manifest)
    if checksum != found:
        problem = f"damaged index: the checksum of {MANIFEST} does not match"
        raise error(problem, expected=checksum, found=found)
    try:
        check_manifest(manifest)
    except (AttributeError, KeyError, TypeError, ValueError) as reason:
        raise invalid_manifest(source, reason) from None
    return manifest


def invalid_manifest(source: object, reason: Exception, /) -> IndexFormatError:
    """Return the error for a manifest with a correct checksum but an impossible value."""
    found = f"{type(reason).__name__}: {reason}"
    problem = "damaged index: the manifest contains an impossible value"
    return IndexFormatError(problem, path=source, found=found)


def array_files(manifest: Mapping[str, Any], /) -> dict[str, int]:
    """Return the size in bytes of each array file, by its path relative to the index."""
    folder = manifest["folder"]
    return {f"{folder}/{name}.npy": entry["bytes"] for name, entry in manifest["arrays"].items()}


def no_index_error(path: Path | Location, /) -> FileNotFoundError:
    """Return the error for a path without an index, with the command that builds one there."""
    shards, out = "SHARDS", path if isinstance(path, Path) else Path("train.index")
    if out.is_file():
        shards, out = str(out), out.with_suffix(".index")
    elif out.is_dir():
        out = out / "train.index"
    command = shlex.join(["twinfeed", "index", shards, "--out", str(out)])
    problem = f"no index here (no {MANIFEST}); check the name, or build one: {command}"
    return FileNotFoundError(errno.ENOENT, problem, str(path))


def json_digest(data: object) -> str:
    """Return the SHA-256 of `data` as canonical JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with open_file(file) as data:
        return hashlib.file_digest(data, "sha256").hexdigest()  # type: ignore[arg-type]


ARRAY_NAME = re.compile(r"[a-z]+(-[a-z0-9]+)*")


CLASS_ORDER = {f"classorder-{name}": name for name in ("records", "starts", "sizes")}
"""By the name of each array of the class order, the argument of `ClassOrder` that it is."""


ARRAYS_FOLDER = re.compile(r"columns-[0-9a-f]{16}")
"""The names of folders in an index that contain its arrays."""


def check_manifest(manifest: Mapping[str, Any], /) -> None:
    """Raise ValueError, KeyError or TypeError if a value of a manifest is missing or impossible."""
    arrays, fields, columns = manifest["arrays"], manifest["fields"], manifest["columns"]
    _require("folder", ARRAYS_FOLDER.fullmatch(manifest["folder"]))
    _require("arrays", len(arrays) <= LIMITS.arrays)
    for name, entry in arrays.items():
        _require(name, ARRAY_NAME.fullmatch(name) and 0 < len(entry["shape"]) < 3)
        _require(name, all(map(_is_natural, [entry["bytes"], *entry["shape"]])))
    _require("container", manifest["container"] in CONTAINERS)
    _require("records", _is_natural(manifest["records"]))
    num_missing = [field["missing"] for field in fields]  # of the records
    _require("fields", all(_is_natural(n) and n <= manifest["records"] for n in num_missing))
    for kind, names in {"fields": [f["name"] for f in fields], "columns": columns}.items():
        _require(kind, all(isinstance(name, str) for name in names))
        _require(kind, len(set(names)) == len(names))
    _require("fingerprint", isinstance(manifest["fingerprint"], str))
    order, root = manifest["class_order"], manifest["options"]["root"]
    _require("class_order", order is None or arrays.keys() >= CLASS_ORDER.keys())
    _require("class_order or root", isinstance(order, str | None) and isinstance(root, str | None))


def _require(name: str, is_valid: object) -> None:
    """Raise ValueError unless `is_valid`; the error says that the value `name` is bad."""
    if not is_valid:
        raise ValueError(f"bad {name[:40]}")


def _is_natural(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
