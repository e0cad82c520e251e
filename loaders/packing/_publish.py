"""Put the finished files of a `pack` call in place. Nothing is replaced."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from twinfeed.loaders.support.atomic import fsync_path, publish_folder


def check_free(folder: Path, split_names: Iterable[str], /) -> None:
    """Raise FileExistsError if a folder has an index or shards of the splits."""
    names = "|".join(map(re.escape, split_names))
    packed = re.compile(rf"({names})(\.index|-\d{{5,}}-of-\d{{5,}}\.(tar|tfrecord))", re.ASCII)
    existing = sorted(path.name for path in folder.iterdir() if packed.fullmatch(path.name))
    if existing:
        raise FileExistsError(
            f"{folder} already holds files of these names "
            f"({len(existing)}: {', '.join(existing[:5])}): "
            "open what is packed with open_index, pack to another folder, or remove them"
        )


def publish(staging: Path, folder: Path, split_names: Iterable[str], /) -> None:
    """Move the shards and indexes of all splits from `staging` to `folder`.

    Indexes come last. So whoever opens an index finds all of its shards, also after a kill. The
    shards alone are an incomplete set until all are there.
    """
    for file in staging.iterdir():
        if file.suffix in (".tar", ".tfrecord"):
            os.rename(file, folder / file.name)
    fsync_path(folder)
    for name in split_names:
        publish_folder(staging / f"{name}.index", folder / f"{name}.index")
