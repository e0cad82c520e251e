"""Check and join the paths of shards, which are relative to a root and must stay below it."""

from __future__ import annotations

import errno
import os
import posixpath
import re
from collections.abc import Sequence
from pathlib import Path
from typing import overload

from twinfeed.loaders.errors import StaleIndexError, UnsafeContentError, printable
from twinfeed.loaders.formats.files import PathResolver
from twinfeed.loaders.storage.url import Location, Root, is_url, masked

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a Path has lost the second slash
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(//)?")


def output_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a file or folder to write; raise ValueError for a URL."""
    text = os.fspath(path)
    if is_url(text) or _URL.match(text):
        shown = printable(masked(text))  # a URL may contain a secret
        raise ValueError(f"{shown} is a URL: write to a local folder, and upload the folder")
    return Path(os.path.abspath(text))


def check_relative(path: str, *, is_object_key: bool = False) -> str:
    """Return a path of an index unchanged; UnsafeContentError unless it stays below its root.

    The key of an object may begin like a scheme, as in "a:/b". The path of a file may not.
    """
    parts = path.split("/")
    has_scheme = not is_object_key and _SCHEME.match(path)
    if "" in parts or ".." in parts or "\0" in path or has_scheme:
        raise UnsafeContentError(
            f"unsafe path {path!r}: it must be relative and stay below its root",
            path=path,
            advice="keep the shards below one folder; open the index with root= that folder",
        )
    return path


@overload
def join(root: str, path: str) -> str: ...
@overload
def join(root: Location, path: str) -> Location: ...
def join(root: Root, path: str) -> Root:
    """Join a root, a folder or a URL, and a relative path, which must stay below the root."""
    if isinstance(root, Location):
        return root / check_relative(path, is_object_key=True)
    return posixpath.join(root, check_relative(path))


def resolve_below(folder: str, path: str) -> str:
    """Return the path of a file below a folder; UnsafeContentError if a link leads out of it."""
    return PathResolver(folder).resolve(check_relative(path))


def relative_to(root: Root, path: Root) -> str:
    """Return the path of a file or URL relative to `root`; ValueError if it is not below."""
    if isinstance(root, Location) or isinstance(path, Location):
        both_urls = isinstance(root, Location) and isinstance(path, Location)
        below_root = path.below(root) if both_urls else None  # type: ignore[union-attr, arg-type]
        if below_root is not None:
            return check_relative(below_root, is_object_key=True)
    else:
        relative = os.path.relpath(path, root).replace(os.sep, "/")
        if not relative.startswith("../"):
            return check_relative(relative)
    raise ValueError(
        f"shards must lie below the root {root}, not at {path}: "
        "give root= a folder that holds them all (--root in a terminal)"
    )


def check_shards(root: Root, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Check that local shards exist with their sizes; at a URL, only the names."""
    for name in names:
        check_relative(name, is_object_key=isinstance(root, Location))
    if isinstance(root, Location):
        return
    missing = []
    for name, expected in zip(names, sizes, strict=True):
        try:
            found = os.stat(f"{root}/{name}").st_size
        except FileNotFoundError:
            missing.append(name)
            continue
        if found != expected:
            raise stale_file_error(join(root, name), expected, found)
    if missing:
        problem = f"{len(missing)} of {len(names)} shards are missing here"
        raise _missing_error(root, problem, missing)


def check_files(root: str, names: Sequence[str]) -> None:
    """Raise FileNotFoundError if none of these files exists below the root."""
    if not any(os.path.lexists(join(root, name)) for name in names):
        raise _missing_error(root, "the files of this index are missing here", names)


def _missing_error(root: str, problem: str, names: Sequence[str]) -> FileNotFoundError:
    """Return the error for files that are missing below a root; it names the first five."""
    shown = printable(", ".join(names[:5]))
    advice = "restore them, or give root= the folder that holds them (--root in a terminal)"
    return FileNotFoundError(errno.ENOENT, f"{problem}: {shown}; {advice}", root)


def stale_file_error(path: str, expected: int | str, found: int | str) -> StaleIndexError:
    """Return the error for a file whose size or ETag is not that in the index."""
    return StaleIndexError(
        "the file has changed since it was indexed",
        path=path,
        expected=f"{expected} bytes" if isinstance(expected, int) else expected,
        found=f"{found} bytes" if isinstance(found, int) else found,
    )
