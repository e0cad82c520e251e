"""Indexes of other programs: read with every claim verified, and written for others.

`tfrecord2idx` (NVIDIA DALI, the tfrecord package) writes a line `offset length` for each record,
framing included. wids (webdataset's random access) has a JSON object with a list of shards, their
sizes, MD5 sums and numbers of samples.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.atomic import replace_file
from twinfeed.loaders.errors import IndexFormatError, StaleIndexError, UnsafeContentError
from twinfeed.loaders.formats import tar, tfrecord
from twinfeed.loaders.formats.opening import open_shard

PathLike = str | os.PathLike[str]
WIDS_KIND = "wids-shard-index-v1"
_ENTRY: dict[str, type | UnionType] = {
    "url": str,
    "nsamples": int,
    "filesize": int | None,
    "md5sum": str | None,
}
_LINE = re.compile(rb"(\d{1,19}) (\d{1,19})\s*")


class WidsShard(NamedTuple):
    """One shard of a wids index: path, number of samples, and size and MD5 sum where given.

    >>> WidsShard("a.tar", 3).bytes is None
    True
    """

    path: str
    samples: int
    bytes: int | None = None
    md5: str | None = None


def read_tfrecord2idx(index: PathLike, shard: PathLike, /) -> npt.NDArray[np.int64]:
    """Return the (offset, length) of each record of `shard` that `index` lists, int64[n, 2].

    Lengths include the framing. Every line is checked against the shard: records follow each other
    from the first byte to the last, and each header's length and checksum agree. Data are not read.

    Raises IndexFormatError for a line that is no pair of numbers, StaleIndexError where the shard
    is another.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with tfrecord.TFRecordWriter(f"{folder}/a.tfrecord") as writer:
    ...         writer.write(b"abc")
    ...     _ = write_tfrecord2idx(f"{folder}/a.tfrecord", f"{folder}/a.idx")
    ...     read_tfrecord2idx(f"{folder}/a.idx", f"{folder}/a.tfrecord")
    array([[ 0, 19]])
    """
    shard = os.fspath(shard)
    ranges: list[tuple[int, int]] = []
    expected = 0
    with open(index, "rb") as lines, open_shard(shard) as file:
        size = os.fstat(file.fileno()).st_size
        for number, line in enumerate(lines):
            match = _LINE.fullmatch(line)
            if not match:
                raise IndexFormatError(
                    f"line {number + 1} is not an offset and a length",
                    path=index,
                    found=line[:40],
                    advice="write the index again: tfrecord2idx, or write_tfrecord2idx",
                )
            offset, length = int(match[1]), int(match[2])
            header = os.pread(file.fileno(), tfrecord.HEADER, expected)
            if offset != expected or tfrecord.framed_length(header) != length:
                raise _stale(index, shard, number, expected, (offset, length))
            ranges.append((offset, length))
            expected += length
    if expected != size:
        raise _stale(index, shard, len(ranges), expected, size)
    return np.array(ranges, np.int64).reshape(-1, 2)


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


def read_wids(
    index: PathLike, /, *, verify: bool = True, allow_outside: bool = False
) -> list[WidsShard]:
    """Return the shards of a wids index, their paths joined to the index's folder (and its `base`).

    With `verify`, sizes, MD5 sums and the numbers of samples are compared with the shards, which
    are read whole. A path that leaves the index's folder, or a URL, is refused unless
    `allow_outside`; an index that refers to further indexes by `source_url` is refused.

    Raises IndexFormatError, StaleIndexError, UnsafeContentError and FileNotFoundError, and, when
    verifying, what `tar.scan` raises.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with tar.TarWriter(f"{folder}/a.tar") as writer:
    ...         writer.write("0001", {"txt": b"abc"})
    ...     write_wids([f"{folder}/a.tar"], f"{folder}/index.json")
    ...     read_wids(f"{folder}/index.json")[0].samples
    1
    """
    index = os.fspath(index)
    with open(index, "rb") as file:
        text = file.read()
    shards = []
    for entry, base in _wids_entries(index, text):
        url = os.path.join(base, entry["url"])
        if not allow_outside:
            _check_inside(index, url)
        path = url if "://" in url else os.path.join(os.path.dirname(index), url)
        shard = WidsShard(path, entry["nsamples"], entry.get("filesize"), entry.get("md5sum"))
        if verify:
            _verify(index, shard)
        shards.append(shard)
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


def _stale(
    index: PathLike, shard: str, record: int, offset: int, found: tuple[int, int] | int
) -> StaleIndexError:
    """Return the error of an index that is not the shard's."""
    return StaleIndexError(
        f"{os.fspath(index)} is not the index of this shard",
        path=shard,
        offset=offset,
        record=record,
        expected="a record header here, as long as the index says, up to the shard's end",
        found=f"in the index: {found}" if isinstance(found, tuple) else f"a shard of {found} bytes",
        advice="write the index again: tfrecord2idx, or write_tfrecord2idx",
    )


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
            advice="if you trust the index, index the shards that it names by their own paths, or "
            "read it with read_wids(allow_outside=True)",
        )


def _verify(index: str, shard: WidsShard) -> None:
    """Compare what the index says of a shard with the shard."""
    checks: list[tuple[str, int | str | None, Callable[[str], int | str]]] = [
        ("bytes", shard.bytes, os.path.getsize),
        ("MD5", shard.md5, _md5),
        ("samples", shard.samples, _samples),
    ]
    for what, expected, measure in checks:
        if expected is not None and (found := measure(shard.path)) != expected:
            raise StaleIndexError(
                f"{index} does not describe this shard",
                path=shard.path,
                expected=f"{what}: {expected}",
                found=found,
                advice="write the index again: widsindex create, or write_wids",
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
