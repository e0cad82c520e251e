"""The folder where shards are written. Shards are put in place when they are whole."""

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
from twinfeed.loaders.support.atomic import beside, locked, sync, writable
from twinfeed.loaders.support.owned import delete_marked, delete_whole, is_marked, mark

_WORK = "packing"
_OWN_WORK = re.compile(r"\.packing-[0-9a-f]{16}")
_ELSEWHERE = "nothing can be written here: give another folder to pack to"


def check_free(folder: Path, split: Iterable[str], overwrite: bool, /) -> None:
    """Refuse to replace files; with `overwrite`, refuse only files that no packer wrote."""
    taken, others = [], []
    for name in split:
        index, shards = folder / f"{name}.index", _shards(folder, name)
        taken += [path.name for path in (index, *shards) if path.exists()]
        others += [path.name for path in shards if path.is_dir()]
        if index.is_dir() and not index.is_symlink():
            others += [f"{index.name}/{each}" for each in foreign_files(index)]
        elif os.path.lexists(index):
            others.append(index.name)
    if taken and not overwrite:
        raise FileExistsError(
            f"{folder} already holds files of these names ({len(taken)}: {', '.join(taken[:5])}): "
            "pack elsewhere, or with overwrite=True (--overwrite)"
        )
    if others:
        raise FileExistsError(
            f"{folder} holds what no packer wrote where the new files go "
            f"({len(others)}: {', '.join(others[:5])}): move that, or pack elsewhere"
        )


@contextmanager
def workplace(folder: Path, /) -> Iterator[Path]:
    """Give a hidden folder within `folder` to write in, locked while in use.

    The work of killed packers is finished or removed. If `folder` was made here and nothing was
    packed, `folder` is removed again.
    """
    there = folder.exists()
    work = beside(folder / _WORK)
    own = _begin(folder, work)
    try:
        yield work
    finally:
        with locked(folder), suppress(FileNotFoundError):  # the work was put in place
            delete_whole(work)
        os.close(own)
        if not there:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def _begin(folder: Path, work: Path) -> int:
    """Make and lock the folder `work`. First finish or remove what killed packers have left."""
    make = partial(Path.mkdir, parents=True, exist_ok=True)
    with writable(folder, _ELSEWHERE), locked(folder, make=make):
        _finish(folder)
        for left in folder.glob(f".{_WORK}-*"):
            if _OWN_WORK.fullmatch(left.name):
                (_remove_unheld if is_marked(left) else delete_marked)(left)
        work.mkdir(mode=0o700)  # else another user could open and lock the folder
        mark(work)
        own = os.open(work, os.O_RDONLY)
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return own


def _remove_unheld(work: Path) -> None:
    """Remove a packer's folder that nobody locks: the packer was killed, and lost the lock."""
    with suppress(OSError):  # a link, another user's, or in use
        fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            delete_whole(work)
        finally:
            os.close(fd)


def put_in_place(work: Path, folder: Path, /) -> None:
    """Put the shards and indexes of all splits in place.

    One rename of `work` is the switch: before that rename, the folder holds the old state. After
    it, everybody refuses the folder until the last file is in place. Whoever packs here next
    finishes what a killed packer has left.
    """
    _finish(folder)  # another packer may have been killed meanwhile
    for index in list(work.glob("*.index")):
        (work / f"{index.name}.placing").touch()
    sync(work)
    os.rename(work, folder / PUBLISHING)
    sync(folder)
    _finish(folder)


def _finish(folder: Path) -> None:
    """Put finished files in place. A killed packer may have done a part of this already."""
    placing = folder / PUBLISHING
    if not os.path.lexists(placing):
        return
    if not is_marked(placing):
        raise FileExistsError(
            errno.EEXIST, "no packer made this, and it is in the way: move it", str(placing)
        )
    for index in sorted(placing.glob("*.index")):
        _place(placing, folder, index.name)
    sync(folder)
    done = beside(folder / _WORK)
    os.rename(placing, done)
    delete_whole(done)


def _place(placing: Path, folder: Path, name: str) -> None:
    """Put the shards of one index in place of the old shards, then the index."""
    # The old index goes last, because it tells which shards are left over.
    old = _own_shards(folder / name)
    new = _own_shards(placing / name)
    new |= {shard.name for shard in _shards(placing, name.removesuffix(".index"))}
    for shard in sorted(old - new):
        (folder / shard).unlink(missing_ok=True)
    for shard in sorted(new):
        with suppress(FileNotFoundError):  # it is in place already
            os.replace(placing / shard, folder / shard)
    if (folder / name).exists():
        os.rename(folder / name, placing / f"{name}.old")
    os.rename(placing / name, folder / name)


def _own_shards(index: Path) -> set[str]:
    """Return the shards of an index whose names a packer gives; an unreadable index has none."""
    with suppress(LoaderError, OSError):
        named = Index(
            index, str(index), str(index.parent), read_manifest(index)
        ).shard_paths.tolist()
        return set(filter(_pattern(index.name.removesuffix(".index")).fullmatch, named))
    return set()


def _shards(folder: Path, name: str) -> list[Path]:
    """Return the shards of one split that lie in a folder."""
    pattern = _pattern(name)
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name)]


def _pattern(name: str) -> re.Pattern[str]:
    """Return the pattern of the names of the shards of a split."""
    return re.compile(rf"{re.escape(name)}-\d{{5,}}(-of-\d{{5,}})?\.(tar|tfrecord)", re.ASCII)
