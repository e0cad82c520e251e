"""Indexes of other programs: written for them, and those of wids read too.

`tfrecord2idx` (NVIDIA DALI, the tfrecord package) writes a line `offset length` for each record,
framing included. wids (webdataset's random access) has a JSON object with a list of shards, their
sizes, MD5 sums and numbers of samples.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from twinfeed.loaders.atomic import replace_file
from twinfeed.loaders.errors import IndexFormatError, UnsafeContentError
from twinfeed.loaders.formats import tar, tfrecord
from twinfeed.loaders.formats._opening import open_shard

PathLike = str | os.PathLike[str]
WIDS_KIND = "wids-shard-index-v1"
_ENTRY = {"url": str, "nsamples": int}


def write_tfrecord2idx(shard: PathLike, index: PathLike, /) -> int:
    r"""Write the `tfrecord2idx` text of a shard, and return its number of records.

    Every checksum is checked.

    Raises what `tfrecord.scan` raises.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with tfrecord.TFRecordWriter(f"{folder}/a.tfrecord") as writer:
    ...         writer.write(b"abc")
    ...     _ = write_tfrecord2idx(f"{folder}/a.tfrecord", f"{folder}/a.idx")
    ...     Path(folder, "a.idx").read_text()
    '0 19\n'
    """
    lines = [f"{record.offset} {record.length}\n" for record in tfrecord.scan(shard, example=False)]
    replace_file(Path(index), "".join(lines).encode())
    return len(lines)


def read_wids(index: PathLike, /) -> list[tuple[str, int]]:
    """Return the (path, number of samples) of each shard of a wids index; the paths are joined to
    the folder of the index (and its `base`).

    Raises IndexFormatError for what is no such index, and UnsafeContentError for a URL or a path
    that leaves the folder of the index. An index that refers to further indexes by `source_url` is
    refused too. The shards are not looked at.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with tar.TarWriter(f"{folder}/a.tar") as writer:
    ...         writer.write("0001", {"txt": b"abc"})
    ...     write_wids([f"{folder}/a.tar"], f"{folder}/index.json")
    ...     read_wids(f"{folder}/index.json")[0][1]
    1
    """
    index = os.fspath(index)
    with open(index, "rb") as file:
        text = file.read()
    shards = []
    for entry, base in _wids_entries(index, text):
        url = os.path.join(base, entry["url"])
        _check_inside(index, url)
        shards.append((os.path.join(os.path.dirname(index), url), entry["nsamples"]))
    return shards


def write_wids(shards: Iterable[PathLike], index: PathLike, /, *, name: str = "") -> None:
    """Write a wids index of tar shards, each read and checked once.

    Their paths are relative to the index's folder.

    Raises what `tar.scan` raises, and ValueError for a shard outside the index's folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with tar.TarWriter(f"{folder}/a.tar") as writer:
    ...         writer.write("0001", {"txt": b"abc"})
    ...     write_wids([f"{folder}/a.tar"], f"{folder}/index.json")
    ...     json.loads(Path(folder, "index.json").read_text())["shardlist"][0]["url"]
    'a.tar'
    """
    place = os.path.dirname(os.path.abspath(index))
    entries = []
    for shard in [os.fspath(each) for each in shards]:
        url = os.path.relpath(shard, place).replace(os.sep, "/")
        if url.startswith("../"):
            raise ValueError(f"shards must lie below the index's folder {place}, not at {shard}")
        facts = {"url": url, "md5sum": _md5(shard), "nsamples": _samples(shard)}
        entries.append(facts | {"filesize": os.path.getsize(shard)})
    described: dict[str, Any] = {"__kind__": WIDS_KIND, "wids_version": 1, "shardlist": entries}
    if name:
        described["name"] = name
    replace_file(Path(index), json.dumps(described, indent=2).encode() + b"\n")


def _wids_entries(index: str, text: bytes) -> list[tuple[dict[str, Any], str]]:
    """Return the shard entries of a wids index, each with the base of its URLs."""
    try:
        described = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wids_error(index, f"not JSON: {error}") from None
    if not isinstance(described, dict) or described.get("wids_version") != 1:
        raise _wids_error(index, "not a wids index of version 1")
    entries = []
    for part in [described, *_checked(index, described, "datasets", list)]:
        if not isinstance(part, dict) or "source_url" in part:
            raise _wids_error(index, "its datasets are elsewhere (source_url)")
        base = _checked(index, part, "base", str) or _checked(index, described, "base", str)
        for entry in _checked(index, part, "shardlist", list):
            _check_entry(index, entry)
            entries.append((entry, base))
    if not entries:
        raise _wids_error(index, "it lists no shards")
    return entries


def _checked(index: str, described: dict[str, Any], key: str, kind: type) -> Any:
    """Return a value of the given type, an empty one where there is none."""
    value = described.get(key) or kind()
    if not isinstance(value, kind):
        raise _wids_error(index, f"{key} is {value!r}")
    return value


def _check_entry(index: str, entry: Any) -> None:
    """Check the types of one shard's entry."""
    if not isinstance(entry, dict):
        raise _wids_error(index, f"a shard is {entry!r}, not an object")
    for key, kind in _ENTRY.items():
        if not isinstance(entry.get(key), kind):
            raise _wids_error(index, f"{key} of a shard is {entry.get(key)!r}")


def _wids_error(index: str, problem: str) -> IndexFormatError:
    """Return the error of a wids index that cannot be read."""
    advice = "write it again: widsindex create, or write_wids"
    return IndexFormatError(f"unreadable wids index: {problem}", path=index, advice=advice)


def _check_inside(index: str, url: str) -> None:
    """Refuse a path that leaves the folder of its index."""
    if "://" in url or url.startswith(("/", "pipe:")) or ".." in url.split("/"):
        raise UnsafeContentError(
            f"the index names a shard outside its folder: {url!r}",
            path=index,
            advice="if you trust the index, index the shards that it names by their own paths",
        )


def _md5(path: str) -> str:
    """Return the MD5 sum of a file, which wids uses to tell files apart, in hexadecimal."""
    digest = hashlib.md5(usedforsecurity=False)
    with open_shard(path) as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def _samples(path: str) -> int:
    """Return the number of samples of a tar shard."""
    return sum(1 for _ in tar.scan(path))
