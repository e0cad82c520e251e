"""Put the finished files of a `pack` call in place.

Only files with the names of packed shards, and indexes without other files in them, are replaced.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from twinfeed.loaders.building.writer import foreign_files
from twinfeed.loaders.support.atomic import fsync_path, publish_folder


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


def publish(staging: Path, folder: Path, split_names: Iterable[str], /) -> None:
    """Move the shards and indexes of all splits from `staging` to `folder`, in place of older ones.

    Old indexes are moved away first, and new indexes to `folder` last. So whoever opens an index
    finds all of its shards, also after a kill. The shards alone are an incomplete set until all are
    there: the old ones are deleted before new ones come.
    """
    names = list(split_names)
    for name in names:
        if (folder / f"{name}.index").exists():
            os.rename(folder / f"{name}.index", staging / f"{name}.old")
    for name in names:
        for shard in _shard_files(folder, name):
            shard.unlink()
        for shard in _shard_files(staging, name):
            os.rename(shard, folder / shard.name)
    fsync_path(folder)
    for name in names:
        publish_folder(staging / f"{name}.index", folder / f"{name}.index")


def _shard_files(folder: Path, name: str) -> list[Path]:
    """Return the files of the split `name` in a folder, such as "train-00000-of-00010.tar"."""
    pattern = re.compile(rf"{re.escape(name)}-\d{{5,}}-of-\d{{5,}}\.(tar|tfrecord)", re.ASCII)
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
