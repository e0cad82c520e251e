"""Folders of the library's own, marked by a file in them. No folder is deleted for its name."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.support.regular import read_file

MARK = ".twinfeed"
_TEXT = b"twinfeed made these files, and deletes them when they are no longer needed:\n"
_MOST = 1 << 20


def mark(folder: Path, /, files: Iterable[str] = ()) -> None:
    """Mark a folder as the library's own; `files` are the files of it that may be deleted."""
    if not folder.is_symlink():
        (folder / MARK).unlink(missing_ok=True)
        with (folder / MARK).open("xb") as out:
            out.write(_TEXT + "".join(f"{file}\n" for file in files).encode())


def add_to_mark(folder: Path, file: str, /) -> None:
    """Mark another file, which is about to be made."""
    with (folder / MARK).open("ab") as out:
        out.write(f"{file}\n".encode())


def is_marked(folder: Path, /) -> bool:
    """Return whether a folder is the library's own."""
    return marked(folder) is not None


def delete_marked(folder: Path, /) -> None:
    """Delete the marked files of a folder, and then the folder if nothing else is in it.

    A mark may be missing or cut short, because its process was killed: it marks no files.
    """
    for file in marked(folder) or ():
        with suppress(OSError):
            (folder / file).unlink()
    with suppress(LoaderError, OSError):
        text = b"" if folder.is_symlink() else read_file(folder / MARK, _MOST)
        if text[: len(_TEXT)] == _TEXT[: len(text)]:
            (folder / MARK).unlink()
    with suppress(OSError):
        folder.rmdir()


def delete_whole(folder: Path, /) -> None:
    """Delete a marked folder with all that is in it, the mark last: the mark says whose it is."""
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        elif each.name != MARK:
            each.unlink()
    delete_marked(folder)


def marked(folder: Path, /) -> list[str] | None:
    """Return the files that may be deleted in a folder; None if the folder is not marked."""
    with suppress(LoaderError, OSError, UnicodeDecodeError):
        text = b"" if folder.is_symlink() else read_file(folder / MARK, _MOST)
        if text.startswith(_TEXT):
            names = text[len(_TEXT) :].decode().splitlines()
            return [name for name in names if "/" not in name]
    return None
