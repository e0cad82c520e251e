"""Deletion guard: a folder is only deleted if it holds a marker file of this library.

A matching name is never enough. The marker lists the files of the folder that may be deleted.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.support.regular import read_file

MARK = ".twinfeed"
"""The name of the marker file. It has a header, and the names of the files that may be deleted."""

_HEADER = b"twinfeed made these files, and deletes them when they are no longer needed:\n"
_MAX_BYTES = 1 << 20  # of a marker file


def mark_deletable(folder: Path, /, files: Iterable[str] = ()) -> None:
    """Write the marker file of a folder; `files` are the names of files that may be deleted."""
    if not folder.is_symlink():
        (folder / MARK).unlink(missing_ok=True)
        with (folder / MARK).open("xb") as marker:
            marker.write(_HEADER + "".join(f"{file}\n" for file in files).encode())


def new_folder(folder: Path, /) -> int:
    """Create a folder that `delete_stale` deletes after this process; return its descriptor.

    The folder is locked until the descriptor is closed. It is locked before it is marked, so that
    no other process takes it for stale, and only its owner may open it, and so lock it.
    """
    folder.mkdir(mode=0o700)
    fd = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # without locks, `delete_stale` deletes nothing
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mark_deletable(folder)
    except BaseException:  # the disk is full: delete what there is of the marker
        delete_listed(folder)
        os.close(fd)
        raise
    return fd


def delete_stale(folder: Path, /) -> None:
    """Delete a folder of `new_folder` whose process has ended, so that nobody has locked it."""
    if is_deletable(folder):
        with suppress(OSError):  # a link, another user's folder, or locked
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                delete_folder(folder)
            finally:
                os.close(fd)


def add_deletable(folder: Path, file: str, /) -> None:
    """Add the name of a file, which is about to be written, to the marker file of a folder."""
    with (folder / MARK).open("ab") as marker:
        marker.write(f"{file}\n".encode())


def is_deletable(folder: Path, /) -> bool:
    """Return whether this library may delete a folder: it has a marker file with a whole header."""
    return deletable_files(folder) is not None


def delete_listed(folder: Path, /) -> None:
    """Delete the files that a folder's marker file lists, and the folder if nothing else is in it.

    A truncated marker, of a killed process, lists no files. Then only the marker is deleted.
    """
    for file in deletable_files(folder) or ():
        with suppress(OSError):
            (folder / file).unlink()
    with suppress(LoaderError, OSError):
        marker = _read_marker(folder)
        # The marker has the whole header, or only a part of it if its process was killed. Any other
        # file of this name is the user's.
        if marker.startswith(_HEADER) or _HEADER.startswith(marker):
            (folder / MARK).unlink()
    with suppress(OSError):  # the folder is not empty
        folder.rmdir()


def delete_folder(folder: Path, /) -> None:
    """Delete a folder that has a marker file, with everything in it.

    The marker is deleted last: if this process is killed, the folder may still be deleted later.
    """
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()
    delete_listed(folder)  # only the marker is there now, so this deletes it and the folder


def deletable_files(folder: Path, /) -> list[str] | None:
    """Return the names of the files in a folder that this library may delete.

    The folder's marker file lists them. None if the folder has no marker with a whole header: then
    nothing in it may be deleted.
    """
    with suppress(LoaderError, OSError, UnicodeDecodeError):
        marker = _read_marker(folder)
        if marker.startswith(_HEADER):
            names = marker[len(_HEADER) :].decode().splitlines()
            return [name for name in names if "/" not in name]  # only files of this folder
    return None


def _read_marker(folder: Path) -> bytes:
    """Return the bytes of a folder's marker file; b"" for a link, which may lead elsewhere."""
    return b"" if folder.is_symlink() else read_file(folder / MARK, _MAX_BYTES)
