"""Files that are there whole or not at all, whatever happens to the process that writes them."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def replace_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write `data` to `path` through a temporary name beside it, fsync if `durable`, rename."""
    temporary = beside(path)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = os.fspath(path)  # not the temporary name
        raise
    if durable:
        sync(path.parent)


def beside(path: Path) -> Path:
    """Return an unused hidden name in the folder of `path`."""
    return path.with_name(f".{path.name}-{secrets.token_hex(8)}")


def sync(path: Path) -> None:
    """Bring a file's or folder's bytes to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time change what is in a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        lock(fd)
        yield
    finally:
        os.close(fd)


def lock(fd: int) -> None:
    """Wait for the lock of an open folder; a file system without locks is gone without."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise


def locked_folder(path: Path, make: Callable[[Path], object], /) -> int:
    """Open and lock a folder that `make` makes if need be; what one has waited for may be gone."""
    while True:
        make(path)
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY)
            lock(fd)
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                return fd
            os.close(fd)


@contextmanager
def room_for(path: Path, needed: int | None, *, work: Path | None = None) -> Iterator[None]:
    """Name `path` when the disk (or the file size limit) is full, with the bytes needed, if that is
    known, and those that were written to the folder `work`.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        facts = [] if needed is None else [f"{needed} bytes are needed here"]
        if work is not None:
            written = sum(file.stat().st_size for file in work.rglob("*") if file.is_file())
            facts.append(f"{written} bytes were written")
        problem = f"{os.strerror(error.errno)}: {', '.join(facts)}"
        raise OSError(error.errno, problem, str(path)) from error


@contextmanager
def writable(path: Path, advice: str) -> Iterator[None]:
    """Name `path`, and what to do, when it may not be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        problem = f"{os.strerror(error.errno)}: {advice}"
        raise type(error)(error.errno, problem, str(path)) from error
