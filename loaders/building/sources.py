"""Find what an index is built of (shards or loose files), and divide it into jobs."""

from __future__ import annotations

import os
import posixpath
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from twinfeed.loaders.building.image_folder import empty_class_folders, list_images, no_images_error
from twinfeed.loaders.building.shards import expand
from twinfeed.loaders.errors import LoaderError, ShardWarning
from twinfeed.loaders.formats.files import Entry
from twinfeed.loaders.formats.records import Container
from twinfeed.loaders.formats.sniff import HEAD, is_tar
from twinfeed.loaders.index.manifest import MANIFEST
from twinfeed.loaders.index.paths import join, refuse_unfinished, relative_to
from twinfeed.loaders.storage.download import download
from twinfeed.loaders.storage.open_store import split, store_of
from twinfeed.loaders.storage.url import Location, Root, is_url, parse_location
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import open_shard
from twinfeed.loaders.support.temporary import temporary_folder

PathLike = str | os.PathLike[str]
Shards = PathLike | Iterable[PathLike] | Sequence[Entry]

FILES_PER_PART = 4096


class Job(NamedTuple):
    """A task of the build: to scan a shard, or consecutive loose files.

    `entries` are the records of loose files, and empty for a shard. Records are numbered within the
    job. Those in `exclude` are left out, and all records from number `exclude_from` on.

    >>> Job("train-00000.tar").entries
    ()
    """

    shard: str
    entries: tuple[Entry, ...] = ()
    exclude: frozenset[int] = frozenset()
    exclude_from: int | None = None

    def excludes(self, number: int | None) -> bool:
        """Return whether the record with this number is left out; False if it is not known."""
        if number is None:
            return False
        is_after = self.exclude_from is not None and number >= self.exclude_from
        return number in self.exclude or is_after


class ShardSource(NamedTuple):
    """All the jobs of an index, their container, and the root of their paths."""

    container: Container
    root: Root
    jobs: list[Job]


def find_source(
    shards: Shards,
    beside: PathLike | None,
    /,
    *,
    container: Container | None,
    root: PathLike | None,
    complete: bool = True,
) -> ShardSource:
    """Return a job for each shard, or for every `FILES_PER_PART` loose files.

    `shards` is a folder or a list of entries for loose files, else the names or patterns of shards.
    `root` is the folder to which paths are relative. Its default is the folder that contains
    `beside`. For shards at URLs, and without `beside`, it is the deepest folder of all shards.
    """
    entries = _loose_entries(shards)
    if entries is not None:
        folder, entries = _relative_entries(shards, entries, beside, root)
        starts = range(0, len(entries), FILES_PER_PART)
        jobs = [
            Job(f"files-{number:05d}", tuple(entries[start : start + FILES_PER_PART]))
            for number, start in enumerate(starts)
        ]
        return ShardSource("files", folder, jobs)
    names = _shard_names(shards, complete)
    for folder in {os.path.dirname(name) for name in names if not is_url(name)}:
        refuse_unfinished(folder)
    shards_root: Root
    if root is not None:
        shards_root = parse_location(root)
    elif is_url(names[0]):
        shards_root = _common_folder(names)
    elif beside is not None:
        shards_root = os.path.dirname(os.path.abspath(beside))
    else:
        shards_root = os.path.commonpath([os.path.dirname(os.path.abspath(n)) for n in names])
    if isinstance(shards_root, str):
        shards_root = os.path.abspath(shards_root)
    paths = [_relative(shards_root, name) for name in names]
    container = container or _container_of(shards_root, paths[0])
    return ShardSource(container, shards_root, [Job(path) for path in paths])


class LocalFile(NamedTuple):
    """A local file with the bytes of a shard, and the shard's ETag in an object store, if any."""

    path: str
    etag: str | None = None


@contextmanager
def local_copy(path: Root) -> Iterator[LocalFile]:
    """Yield a local file with the bytes of `path`: itself, or a temporary copy of an object.

    Raises:
        LoaderError: the object has more than `LIMITS.download_bytes`.
    """
    if isinstance(path, str):
        yield LocalFile(path)
        return
    with temporary_folder() as folder:
        copy = folder / "shard"
        info = download(*split(path), copy, LIMITS.download_bytes)
        yield LocalFile(str(copy), info.tag)


