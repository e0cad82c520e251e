"""Where shards are written and how they are named; they come into place when they are whole."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from twinfeed.loaders.atomic import beside, lock, locked, locked_folder, sync, writable
from twinfeed.loaders.index import Index
from twinfeed.loaders.index.store import read_manifest
from twinfeed.loaders.packing.shard_writer import Container

_WORK = "packing"
_ELSEWHERE = "nothing can be written here: give another folder to pack to"


def check_free(folder: Path, split: Iterable[str], /) -> None:
    """Refuse to write where there is something already."""
    taken = [
        path.name
        for name in split
        for path in [folder / f"{name}.index", *_shards(folder, name)]
        if path.exists()
    ]
    if taken:
        raise FileExistsError(
            f"{folder} already holds {len(taken)} files of these names ({', '.join(taken[:5])}): "
            "pack elsewhere, or with overwrite=True"
        )


@contextmanager
def workplace(folder: Path, /) -> Iterator[Path]:
    """Give a hidden folder within `folder` to write in, locked while in use. Those of packers that
    were killed are removed; and so is `folder`, where this made it and it is left empty.
    """
    there = folder.exists()
    work = beside(folder / _WORK)
    own = _begin(folder, work)
    try:
        yield work
    finally:
        with locked(folder):
            shutil.rmtree(work)
            if not there:
                with suppress(OSError):  # it holds something
                    folder.rmdir()
        os.close(own)


def _begin(folder: Path, work: Path) -> int:
    """Make and lock the folder `work`, and remove those that nobody holds any more."""
    fd = locked_folder(folder, _make)
    try:
        for left in folder.glob(f".{_WORK}-*"):
            other = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # its packer lives: one that dies lets go of the lock
                pass
            else:
                shutil.rmtree(left)
            finally:
                os.close(other)
        with writable(folder, _ELSEWHERE):
            work.mkdir()
        own = os.open(work, os.O_RDONLY)
        lock(own)
        return own
    finally:
        os.close(fd)


def _make(folder: Path) -> None:
    with writable(folder, _ELSEWHERE):
        folder.mkdir(parents=True, exist_ok=True)


def named(
    work: Path, name: str, files: Sequence[Path], container: Container, names: str, /
) -> list[Path]:
    """Give the shards their names, now that their number is known."""
    out = []
    for number, file in enumerate(files):
        place = f"{number:05d}-of-{len(files):05d}" if names == "of" else f"{number:06d}"
        out.append(file.rename(work / f"{name}-{place}.{container}"))
    return out


def put_in_place(work: Path, folder: Path, name: str, /) -> None:
    """Put the shards of one split in place, then its index; those of the index before it go."""
    index = folder / f"{name}.index"
    new = {file.name for file in _shards(work, name)}
    old: set[str] = set()
    if index.exists():
        old = set(Index(index, str(folder), read_manifest(index)).shard_paths.tolist()) - new
    for file in sorted(new):
        os.replace(work / file, folder / file)
    if index.exists():
        index.rename(work / f"{name}.old")
    (work / f"{name}.index").rename(index)
    for file in old:
        (folder / file).unlink(missing_ok=True)
    sync(folder)


def _shards(folder: Path, name: str) -> list[Path]:
    """Return the shards of one split that lie in a folder."""
    pattern = re.compile(rf"{re.escape(name)}-\d+(-of-\d+)?\.(tar|tfrecord)")
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name)]
