"""Atomic replacement of files, and locks of folders, safe against killed processes."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from twinfeed.loaders.support.regular import open_regular

LOCK = ".twinfeed-lock"
"""The file that is locked while a folder is changed."""

WAIT = 600.0
"""Seconds that a lock is waited for."""

_WARN_AFTER = 5.0  # seconds
_POLL_INTERVAL = 0.02  # seconds


def check_replaceable(
    path: str | os.PathLike[str], kind: str, is_own: Callable[[BinaryIO], object]
) -> None:
    """Raise FileExistsError unless `path` is free, an empty file, or a file that `is_own` accepts.

    Every path that a user names as an output is checked here: a pattern may expand to a shard, or a
    name may be mistyped. A link is not followed, so that its target stays too. An error of `is_own`
    means no. `kind` says in the message what may be replaced, such as "a bad list".
    """
    if not os.path.lexists(path):
        return
    with suppress(Exception), open(open_regular(path, os.O_NOFOLLOW), "rb") as file:
        if os.fstat(file.fileno()).st_size == 0 or is_own(file):
            return
    problem = f"it exists and is not {kind}, so it is kept: give another path, or remove it"
    raise FileExistsError(errno.EEXIST, problem, os.fspath(path))


@contextmanager
def new_file(
    path: Path, temporary: Path | None = None, /, *, sync: bool = True
) -> Iterator[BinaryIO]:
    """Yield a temporary file in the folder of `path`; after the `with` block, rename it to `path`.

    After an error it is deleted. Without `sync`, a crash of the machine may leave a damaged file:
    for files with a checksum, which can be written again. `temporary` is the temporary path, if it
    should not be a random one.
    """
    temporary = temporary or temporary_name(path)
    with explain_full_disk(path.parent):
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                if sync:
                    os.fsync(file.fileno())
                os.replace(temporary, path)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename == os.fspath(temporary):
                error.filename = os.fspath(path)  # the user does not know the temporary name
            raise
        if sync:
            fsync_path(path.parent)


def replace_file(path: Path, data: bytes, kind: str, is_own: Callable[[BinaryIO], object]) -> None:
    """Write a file atomically, in place of what `check_replaceable` allows.

    A killed process leaves its hidden temporary file: its name alone does not say whose it is.
    """
    check_replaceable(path, kind, is_own)
    with new_file(path) as file:
        file.write(data)


def publish_folder(temporary: Path, path: Path) -> None:
    """Rename a folder, whose files are on the disk, so that the new name is on the disk too."""
    fsync_path(temporary)
    os.rename(temporary, path)
    fsync_path(path.parent)


def temporary_name(path: Path) -> Path:
    """Return an unused hidden path in the folder of `path`."""
    return path.with_name(f".{path.name}-{secrets.token_hex(8)}")


def fsync_path(path: Path) -> None:
    """Call `os.fsync` for a file or a folder: its bytes are on the disk afterwards."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def locked(
    folder: Path, /, *, make: str | None = None, wait: float | None = None
) -> Iterator[None]:
    """Lock a folder against other processes in the `with` block.

    With `make`, the folder is created if it is missing; `make` is the advice of the error if
    nothing can be written there. A file in the folder is locked, which only
    its owner may open: the folder itself could be locked by anybody who may read it. The file
    exists only while it is locked.

    Raises:
        TimeoutError: another process has the lock after `wait` seconds (by default `WAIT`).
    """
    start, warned, wait = time.monotonic(), False, WAIT if wait is None else wait
    while (fd := _try_lock(folder, make)) is None:
        waited = time.monotonic() - start
        if waited >= wait:
            problem = (
                f"another process has held its lock for {waited:.0f} seconds: wait until it has "
                f"ended, or end it; if nobody writes there, delete {folder / LOCK}"
            )
            raise TimeoutError(errno.ETIMEDOUT, problem, str(folder))
        if waited >= _WARN_AFTER and not warned:
            warned = True
            text = f"{folder}: waiting for another process that writes there"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        time.sleep(_POLL_INTERVAL)
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        os.close(fd)


def _try_lock(folder: Path, make: str | None) -> int | None:
    """Try once to lock a folder, which is created if there is the advice `make`.

    Returns the descriptor of its lock file, or None if another process has the lock.
    """
    file = folder / LOCK
    try:
        if make is not None:
            with explain_unwritable(folder, make):
                folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        existing = Path(error.filename)
        if existing.is_symlink() and not existing.exists():
            problem = "a link that leads nowhere: mount its disk, or name another folder"
            raise FileNotFoundError(errno.ENOENT, problem, str(existing)) from None
        if folder.exists() and not folder.is_dir():
            raise
        return None  # the folder was removed while mkdir() looked at what is there
    try:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        if make is None:
            raise
        return None  # the folder was removed by the process that held the lock
    except PermissionError:
        if file.exists():  # a process of another user has the lock
            return None
        raise
    try:
        flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    # The process that had the lock may have deleted the file after it was opened here. A lock of a
    # deleted file excludes nobody, so the file must still be the one at this path.
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(fd), file.lstat()):
            return fd
    os.close(fd)
    return None


def flock(fd: int, how: int, /) -> bool:
    """Call `fcntl.flock`; return True, or False if the file system has no locks."""
    try:
        fcntl.flock(fd, how)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        return False
    return True


def explain_full_disk(path: Path) -> AbstractContextManager[None]:
    """Return a context manager that adds `path` and advice to the error of a full disk."""
    with_limit = "make room there, or raise the limit of file sizes (ulimit -f)"
    errors = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return _explain_errors(path, with_limit, errors)


def explain_unwritable(path: Path, advice: str) -> AbstractContextManager[None]:
    """Return a context manager that adds `path` and `advice` to errors of missing permission."""
    return _explain_errors(path, advice, (errno.EACCES, errno.EPERM, errno.EROFS))


@contextmanager
def _explain_errors(path: Path, advice: str, errors: tuple[int, ...]) -> Iterator[None]:
    """Add `path` and `advice` to an OSError in the `with` block that has one of these numbers."""
    try:
        yield
    except OSError as error:
        if error.errno not in errors:
            raise
        problem = f"{os.strerror(error.errno)}: {advice}"
        raise type(error)(error.errno, problem, str(path)) from error
