"""Loose files as records: an `Entry` names the files of a record."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from twinfeed.loaders.errors import DataCorruptionError, UnsafeContentError
from twinfeed.loaders.formats.records import TOO_LONG, OnBad, Range, Record, raise_error
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import read_file


class Entry(NamedTuple):
    """A record of loose files: its key, the path of each field relative to the root, and its label.

    Paths are written with "/".

    >>> Entry("cat/1", {"image": "cat/1.jpg"}, "cat").label
    'cat'
    """

    key: str
    paths: dict[str, str]
    label: str | None = None


def scan(
    root: str | os.PathLike[str],
    entries: Iterable[Entry],
    /,
    *,
    max_record_bytes: int = LIMITS.record_bytes,
    on_bad: OnBad = raise_error,
) -> Iterator[Record]:
    """Yield the record of each entry, with the bytes of its files; one record is in memory at a
    time.

    The record's `header` has the paths and sizes of the files. `on_bad` is called with the error of
    a record that is too long, and the scan continues.
    """
    resolver = PathResolver(root)
    for number, entry in enumerate(entries):
        paths = tuple(entry.paths.values())
        full_paths = [resolver.resolve(path) for path in paths]
        # By the paths of links, so that the error of one that dangles names it, not its target.
        sizes = [os.stat(os.path.join(root, path)).st_size for path in paths]
        size = sum(sizes)
        if size > max_record_bytes:
            problem = f"record longer than max_record_bytes={max_record_bytes}"
            where: dict[str, Any] = {"path": paths[0], "record": number, "key": entry.key}
            on_bad(DataCorruptionError(problem, **where, found=f"{size} bytes", advice=TOO_LONG))
            continue
        fields = {}
        for file_number, (field, path) in enumerate(zip(entry.paths, full_paths, strict=True)):
            data = read_file(path, max_record_bytes)
            fields[field] = Range("bytes", 0, len(data), data, file_number)
        lines = [f"{path}\0{size}\n" for path, size in zip(paths, sizes, strict=True)]
        header = "".join(lines).encode("utf-8", "surrogateescape")
        yield Record(0, sum(sizes), entry.key, fields, header, number, paths, entry.label)


class PathResolver:
    """Resolve paths below a root; the real paths of folders are cached."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.realpath(root)
        self.folders: dict[str, str] = {}

    def resolve(self, path: str) -> str:
        """Return the absolute path of a file.

        Raises:
            UnsafeContentError: the path, after links are followed, is not below the root.
        """
        folder, name = os.path.split(path)
        if folder not in self.folders:
            self.folders[folder] = os.path.realpath(os.path.join(self.root, folder))
        full_path = os.path.join(self.folders[folder], name)
        if os.path.islink(full_path) or name in (".", ".."):
            full_path = os.path.realpath(full_path)
        if os.path.isabs(path) or not full_path.startswith(self.root.rstrip("/") + "/"):
            raise UnsafeContentError(
                f"path leaves its root: {path!r}",
                path=self.root,
                found=full_path,
                advice="give a root that holds all the files, also the files that links lead to",
            )
        return full_path
