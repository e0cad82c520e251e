"""Opening and reading local files, which must be regular files."""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

from twinfeed.loaders.errors import LoaderError, UnsafeContentError, check_bytes

BUFFER = 1 << 20
"""Bytes read, or written, at a time."""

_FILE_TYPES = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO"}


def open_shard(path: str, /) -> BinaryIO:
    """Open a shard for reading, buffered.

    Raises:
        UnsafeContentError: a `pipe:` command, which is never run.
        LoaderError: anything but a regular file.
        FileNotFoundError: a missing file.
    """
    refuse_command(path)
    return open_file(path, buffering=BUFFER)


def open_file(path: str | os.PathLike[str], /, *, buffering: int = 0) -> BinaryIO:
    """Open a regular file for reading; raise LoaderError for anything else."""
    return open(path, "rb", buffering=buffering, opener=lambda name, _: open_regular(name))


def read_file(path: str | os.PathLike[str], max_bytes: int, /) -> bytes:
    """Return the bytes of a regular file; raise LoaderError for more than `max_bytes` bytes."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > max_bytes else read_at(file.fileno(), size + 1, 0)
    advice = "give another file, or remove it"
    check_bytes("a file", max(size, len(data)), max_bytes, path=path, advice=advice)
    return data


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, /) -> int:
    """Open a regular file, by default for reading, and return its descriptor.

    Raises:
        LoaderError: the path is not a regular file. This never waits, whereas a normal `open` of a
            FIFO waits until somebody writes to it. A device such as /dev/zero never ends.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    file_type = stat.S_IFMT(os.fstat(fd).st_mode)
    if file_type != stat.S_IFREG:
        os.close(fd)
        raise LoaderError(
            "not a regular file",
            path=path,
            found=_FILE_TYPES.get(file_type, "a device"),
            advice="give a file, or a link to a file; save the output of a command to a file first",
        )
    os.set_blocking(fd, True)
    return fd


def read_at(fd: int, length: int, offset: int, /) -> bytes:
    """Return `length` bytes of a file from an offset on, fewer only at the end of the file."""
    data = os.pread(fd, length, offset)
    if len(data) == length:
        return data
    chunks = []
    while data:
        chunks.append(data)
        offset, length = offset + len(data), length - len(data)
        data = os.pread(fd, length, offset)
    return b"".join(chunks)


def refuse_command(path: str, /) -> None:
    """Raise UnsafeContentError for a `pipe:` URL of webdataset, which would run a shell."""
    if path.lower().startswith("pipe:"):
        raise UnsafeContentError(
            "pipe: commands are never run",
            path="pipe:***",  # a command may hold a password anywhere
            advice="run the command yourself, and give the file it makes",
        )
