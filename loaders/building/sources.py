"""Find what an index is built of (shards or loose files), and divide it into jobs."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from twinfeed.loaders.building.image_folder import image_entries, list_images
from twinfeed.loaders.building.shards import expand
from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.formats.files import Entry
from twinfeed.loaders.formats.records import Container
from twinfeed.loaders.formats.sniff import (
    IMAGE_EXTENSIONS,
    SNIFF_BYTES,
    has_image_extension,
    is_tar,
)
from twinfeed.loaders.index.manifest import MANIFEST
from twinfeed.loaders.index.paths import join, relative_to
from twinfeed.loaders.storage.download import download
from twinfeed.loaders.storage.open_store import store_and_name, store_of
from twinfeed.loaders.storage.url import Location, Root, is_url, parse_location
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import open_shard
from twinfeed.loaders.support.temporary import temporary_folder
from twinfeed.samplers.validate import a_type

PathLike = str | os.PathLike[str]
Shards = PathLike | Iterable[PathLike] | Sequence[Entry]

FILES_PER_PART = 4096


class Job(NamedTuple):
    """A task of the build: to scan a shard, or consecutive loose files.

    `entries` are the records of loose files, and empty for a shard. Records are numbered within the
    job. Those in `exclude` are left out, and all records from number `stop` on. `exclude` has the
    key of each if it is known, and `unreadable` the numbers of those that could not be read.

    >>> Job("train-00000.tar").entries
    ()
    """

    shard: str
    entries: tuple[Entry, ...] = ()
    exclude: Mapping[int, str | None] = {}
    stop: int | None = None
    unreadable: frozenset[int] = frozenset()

    def excludes(self, number: int | None) -> bool:
        """Return whether the record with this number is left out; False if it is not known."""
        if number is None:
            return False
        return number in self.exclude or (self.stop is not None and number >= self.stop)


class ShardSource(NamedTuple):
    """All the jobs of an index, their container, and the root of their paths."""

    container: Container
    root: Root
    jobs: list[Job]


def find_source(
    shards: Shards,
    index_path: PathLike | None,
    /,
    *,
    container: Container | None,
    root: PathLike | None,
    complete: bool = True,
) -> ShardSource:
    """Return a job for each shard, or for every `FILES_PER_PART` loose files.

    `shards` is a folder or a list of entries for loose files, or names or patterns: of shards, or
    of images, which are loose files without labels of their own.
    `root` is the folder to which paths are relative. Its default is the folder that contains the
    index. For shards at URLs, and without an index, it is the deepest folder that contains all.
    """
    entries = _loose_entries(shards)
    if entries is not None:
        return _files_source(*_relative_entries(shards, entries, index_path, root))
    names = _shard_names(shards, complete)
    shards_root: Root
    if root is not None:
        shards_root = parse_location(root)
    elif is_url(names[0]):
        shards_root = _common_folder(names)
    elif index_path is not None:
        shards_root = os.path.dirname(os.path.abspath(index_path))
    else:
        folders = [os.path.dirname(os.path.abspath(name)) for name in names]
        shards_root = os.path.commonpath(folders)
    if isinstance(shards_root, str):
        shards_root = os.path.abspath(shards_root)
    paths = [_relative(shards_root, name) for name in names]
    if isinstance(shards_root, str) and all(map(has_image_extension, names)):
        return _files_source(shards_root, image_entries(paths))
    container = container or _container_of(shards_root, paths[0])
    return ShardSource(container, shards_root, [Job(path) for path in paths])


def _files_source(root: str, entries: Sequence[Entry]) -> ShardSource:
    """Return a job for every `FILES_PER_PART` records of loose files."""
    starts = range(0, len(entries), FILES_PER_PART)
    jobs = [
        Job(f"files-{number:05d}", tuple(entries[start : start + FILES_PER_PART]))
        for number, start in enumerate(starts)
    ]
    return ShardSource("files", root, jobs)


@contextmanager
def local_copy(path: Root) -> Iterator[tuple[str, str | None]]:
    """Yield a local file with the bytes of `path`, if need be a temporary copy, and an object's
    ETag.
    """
    if isinstance(path, str):
        yield path, None
        return
    with temporary_folder() as folder:
        copy = folder / "shard"
        info = download(*store_and_name(path), copy, LIMITS.download_bytes)
        yield str(copy), info.tag


def check_present(source: ShardSource, /) -> None:
    """Raise FileNotFoundError for a shard that is missing, before any is read."""
    shards = [job.shard for job in source.jobs if not job.entries]
    if isinstance(source.root, Location):
        store_of(source.root).stat(shards, fresh=True)
    else:
        for shard in shards:
            os.stat(posixpath.join(source.root, shard))


def _loose_entries(shards: Shards) -> list[Entry] | None:
    """Return the `Entry` of each record, listed or found; None if `shards` has names of shards."""
    if isinstance(shards, (str, os.PathLike)):
        if is_url(os.fspath(shards)) or not os.path.isdir(shards):
            return None
        return list_images(shards)
    # A feed is not iterable, and `set_epoch` is a method of loaders and samplers.
    is_loader = hasattr(shards, "set_epoch")
    if not isinstance(shards, Iterable) or isinstance(shards, Mapping) or is_loader:
        raise TypeError(f"shards must be paths of files, got {a_type(shards)}")
    items: list[Any] = list(shards) if isinstance(shards, Sequence) else []
    if not (items and all(isinstance(item, Entry) for item in items)):
        return None
    if not any(entry.paths for entry in items):
        raise ValueError("no Entry has a file: list the files of each one by field name")
    return items


def _relative_entries(
    shards: Shards, entries: list[Entry], index_path: PathLike | None, root: PathLike | None
) -> tuple[str, list[Entry]]:
    """Return the root folder of the files, and the entries with paths relative to this root.

    Of the folder /data/photos and the root /data, "cat/1.jpg" becomes "photos/cat/1.jpg". The paths
    of a list do not change.
    """
    images_folder = None
    if isinstance(shards, (str, os.PathLike)):
        if not entries:
            name = os.fspath(shards)
            raise FileNotFoundError(
                f"no image ({', '.join(IMAGE_EXTENSIONS)}) below the folder {name!r}: give a "
                f"folder that holds images, or shards, such as '{name}/*.tar'"
            )
        images_folder = os.path.realpath(shards)
    inside_root = index_path or images_folder  # /data/x.index, or /data/photos
    default_root = os.path.join(inside_root, os.pardir) if inside_root else os.curdir
    root_folder = os.path.abspath(root or default_root)  # /data
    # The path of the folder of images from the root: "photos", or "." if it is the root itself.
    # Symbolic links are resolved in both, or a link in one of them would give a wrong path.
    prefix = relative_to(os.path.realpath(root_folder), images_folder) if images_folder else "."
    if prefix == ".":  # the paths are relative to the root already
        return root_folder, entries
    return root_folder, [
        entry._replace(paths={name: f"{prefix}/{file}" for name, file in entry.paths.items()})
        for entry in entries
    ]


def _shard_names(shards: Any, complete: bool) -> list[str]:
    """Return the paths of the shards in order; raise LoaderError for a folder or an index."""
    names = expand(shards, complete=complete)
    for name in names:
        if name.endswith(("/", MANIFEST, ".npy")) or os.path.isdir(name):
            problem = "this is a folder or a file of an index, and not a shard"
            advice = "give a pattern that matches only shards, such as *.tfrecord or *.tar"
            raise LoaderError(problem, path=name, advice=advice)
    return names


def _relative(root: Root, shard: str) -> str:
    """Return the path of a shard relative to `root`, if need be with symbolic links resolved."""
    path = Location.of(shard) if is_url(shard) else os.path.abspath(shard)
    with suppress(ValueError):
        return relative_to(root, path)
    if isinstance(path, str):
        os.stat(path)
        root, path = os.path.realpath(str(root)), os.path.realpath(path)
    return relative_to(root, path)


def _common_folder(urls: Sequence[str]) -> Location:
    """Return the deepest folder that contains all `urls`, none of which is a server or a bucket."""
    files = [Location.of(url) for url in urls]
    shortest = min(files, key=lambda file: len(file.key))
    store_and_name(shortest)  # called only for its error: if the shortest path names a file, all do
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
    """Return the first bytes of a shard, enough to recognize its format."""
    if isinstance(path, Location):
        store, name = store_and_name(path)
        return bytes(store.read(name, 0, SNIFF_BYTES).data)
    with open_shard(path) as file:
        return file.read(SNIFF_BYTES)
