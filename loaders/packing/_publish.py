"""The staging folder of a packer, and the two-phase publish of its finished files."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from twinfeed.loaders.building.writer import foreign_files
from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.index import Index
from twinfeed.loaders.index.manifest import read_manifest
from twinfeed.loaders.index.paths import PUBLISHING
from twinfeed.loaders.support.atomic import (
    explain_unwritable,
    fsync_path,
    locked,
    temporary_name,
)
from twinfeed.loaders.support.deletable import (
    delete_folder,
    delete_listed,
    is_deletable,
    mark_deletable,
)

_STAGING_NAME = "packing"
_STAGING_FOLDER = re.compile(r"\.packing-[0-9a-f]{16}")
_UNWRITABLE_ADVICE = "nothing can be written here: give another folder to pack to"


def check_free(folder: Path, split: Iterable[str], overwrite: bool, /) -> None:
    """Raise FileExistsError if a folder has files with the names of the splits to pack.

    With `overwrite`, only if some of them were not written by a packer, since the others may be
    replaced. `split` has the names of the splits.
    """
    existing, foreign = [], []
    for name in split:
        index, shards = folder / f"{name}.index", _shard_files(folder, name)
        existing += [path.name for path in (index, *shards) if path.exists()]
        foreign += [path.name for path in shards if path.is_dir()]
        if index.is_dir() and not index.is_symlink():
            foreign += [f"{index.name}/{file}" for file in foreign_files(index)]
        elif os.path.lexists(index):
            foreign.append(index.name)
    if existing and not overwrite:
        raise FileExistsError(
            f"{folder} already holds files of these names "
            f"({len(existing)}: {', '.join(existing[:5])}): "
            "pack elsewhere, or with overwrite=True (--overwrite)"
        )
    if foreign:
        raise FileExistsError(
            f"{folder} holds what no packer wrote where the new files go "
            f"({len(foreign)}: {', '.join(foreign[:5])}): move that, or pack elsewhere"
        )


@contextmanager
def staging_folder(folder: Path, /) -> Iterator[Path]:
    """Create a hidden folder inside `folder` to pack into, and delete it after the `with` block.

    It is locked, so that other packers see that it is in use. What killed packers have left behind
    is completed or removed first. If `folder` was created here and nothing was packed, it is
    removed again.
    """
    existed = folder.exists()
    staging = temporary_name(folder / _STAGING_NAME)
    lock_fd = _create_staging(folder, staging)
    try:
        yield staging
    finally:
        with locked(folder), suppress(FileNotFoundError):  # it was published
            delete_folder(staging)
        os.close(lock_fd)
        if not existed:
            with suppress(OSError):  # not empty
                folder.rmdir()


def _create_staging(folder: Path, staging: Path) -> int:
    """Create and lock the staging folder `staging` in `folder`, and return the lock's descriptor.

    Before that, a publish that a killed packer has begun is completed, and the staging folders of
    killed packers are removed.
    """
    make = partial(Path.mkdir, parents=True, exist_ok=True)
    with explain_unwritable(folder, _UNWRITABLE_ADVICE), locked(folder, make=make):
        _finish_publish(folder)
        for old in folder.glob(f".{_STAGING_NAME}-*"):
            if _STAGING_FOLDER.fullmatch(old.name):
                (_remove_unlocked if is_deletable(old) else delete_listed)(old)
        staging.mkdir(mode=0o700)  # else another user could open and lock the folder
        mark_deletable(staging)
        lock_fd = os.open(staging, os.O_RDONLY)
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock_fd


def _remove_unlocked(staging: Path) -> None:
    """Delete a staging folder unless it is locked: then its packer is still running."""
    with suppress(OSError):  # a link, another user's folder, or locked
        fd = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            delete_folder(staging)
        finally:
            os.close(fd)


def publish(staging: Path, folder: Path, /) -> None:
    """Move the shards and indexes in `staging` to `folder`, so that a kill leaves no mixture.

    First `staging` is renamed to `PUBLISHING`: this is the commit point. Then its files are moved
    to `folder`. Readers refuse the folder in between, and the next packer completes an interrupted
    publish.
    """
    _finish_publish(folder)  # another packer may have been killed meanwhile
    for index in list(staging.glob("*.index")):
        (staging / f"{index.name}.placing").touch()
    fsync_path(staging)
    os.rename(staging, folder / PUBLISHING)
    fsync_path(folder)
    _finish_publish(folder)


def _finish_publish(folder: Path) -> None:
    """If the folder `PUBLISHING` exists, move its files to `folder`, and delete it."""
    publish_folder = folder / PUBLISHING
    if not os.path.lexists(publish_folder):
        return
    if not is_deletable(publish_folder):
        raise FileExistsError(
            errno.EEXIST, "no packer made this, and it is in the way: move it", str(publish_folder)
        )
    for index in sorted(publish_folder.glob("*.index")):
        _publish_index(publish_folder, folder, index.name)
    fsync_path(folder)
    done = temporary_name(folder / _STAGING_NAME)
    os.rename(publish_folder, done)
    delete_folder(done)


def _publish_index(publish_folder: Path, folder: Path, name: str) -> None:
    """Move the shards of an index, and then the index itself, in place of the old ones.

    The old index is replaced last, since it lists the old shards, which are deleted.
    """
    old = _listed_shards(folder / name)
    new = _listed_shards(publish_folder / name)
    new |= {shard.name for shard in _shard_files(publish_folder, name.removesuffix(".index"))}
    for shard in sorted(old - new):
        (folder / shard).unlink(missing_ok=True)
    for shard in sorted(new):
        with suppress(FileNotFoundError):  # moved already
            os.replace(publish_folder / shard, folder / shard)
    if (folder / name).exists():
        os.rename(folder / name, publish_folder / f"{name}.old")
    os.rename(publish_folder / name, folder / name)


def _listed_shards(index: Path) -> set[str]:
    """Return the file names of those shards of an index that a packer has named.

    The set is empty if the index cannot be read.
    """
    with suppress(LoaderError, OSError):
        opened = Index(index, str(index), str(index.parent), read_manifest(index))
        pattern = _shard_name_pattern(index.name.removesuffix(".index"))
        return set(filter(pattern.fullmatch, opened.shard_paths.tolist()))
    return set()


def _shard_files(folder: Path, name: str) -> list[Path]:
    """Return the files in a folder that have the name of a shard of a split."""
    pattern = _shard_name_pattern(name)
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name)]


def _shard_name_pattern(name: str) -> re.Pattern[str]:
    """Return the regular expression for the file names of the shards of a split."""
    return re.compile(rf"{re.escape(name)}-\d{{5,}}(-of-\d{{5,}})?\.(tar|tfrecord)", re.ASCII)