def job_states(root: Root, jobs: Sequence[Job]) -> list[str]:
    """Return for each job a text that identifies what its part is built from.

    It has the path, size and time (or ETag) of the shard or of each loose file, and the numbers of
    the excluded records. A part that an earlier build left is used again if its text is the same.
    """
    if isinstance(root, Location):
        infos = store_of(root).stat([job.shard for job in jobs], fresh=True)
        states = [[(job.shard, *info)] for job, info in zip(jobs, infos, strict=True)]
    else:
        states = [list(_file_states(root, job)) for job in jobs]
    return [
        repr([state, [entry.key for entry in job.entries], sorted(job.exclude), job.exclude_from])
        for job, state in zip(jobs, states, strict=True)
    ]


def _file_states(root: str, job: Job) -> Iterator[tuple[str, int | None, str | None]]:
    """Yield the path, the size and the modification time of each file of a job."""
    files = [file for entry in job.entries for file in entry.paths.values()]
    for path in files if job.entries else [job.shard]:
        status = os.stat(posixpath.join(root, path))
        yield path, status.st_size, str(status.st_mtime_ns)


def _loose_entries(shards: Shards) -> list[Entry] | None:
    """Return the `Entry` of each record, if an index of loose files is asked for.

    Loose files are files that are a field each, such as images. `shards` then is a local folder of
    images or a list of `Entry`. None is returned if it has the names of shards.
    """
    if isinstance(shards, (str, os.PathLike)):
        if is_url(os.fspath(shards)) or not os.path.isdir(shards):
            return None
        entries = list_images(shards)
        empty = empty_class_folders(shards, entries)
        if empty is not None:
            warnings.warn(f"{empty}, so they are not classes", ShardWarning, stacklevel=4)
        return entries
    items: list[Any] = list(shards) if isinstance(shards, Sequence) else []
    if not (items and all(isinstance(item, Entry) for item in items)):
        return None
    if not any(entry.paths for entry in items):
        raise ValueError("no Entry has a file: list the files of each one by field name")
    return items


def _relative_entries(
    shards: Shards, entries: list[Entry], beside: PathLike | None, root: PathLike | None
) -> tuple[str, list[Entry]]:
    """Return the root of loose files, and the entries relative to it."""
    images = shards if isinstance(shards, (str, os.PathLike)) else None
    if images is not None:
        if not entries:
            raise no_images_error(images)
        images = os.path.realpath(images)
    folder = os.path.abspath(root or os.path.dirname(os.path.abspath(beside or images or "index")))
    prefix = "." if images is None else relative_to(os.path.realpath(folder), images)
    if prefix == ".":
        return folder, entries
    return folder, [
        entry._replace(paths={name: f"{prefix}/{file}" for name, file in entry.paths.items()})
        for entry in entries
    ]


def _shard_names(shards: Any, complete: bool) -> list[str]:
    """Return the paths of the shards in order; raise LoaderError for a folder or an index."""
    names = expand(shards, complete=complete)
    for name in names:
        if name.endswith(("/", MANIFEST, ".npy")) or os.path.isdir(name):
            problem = "a folder, or a file of an index, and not a shard"
            advice = "give a pattern of shards alone, such as *.tfrecord or *.tar"
            raise LoaderError(problem, path=name, advice=advice)
    return names


def _relative(root: Root, shard: str) -> str:
    """Return the path of a shard relative to `root`, with links followed if it is not below `root`.

    Raises:
        ValueError: the shard is outside `root`.
        FileNotFoundError: there is no such file.
    """
    path = Location.of(shard) if is_url(shard) else os.path.abspath(shard)
    with suppress(ValueError):
        return relative_to(root, path)
    if isinstance(path, str):
        os.stat(path)
        root, path = os.path.realpath(str(root)), os.path.realpath(path)
    return relative_to(root, path)


def _common_folder(urls: Sequence[str]) -> Location:
    """Return the deepest folder that contains all `urls`."""
    files = [Location.of(url) for url in urls]
    split(min(files, key=lambda file: len(file.key)))  # raises an error for a URL without a file
    folder = posixpath.commonpath([file.parent.key for file in files])
    return replace(files[0], key=folder)


def _container_of(root: Root, shard: str) -> Container:
    """Return the container of a shard, by its file name or else by its first bytes."""
    name = posixpath.basename(shard)
    if name.endswith(".tar"):
        return "tar"
    if ".tfrec" in name:
        return "tfrecord"
    return "tar" if is_tar(read_head(join(root, shard))) else "tfrecord"


def read_head(path: Root, /) -> bytes:
    """Return the first bytes of a shard."""
    if isinstance(path, Location):
        store, name = split(path)
        return bytes(store.read(name, 0, HEAD).data)
    with open_shard(path) as file:
        return file.read(HEAD)
