"""Files and folders that get their names when they are whole, and errors of writing."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from twinfeed.loaders.support.regular import open_regular


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
    temporary = temporary or path.with_name(f".{path.name}-{secrets.token_hex(8)}")
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
    """Write a file atomically, in place of what `check_replaceable` allows."""
    check_replaceable(path, kind, is_own)
    with new_file(path) as file:
        file.write(data)


def publish_folder(temporary: Path, path: Path) -> None:
    """Rename a folder, whose files are on the disk, so that the new name is on the disk too."""
    fsync_path(temporary)
    os.rename(temporary, path)
    fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Call `os.fsync` for a file or a folder: its bytes are on the disk afterwards."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
