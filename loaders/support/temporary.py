"""Temporary folders, which one process uses, and the next process deletes if it was killed.

A folder is locked while a process uses it. It is deleted only if it has the marker file of this
library: a matching name is not enough.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import current_process
from multiprocessing.util import Finalize, get_temp_dir
from pathlib import Path

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.support.atomic import explain_full_disk, explain_unwritable, flock
from twinfeed.loaders.support.fork import PerProcess
from twinfeed.loaders.support.regular import read_file
from twinfeed.loaders.support.system import SHARED_MEMORY

MARK = ".twinfeed"
"""The name of the marker file."""

_TEXT = b"twinfeed made this folder, and deletes it when it is no longer needed\n"
_PREFIX = ".twinfeed-"
_ADVICE = "set TMPDIR to a folder that can be written"

# The longest path, in bytes, of a folder in which multiprocessing may put its sockets.
_MAX_NAME_BYTES = 80

_locks: PerProcess[dict[Path, int]] = PerProcess(dict)
"""The folders of this process, and the descriptor that keeps each locked."""


@contextmanager
def temporary_folder(parent: Path | None = None, /, advice: str = _ADVICE) -> Iterator[Path]:
    """Yield a new folder in `parent`, by default that for temporary files; delete it afterwards."""
    parent_existed = parent is None or parent.exists()
    folder = make_temporary(parent, advice)
    try:
        yield folder
    finally:
        remove_temporary(folder)
        if not parent_existed:
            with suppress(OSError):  # not empty
                folder.parent.rmdir()


def make_temporary(parent: Path | None = None, advice: str = _ADVICE) -> Path:
    """Create a temporary folder, as `temporary_folder`, which is locked until the process ends."""
    parent = parent or Path(tempfile.gettempdir())
    with explain_unwritable(parent, advice), explain_full_disk(parent):
        _make_parent(parent)
        _delete_unused(parent)
        folder = parent / f"{_PREFIX}{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        _locks()[folder] = os.open(folder, os.O_RDONLY)
        try:
            flock(_locks()[folder], fcntl.LOCK_EX)
            (folder / MARK).write_bytes(_TEXT)
        except BaseException:
            remove_temporary(folder)
            raise
    return folder


def remove_temporary(folder: Path, /) -> None:
    """Remove a folder of `make_temporary`; do nothing in a forked child, which does not own it."""
    if folder in _locks():
        _delete(folder)
        os.close(_locks().pop(folder))


def socket_folder() -> str:
    """Return the temporary folder of multiprocessing; replace it if its path is too long."""
    folder = get_temp_dir()
    if len(os.fsencode(folder)) <= _MAX_NAME_BYTES:
        return folder
    for base in ("/tmp", "/var/tmp", SHARED_MEMORY):
        with suppress(OSError):
            folder = tempfile.mkdtemp(prefix="pymp-", dir=base)
            Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
            current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
            return folder
    raise OSError(f"TMPDIR is too long for a socket: use at most {_MAX_NAME_BYTES - 16} bytes")


def _make_parent(parent: Path) -> None:
    """Create a folder and its parents; raise FileNotFoundError for a link that leads nowhere."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        if not os.path.islink(error.filename):
            raise
        problem = "a link that leads nowhere: mount its disk, or name another folder"
        raise FileNotFoundError(errno.ENOENT, problem, error.filename) from None


def _delete_unused(parent: Path) -> None:
    """Delete the marked folders of this user that no process has locked: theirs were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(LoaderError, OSError):  # a link, another user's folder, not marked, or locked
            fd = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another user could put a link in the place of a folder while it is deleted.
                is_own = os.fstat(fd).st_uid == os.geteuid()
                if is_own and read_file(folder / MARK, len(_TEXT)) == _TEXT:
                    _delete(folder)
            finally:
                os.close(fd)


def _delete(folder: Path) -> None:
    """Delete a folder, its marker last: after a kill, the next process deletes the rest."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != MARK:
            path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
