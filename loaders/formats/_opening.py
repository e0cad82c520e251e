"""Open a local shard for one sequential pass, and read ranges of it."""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

from twinfeed.loaders.errors import LoaderError, UnsafeContentError

BUFFER = 1 << 20
"""Bytes read, or written, at a time."""

CLOSED = "copy the shard again, or write it again: its writer may not have been closed"
"""What to do about a shard that ends too early."""


def open_shard(path: str, /) -> BinaryIO:
    """Open a shard for reading, buffered.

    Raises UnsafeContentError for a `pipe:` command, which is never run, LoaderError for what is no
    regular file, and FileNotFoundError.
    """
    refuse_command(path)
    return open(open_regular(path), "rb", buffering=BUFFER)


def open_regular(path: str, /) -> int:
    """Open a regular file for reading, and return its descriptor.

    Raises LoaderError for anything else, without waiting: opening a FIFO would block until
    somebody writes to it, and a device such as /dev/zero never ends.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise LoaderError(
            "not a regular file", path=path, advice="give a file that can be sought in"
        )
    return fd


def read_at(fd: int, length: int, offset: int, /) -> bytes:
    """Return the bytes of a range, fewer only at the end of the file.

    A long range takes several `os.pread`s, since one returns at most 2 GiB.
    """
    data = os.pread(fd, length, offset)
    if len(data) == length or not data:
        return data
    pieces, at = [data], offset + len(data)
    while at < offset + length and (data := os.pread(fd, offset + length - at, at)):
        pieces.append(data)
        at += len(data)
    return b"".join(pieces)


def refuse_command(path: str, /) -> None:
    """Raise UnsafeContentError for a `pipe:` URL of webdataset, which would run a shell."""
    if path.lower().startswith("pipe:"):
        raise UnsafeContentError(
            "pipe: commands are never run",
            path=path,
            advice="run the command yourself, and give the file it makes",
        )
