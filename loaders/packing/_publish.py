"""The staging folder of a `pack` call, and the two-phase publish of its finished files.

Only files with the names of packed shards, and folders with a marker file of this library, are
replaced or deleted.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
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
    publish_folder,
    temporary_name,
)
from twinfeed.loaders.support.deletable import (
    delete_folder,
    delete_listed,
    delete_stale,
    is_deletable,
    new_folder,
)

_STAGING_NAME = "packing"
_STAGING_FOLDER = re.compile(r"\.packing-[0-9a-f]{16}")
_ADVICE = "nothing can be written here: give another folder to pack to"


def check_free(folder: Path, split_names: Iterable[str], overwrite: bool, /) -> None:
    """Raise FileExistsError if a folder has files of the splits, or others even if `overwrite`."""
    existing, not_packed = [], []
    for name in split_names:
        index, shards = folder / f"{name}.index", _shard_files(folder, name)
        existing += [path.name for path in (index, *shards) if os.path.lexists(path)]
        not_packed += [path.name for path in shards if path.is_symlink() or not path.is_file()]
        if index.is_dir() and not index.is_symlink():
            not_packed += [f"{index.name}/{file}" for file in foreign_files(index)]
        elif os.path.lexists(index):
            not_packed.append(index.name)
    if existing and not overwrite:
        raise FileExistsError(
            f"{folder} already holds files of these names "
            f"({len(existing)}: {', '.join(existing[:5])}): "
            "open what is packed with open_index, pack to another folder, or replace them with "
            "overwrite=True (--overwrite)"
        )
    if not_packed:
        raise FileExistsError(
            f"{folder} holds files that pack has not written and would replace "
            f"({len(not_packed)}: {', '.join(not_packed[:5])}): move them, or pack elsewhere"
        )


@contextmanager
def staging_folder(folder: Path, /) -> Iterator[Path]:
    """Create a locked hidden folder inside `folder` to pack into, and delete it afterwards.

    A new `folder` in which nothing is packed is removed again.
    """
    existed = folder.exists()
    staging = temporary_name(folder / _STAGING_NAME)
    lock_fd = _create_staging(folder, staging)
    try:
        yield staging
    finally:
        with locked(folder), suppress(FileNotFoundError):  # after `publish` it does not exist
            delete_folder(staging)
        os.close(lock_fd)
        if not existed:
            with suppress(OSError):  # not empty
                folder.rmdir()


def _create_staging(folder: Path, staging: Path) -> int:
    """Create the folder `staging`, locked, and return the descriptor of its lock.

    What a killed `pack` has left is finished if it was publishing, and else deleted.
    """
    with explain_unwritable(folder, _ADVICE), locked(folder, make=_ADVICE):
        _move_published_files(folder)  # of a `pack` that was killed while it moved them
        for old in folder.glob(f".{_STAGING_NAME}-*"):
            if _STAGING_FOLDER.fullmatch(old.name):
                if is_deletable(old):  # a complete marker file says that this library wrote it
                    delete_stale(old)
                else:  # killed before the marker was complete: delete the marker, and the folder
                    delete_listed(old)  # unless it has other files
        return new_folder(staging)


def publish(staging: Path, folder: Path, /) -> None:
    """Move the shards and indexes in `staging` to `folder`, as one transaction.

    1. Create a marker file in `staging` for each index.
    2. Rename `staging` to the folder `PUBLISHING` in `folder`: this is the commit point. While
       `PUBLISHING` has the marker file of an index, readers refuse this index, so nobody reads old
       and new files together.
    3. Move the files from `PUBLISHING` to `folder`, and delete `PUBLISHING`. If this process is
       killed before that is finished, the next `pack` finishes it.
    """
    _move_published_files(folder)  # finish step 3 of another process that was killed
    for index in list(staging.glob("*.index")):
        (staging / f"{index.name}.placing").touch()
    publish_folder(staging, folder / PUBLISHING)
    _move_published_files(folder)


def _move_published_files(folder: Path) -> None:
    """Move the files in the folder `PUBLISHING`, if it exists, to `folder`, and delete it."""
    publish_folder = folder / PUBLISHING
    if not os.path.lexists(publish_folder):
        return
    if not is_deletable(publish_folder):  # it has no marker file
        problem = "pack uses a folder of this name, and did not create this one: move it elsewhere"
        raise FileExistsError(errno.EEXIST, problem, str(publish_folder))
    for index in sorted(publish_folder.glob("*.index")):
        _publish_index(publish_folder, folder, index.name)
    fsync_path(folder)
    # After this rename, readers open the new indexes, while the folder is deleted.
    done = temporary_name(folder / _STAGING_NAME)
    os.rename(publish_folder, done)
    delete_folder(done)


def _publish_index(publish_folder: Path, folder: Path, name: str) -> None:
    """Move the new index `name` and its shards from `publish_folder` to `folder`.

    They replace an older index with this name and its shards. If the process is killed at any step,
    the next `pack` calls this again, and must find out what is still to do. So the indexes, which
    list the shards, are moved last:

    1. Delete the old shards, which the old index in `folder` lists.
    2. Move the new shards, which the new index in `publish_folder` lists.
    3. Move the old index out of `folder`.
    4. Move the new index to `folder`.

    After a kill in step 1 or 2, both lists are there: shards that were deleted or moved already are
    passed over. After a kill in step 3 or 4, all shards are in `folder`, and only the new index is
    still to be moved.
    """
    old_shards = _listed_shards(folder / name)
    new_shards = _listed_shards(publish_folder / name)
    new_shards |= {shard.name for shard in _shard_files(publish_folder, Path(name).stem)}
    for shard in sorted(old_shards - new_shards):
        (folder / shard).unlink(missing_ok=True)
    for shard in sorted(new_shards):
        with suppress(FileNotFoundError):  # it was moved before the last process was killed
            os.replace(publish_folder / shard, folder / shard)
    if (folder / name).exists():
        os.rename(folder / name, publish_folder / f"{name}.old")  # deleted with publish_folder
    os.rename(publish_folder / name, folder / name)


def _listed_shards(index: Path) -> set[str]:
    """Return the shards that an index lists, without names that `pack` would not give."""
    with suppress(LoaderError, OSError):
        manifest = read_manifest(index)
        opened = Index(index, str(index), root=str(index.parent), manifest=manifest)
        pattern = _shard_name_pattern(index.name.removesuffix(".index"))
        return set(filter(pattern.fullmatch, opened.shard_paths.tolist()))
    return set()


def _shard_files(folder: Path, name: str) -> list[Path]:
    """Return the files in a folder that have the name of a shard of the split `name`."""
    pattern = _shard_name_pattern(name)
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name)]


def _shard_name_pattern(name: str) -> re.Pattern[str]:
    """Return the pattern of "train-00000-of-00010.tar", and of "train-00000.tar"."""
    return re.compile(rf"{re.escape(name)}-\d{{5,}}(-of-\d{{5,}})?\.(tar|tfrecord)", re.ASCII)
