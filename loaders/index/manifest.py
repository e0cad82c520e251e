"""The manifest of an index: read, and checked."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from twinfeed.loaders.errors import IndexFormatError, LoaderError
from twinfeed.loaders.formats.records import CONTAINERS
from twinfeed.loaders.formats.sniff import FORMAT, MANIFEST
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import open_file, read_file

VERSION = 3


CHUNK = 1 << 24


def read_manifest(path: Path, place: object = None) -> dict[str, Any]:
    """Read and check the manifest under `path`, which may be a copy of an index at `place`."""
    file, place = path / MANIFEST, place or path
    error = partial(IndexFormatError, path=place)
    try:
        text = read_file(file, LIMITS.manifest_bytes)
    except (FileNotFoundError, NotADirectoryError):
        if (path / "parts").is_dir() or any(path.glob(".columns-*")):
            problem = "incomplete index: its build was interrupted, or ended in an error"
            advice = "build it again with the same arguments, which keeps finished shards"
            raise error(problem, advice=advice) from None
        raise FileNotFoundError(errno.ENOENT, _no_index(path), str(path)) from None
    except LoaderError as wrong:
        problem = f"damaged index: {MANIFEST} is {wrong.problem}"
        raise error(problem, expected=wrong.expected, found=wrong.found) from None
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as wrong:
        raise error(f"incomplete index: {MANIFEST} is not JSON", found=wrong) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise error(f"not an index: {MANIFEST} is of another kind")
    version = manifest.get("version")
    if version != VERSION:
        raise error(f"index version {version}, and this library reads version {VERSION}")
    checksum = manifest.pop("checksum", None)
    found = digest_of(manifest)
    if checksum != found:
        problem = f"damaged index: the checksum of {MANIFEST} does not match"
        raise error(problem, expected=checksum, found=found)
    try:
        check(manifest)
    except (KeyError, TypeError, ValueError) as wrong:
        raise impossible(place, wrong) from None
    return manifest


def impossible(place: object, wrong: Exception, /) -> IndexFormatError:
    """Return the error of a manifest that no build writes, though its checksum is right."""
    found = f"{type(wrong).__name__}: {wrong}"
    problem = "damaged index: its manifest tells what cannot be"
    return IndexFormatError(problem, path=place, found=found)


def _no_index(path: Path) -> str:
    """Return the error of a path that is no index, with what is there."""
    if path.is_file():
        return f"a file, not an index; index it: {_command(path, path.with_suffix('.index'))}"
    held = sorted(each.parent.name for each in path.glob(f"[!.]*/{MANIFEST}"))
    new = path / "train.index" if path.is_dir() and any(path.iterdir()) else path
    found = [] if path.exists() else path.parent.glob(f"[!.]*.index/{MANIFEST}")
    return no_index(held, sorted(each.parent.name for each in found), new)


def no_index(held: Sequence[str], beside: Sequence[str], new: object, /) -> str:
    """Say which indexes are in a place, or else beside it, and how to build an index at `new`."""
    if held:
        return f"no index here, but in it: {', '.join(held[:5])}; open one of those"
    near = f", but beside it: {', '.join(beside[:5])}" if beside else f" (no {MANIFEST})"
    command = _command("SHARDS", str(new))
    return f"no index here{near}; check the name, or build one: {command}"


def _command(shards: Path | str, out: Path | str) -> str:
    return shlex.join(["twinfeed", "index", str(shards), "--out", str(out)])


def digest_of(data: object) -> str:
    """Return the SHA-256 of `data` as canonical JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with open_file(file) as data:
        while chunk := data.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


ARRAY_NAME = re.compile(r"[a-z]+(-[a-z0-9]+)*")


CLASS_ORDER = {f"classorder-{name}": name for name in ("records", "starts", "sizes")}
"""The arrays of the records' order by class, and what each is to a `ClassOrder`."""


COLUMNS = re.compile(r"columns-[0-9a-f]{16}")


def check(manifest: Mapping[str, Any], /) -> None:
    """Raise ValueError or KeyError for values of a manifest that no build writes."""
    _need("folder", COLUMNS.fullmatch(str(manifest["folder"])))
    arrays, fields, options = manifest["arrays"], manifest["fields"], manifest["options"]
    _need("arrays", isinstance(arrays, dict) and len(arrays) <= LIMITS.arrays)
    for name, entry in arrays.items():
        _need(name, ARRAY_NAME.fullmatch(name) and isinstance(entry, dict))
        _need(name, _whole(entry["bytes"]) and isinstance(entry["sha256"], str))
        shape = entry["shape"]
        _need(name, isinstance(shape, list) and 0 < len(shape) < 3 and all(map(_whole, shape)))
    _need("container", manifest["container"] in CONTAINERS)
    _need("records", _whole(manifest["records"]))
    _need("fields", isinstance(fields, list) and all(isinstance(each, dict) for each in fields))
    _names("fields", [field["name"] for field in fields])
    _need("fields", all(_whole(field["missing"]) for field in fields))
    _names("columns", manifest["columns"])
    order = manifest["class_order"]
    _need("class_order", isinstance(order, str | None))
    _need("class_order", order is None or arrays.keys() >= CLASS_ORDER.keys())
    _need("fingerprint", isinstance(manifest["fingerprint"], str))
    digests = manifest["digests"]
    _need("digests", isinstance(digests, dict) and _strings(digests.values()))
    _need("options", isinstance(options, dict))
    _need("root", isinstance(options["root"], str | None))


def _need(what: str, right: object) -> None:
    if not right:
        raise ValueError(f"bad {what[:40]}")


def _names(what: str, values: Sequence[object]) -> None:
    right = isinstance(values, list) and _strings(values) and len(set(values)) == len(values)
    _need(what, right)


def _strings(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _whole(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
