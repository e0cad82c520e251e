"""Temporary folders, which one process uses at a time, and the next deletes if it was killed.

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
import time
import warnings
from collections.abc import Callable, Iterator
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

# A lock that is held for longer, 5 seconds in all, is worth a warning.
_TRIES, _INTERVAL = 100, 0.05

# The longest path, in bytes, of a folder in which multiprocessing may put its sockets.
_MAX_NAME_BYTES = 80

_locks: PerProcess[dict[Path, int]] = PerProcess(dict)
"""The folders of this process, and the descriptor that keeps each locked."""


@contextmanager
def work_folder(
    folder: Path, /, advice: str, keep: Callable[[Path], bool] = lambda path: False
) -> Iterator[Path]:
    """Yield a folder that other processes wait for, and delete it afterwards.

    Of what a killed process has left there, and of this process's own files after an error, those
    stay that `keep` accepts. A parent that is created, and stays empty, is deleted too. `advice` is
    for the error if nothing can be written there.

    Raises:
        FileExistsError: somebody else has made a folder of this name.
    """
    parent_existed, failed = folder.parent.exists(), True
    try:
        fd = _open_locked(folder, advice)
        try:
            _clear(folder, keep)
            yield folder
            failed = False
        finally:
            if not (failed and _clear(folder, keep)):
                _delete(folder)
            flock(fd, fcntl.LOCK_UN)  # forked children have the descriptor too
            os.close(fd)
    finally:
        if not parent_existed:
            with suppress(OSError):  # not empty
                folder.parent.rmdir()


@contextmanager
def temporary_folder(parent: Path | None = None, /, advice: str = _ADVICE) -> Iterator[Path]:
    """Yield a new `work_folder` in a folder, by default that for temporary files.

    There, the temporary folders of killed processes are deleted.
    """
    with work_folder(_new_name(parent or Path(tempfile.gettempdir())), advice) as folder:
        yield folder


def make_temporary() -> Path:
    """Create a temporary folder, as `temporary_folder`, which is locked until the process ends."""
    folder = _new_name(Path(tempfile.gettempdir()))
    _locks()[folder] = _open_locked(folder, _ADVICE)
    return folder


def remove_temporary(folder: Path, /) -> None:
    """Remove a folder of `make_temporary`; do nothing in a forked child, which does not own it."""
    if folder in _locks():
        _delete(folder)
        os.close(_locks().pop(folder))


def socket_folder() -> str:
    """Return the temporary folder of multiprocessing; replace it if its path is too long.

    The path of a socket may have about a hundred characters. With a longer TMPDIR, workers could
    not send a batch, and torch would wait for it for ever.

    Raises:
        OSError: no folder with a short path can be created.
    """
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


def _open_locked(folder: Path, advice: str) -> int:
    """Create a folder if it is missing, lock it, and mark it; return the descriptor of the lock.

    Only the owner may open the folder, so nobody else can lock it.
    """
    while True:
        with explain_unwritable(folder.parent, advice):
            _make(folder)
        with suppress(FileNotFoundError):  # the process that had the lock has deleted the folder
            fd = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                _wait_for_lock(fd, folder)
                # It may have been deleted since it was opened. A lock on it would exclude nobody.
                if os.path.samestat(os.fstat(fd), folder.lstat()):
                    with explain_full_disk(folder.parent):
                        _mark(folder)
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)


def _make(folder: Path) -> None:
    """Create a folder and its parents; raise FileNotFoundError for a link that leads nowhere."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError as error:
        if os.path.exists(error.filename):
            raise
        if os.path.islink(error.filename):
            problem = "a link that leads nowhere: mount its disk, or name another folder"
            raise FileNotFoundError(errno.ENOENT, problem, error.filename) from None


def _wait_for_lock(fd: int, folder: Path) -> None:
    """Lock an open folder; warn if another process has locked it for some seconds."""
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_INTERVAL)
    text = f"{folder.parent}: waiting for another process that writes there, and locks {folder}"
    warnings.warn(text, RuntimeWarning, stacklevel=2)
    flock(fd, fcntl.LOCK_EX)


def _mark(folder: Path) -> None:
    """Write the marker file of a folder that is empty, but for a marker that is not whole."""
    if not _is_own(folder):
        problem = "twinfeed uses this name, and did not create the folder: move it elsewhere"
        raise FileExistsError(errno.EEXIST, problem, str(folder))
    if not _is_marked(folder):
        (folder / MARK).unlink(missing_ok=True)
        try:
            with (folder / MARK).open("xb") as marker:
                marker.write(_TEXT)
        except OSError:  # the disk is full
            _delete(folder)
            raise


def _is_own(folder: Path) -> bool:
    """Return whether a folder is marked, or empty: its process was killed before it was marked."""
    return _is_marked(folder) or {*os.listdir(folder)} <= {MARK}


def _is_marked(folder: Path) -> bool:
    with suppress(LoaderError, OSError):
        return read_file(folder / MARK, len(_TEXT)) == _TEXT
    return False


def _new_name(parent: Path) -> Path:
    """Return a new path for a temporary folder, and delete those that killed processes have left.

    They are folders of this user that are marked or empty, and not locked.
    """
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # a link, another user's folder, or locked
            fd = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another user could put a link in the place of a folder while it is deleted.
                if os.fstat(fd).st_uid == os.geteuid() and _is_own(folder):
                    _delete(folder)
            finally:
                os.close(fd)
    return parent / f"{_PREFIX}{secrets.token_hex(8)}"


def _delete(folder: Path) -> None:
    """Delete a folder, its marker last: after a kill, the next process deletes the rest."""
    _clear(folder, keep=lambda path: False)
    shutil.rmtree(folder, ignore_errors=True)


def _clear(folder: Path, keep: Callable[[Path], bool]) -> bool:
    """Delete all but the marker and what `keep` accepts; return whether it accepts anything."""
    kept = False
    for path in folder.iterdir():
        if path.name == MARK:
            continue
        if keep(path):
            kept = True
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return kept
