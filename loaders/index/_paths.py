"""Paths of shards and files: always relative to a root, never leading out of it."""

from __future__ import annotations

import errno
import glob
import os
import posixpath
import re
from collections.abc import Sequence
from pathlib import Path

from twinfeed.loaders.errors import REBUILD, IndexFormatError, StaleIndexError, UnsafeContentError
from twinfeed.loaders.formats.files import Places

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a Path has lost the second slash
_CLOUDS = {"abfs", "abfss", "adl", "az", "gcs", "gs", "hf", "oci", "oss", "r2", "s3", "s3a"}
_STORES = {*_CLOUDS, "hdfs", "http", "https", "memory", "webhdfs"}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(//)?")


PLACING = ".twinfeed-placing"
"""A packer moves its new files into place through this folder, inside the folder that it writes to.
For each index NAME the folder holds a file `NAME.placing`.
"""


def refuse_unfinished(folder: str | os.PathLike[str], index: str | None = None, /) -> None:
    """Raise IndexFormatError where an unfinished pack has mixed old and new shards in `folder`.

    With `index`, only the index of this name counts.
    """
    placing = os.path.join(folder, PLACING)
    if os.path.exists(placing if index is None else os.path.join(placing, f"{index}.placing")):
        raise IndexFormatError(
            "old shards and new ones are mixed here: a pack is still putting its files in place, "
            "or was killed before the end",
            path=folder,
            advice="wait until this pack has ended; if the pack was killed, pack to this folder "
            "again (the next pack first finishes the work of the killed pack)",
        )


def is_url(path: str) -> bool:
    """Tell a URL from a local path."""
    return "://" in path


def remembered_root(url: str | None, folder: str) -> str:
    """Return the root of the shards of an index: the URL in the index, or `folder`.

    Only the schemes of stores are accepted. Other schemes, such as `file://` or `zip://`, would
    let an index lead to any file of this machine.
    """
    if url is not None and url.partition("://")[0] in _STORES and "::" not in url:
        return url
    return folder


def to_write(path: str | os.PathLike[str]) -> Path:
    """Return the full path of a file or folder to write; raise ValueError for a URL."""
    text = os.fspath(path)
    if _URL.match(text):
        raise ValueError(
            f"{text.partition('?')[0]} is a URL: write to a local folder and upload the folder; "
            "to read shards from a URL, give root="
        )
    return Path(os.path.abspath(text))


def inside(path: str) -> str:
    """Return `path` if it is relative and stays below its root; raise UnsafeContentError if not."""
    parts = path.split("/")
    if not path or path.startswith("/") or ".." in parts or "\0" in path or _SCHEME.match(path):
        raise UnsafeContentError(
            f"unsafe path {path!r}: it must be relative and stay below its root",
            path=path,
            advice="keep the shards below one folder; open the index with root= that folder",
        )
    return path


def join(root: str, path: str) -> str:
    """Return the full path or URL of `path`, which must stay below `root`."""
    return posixpath.join(root, inside(path))


def below(folder: str, path: str) -> str:
    """Return the real path of a file; raise UnsafeContentError if the path leaves `folder`."""
    return Places(folder).find(inside(path))


def relative_to(root: str, path: str) -> str:
    """Return `path` relative to `root`, with "/"; raise ValueError for a path outside `root`."""
    if is_url(root):
        base = root if root.endswith("/") else f"{root}/"
        if not path.startswith(base):
            raise ValueError(f"shards must lie below the root {root}, not at {path}")
        return inside(path[len(base) :])
    relative = os.path.relpath(path, root).replace(os.sep, "/")
    if relative.startswith("../"):
        raise ValueError(
            f"shards must lie below the root {root}, not at {path}: "
            "give root= a folder that holds them all"
        )
    return inside(relative)


def check_shards(root: str, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Compare the size of every local shard with its size in the index."""
    for name in names:
        inside(name)
    if is_url(root):
        return
    missing, changed = [], []
    for name, expected in zip(names, sizes, strict=True):
        try:
            found = os.stat(f"{root}/{name}").st_size
        except FileNotFoundError:
            missing.append(name)
            continue
        if found != expected:
            changed.append((name, expected, found))
    if missing:
        elsewhere = _other_root(root, names) if len(missing) == len(names) else None
        raise FileNotFoundError(
            errno.ENOENT,
            f"{len(missing)} of {len(names)} shards are missing here: {', '.join(missing[:5])}; "
            f"restore them, or give root= {elsewhere or 'the folder that holds them'} (an index "
            "that was built with root= needs root= when it is opened)",
            root,
        )
    if changed:
        name, expected, found = changed[0]
        raise StaleIndexError(
            f"{len(changed)} of {len(names)} shards have changed since they were indexed",
            path=join(root, name),
            expected=f"{expected} bytes",
            found=f"{found} bytes",
            advice=f"restore the shards, or {REBUILD}",
        )


def stale_file(path: str, expected: int | str, found: int | str) -> StaleIndexError:
    """Return the error of a file whose size (or tag) differs from the index."""
    return StaleIndexError(
        "the file has changed since it was indexed",
        path=path,
        expected=f"{expected} bytes" if isinstance(expected, int) else expected,
        found=f"{found} bytes" if isinstance(found, int) else found,
        advice=f"restore the file, or {REBUILD}",
    )


def _other_root(root: str, names: Sequence[str]) -> str | None:
    """Return the folder directly above or below `root` that has all shards, or None."""
    root = os.path.abspath(root)
    near = [os.path.dirname(root), *sorted(glob.glob(f"{glob.escape(root)}/*"))]
    for folder in near:
        if all(os.path.isfile(f"{folder}/{name}") for name in names):
            return folder
    return None
