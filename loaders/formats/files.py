"""Loose files as records: list the files in a fixed order, and scan them.

A listing is a list of `Entry`s. Their paths are relative to one root, and written with `/`. `scan`
reads a listing. A folder is listed in the order of the paths' code points. This order is the same
on every machine.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from twinfeed.loaders.errors import DataCorruptionError, ShardWarning, UnsafeContentError
from twinfeed.loaders.formats.records import TOO_LONG, OnBad, Range, Record
from twinfeed.loaders.formats.sniff import is_index
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import read_file

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm")
"""The extensions of images."""


class Entry(NamedTuple):
    """One record of loose files: key, path of each field relative to the root, and label, if known.

    >>> Entry("cat/1", {"image": "cat/1.jpg"}, "cat").label
    'cat'
    """

    key: str
    paths: dict[str, str]
    label: str | None = None


def folder(root: str | os.PathLike[str], /, *, extensions: Iterable[str] = IMAGES) -> list[Entry]:
    """List the images of a directory tree, one record each, labelled by their folder below `root`.

    The label is the first folder of the path, as in torchvision's ImageFolder. A file of `root`
    itself has no label. The key is the path without its extension. Where two files differ only in
    the extension, their keys keep the extension. Hidden files, indexes and other extensions
    (compared in lower case) are left out. Links to folders are not followed. A ShardWarning counts
    the files that are not images, and the links within folders, unless the caller names extensions.

    Raises:
        FileNotFoundError: a missing root.
        NotADirectoryError: a root that is a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     Path(root, "cat").mkdir()
    ...     Path(root, "cat", "1.jpg").touch()
    ...     folder(root)
    [Entry(key='cat/1', paths={'image': 'cat/1.jpg'}, label='cat')]
    """
    wanted = {extension.lower().lstrip(".") for extension in extensions}
    found = _below(root)
    paths = [path for path in found if os.path.splitext(path)[1][1:].lower() in wanted]
    if extensions is IMAGES and len(paths) < len(found):
        _warn_of_others(root, set(found).difference(paths))
    stems = [os.path.splitext(path)[0] for path in paths]
    times = Counter(stems)
    return [
        Entry(
            stem if times[stem] == 1 else path,
            {"image": path},
            path.partition("/")[0] if "/" in path else None,
        )
        for stem, path in zip(stems, paths, strict=True)
    ]


def empty_classes(root: str | os.PathLike[str], entries: Iterable[Entry], /) -> str | None:
    """Name the folders directly below `root` that hold no entry, links to folders included.

    Returns None if every folder has an entry, and if no entry lies in a folder.
    """
    held = {entry.label for entry in entries} - {None}
    found = [path for path in Path(root).iterdir() if path.is_dir() and path.name not in held]
    names = sorted(path.name for path in found if path.name[0] != "." and not is_index(path))
    if not held or not names:
        return None
    return (
        f"class folders without images below {os.fspath(root)} ({len(names)}: "
        f"{', '.join(names[:5])}); links to folders are not followed"
    )


def _below(root: str | os.PathLike[str]) -> list[str]:
    """List the files below `root`, sorted, without hidden files and indexes.

    A link to a folder that lies in a folder ends in "/". It is not followed.
    """
    found = []
    for place, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [
            name for name in folders if not name.startswith(".") and not is_index(Path(place, name))
        ]
        inside = os.path.relpath(place, root)
        prefix = "" if inside == "." else f"{inside}/"
        links = [f"{name}/" for name in folders if prefix and Path(place, name).is_symlink()]
        found += [prefix + name for name in names + links if not name.startswith(".")]
    return sorted(found)


def scan(
    root: str | os.PathLike[str],
    entries: Iterable[Entry],
    /,
    *,
    max_record_bytes: int = LIMITS.record_bytes,
    on_bad: OnBad | None = None,
) -> Iterator[Record]:
    """Read the files of every entry, and yield a record. Memory is bounded by the longest record.

    The record's `header` is made of the paths and sizes. `on_bad` is called with the error of a
    record that is too long, and the scan goes on.

    Raises:
        FileNotFoundError: a missing file.
        UnsafeContentError: a path that leaves `root` (also through a link).
        DataCorruptionError: a record longer than `max_record_bytes`.
    """
    places = Places(root)
    for number, entry in enumerate(entries):
        paths = tuple(entry.paths.values())
        full = [places.find(path) for path in paths]
        sizes = [os.stat(path).st_size for path in full]
        if sum(sizes) > max_record_bytes:
            error = DataCorruptionError(
                f"record longer than max_record_bytes={max_record_bytes}",
                path=paths[0],
                record=number,
                key=entry.key,
                found=f"{sum(sizes)} bytes",
                advice=TOO_LONG,
            )
            if on_bad is None:
                raise error
            on_bad(error)
            continue
        fields = {}
        for place, (field, path) in enumerate(zip(entry.paths, full, strict=True)):
            data = read_file(path, max_record_bytes)
            fields[field] = Range("bytes", place, 0, len(data), data, 0)
        header = "".join(f"{path}\0{size}\n" for path, size in zip(paths, sizes, strict=True))
        octets = header.encode("utf-8", "surrogateescape")
        yield Record(0, sum(sizes), entry.key, fields, octets, number, paths, entry.label)


class Places:
    """Find files below a root, and remember where their folders are."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.realpath(root)
        self.folders: dict[str, str] = {}

    def find(self, path: str) -> str:
        """Return the full path of a file. With links followed, it must lie below the root."""
        folder, name = os.path.split(path)
        if folder not in self.folders:
            self.folders[folder] = os.path.realpath(os.path.join(self.root, folder))
        full = os.path.join(self.folders[folder], name)
        if os.path.islink(full) or name in (".", ".."):
            full = os.path.realpath(full)
        if os.path.isabs(path) or not full.startswith(self.root.rstrip("/") + "/"):
            raise UnsafeContentError(
                f"path leaves its root: {path!r}",
                path=self.root,
                found=full,
                advice="give a root that holds all the files, also the files that links lead to",
            )
        return full


def _warn_of_others(root: str | os.PathLike[str], others: Collection[str]) -> None:
    """Warn that files that are not images, and links to folders, are left out."""
    kinds = Counter(
        "link" if path.endswith("/") else os.path.splitext(path)[1].lower() or "no extension"
        for path in sorted(others)
    )
    counts = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common(5))
    warnings.warn(
        f"files below {os.fspath(root)} are not images and are left out ({len(others)}: {counts}), "
        f"such as {min(others)}",
        ShardWarning,
        stacklevel=3,
    )


def _raise(error: OSError) -> None:
    """Raise the error of a folder that cannot be read."""
    raise error
