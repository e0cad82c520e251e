"""Temporary folders that do not stay, even if the process that made them is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import current_process
from multiprocessing.util import Finalize, get_temp_dir
from pathlib import Path

from twinfeed.loaders.support.deletable import is_deletable, mark_deletable
from twinfeed.loaders.support.fork import PerProcess
from twinfeed.loaders.support.system import SHARED_MEMORY

_PREFIX, _LOCK = "twinfeed-", "lock"

# Most bytes of a folder's name, so that multiprocessing's names of sockets fit after it.
_LONGEST = 80

_locks: PerProcess[dict[Path, int]] = PerProcess(dict)
"""The folders that this process made, and the file that it has locked in each."""


def make_temporary() -> Path:
    """Make a temporary folder, with a file that is locked as long as the process lives.

    The first call removes folders that no process locks any more.
    """
    _remove_stale()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    mark_deletable(folder)
    fd = os.open(folder / ".new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _locks()[folder] = fd
    with suppress(OSError):  # a file system without locks: nobody removes the folder of another
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(folder / ".new", folder / _LOCK)  # locked before it has this name
    return folder


def remove_temporary(folder: Path, /) -> None:
    """Remove such a folder; in a forked child, do nothing."""
    if folder in _locks():
        shutil.rmtree(folder, ignore_errors=True)
        os.close(_locks().pop(folder))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Give such a folder, and remove it afterwards."""
    folder = make_temporary()
    try:
        yield folder
    finally:
        remove_temporary(folder)


def socket_folder() -> str:
    """Return multiprocessing's own temporary folder, or make it a folder whose name is shorter.

    The path of a socket may have about a hundred characters. With a longer TMPDIR, workers could
    not send a batch, and torch would wait for it for ever.

    Raises:
        OSError: there is no folder of a short name.
    """
    folder = get_temp_dir()
    if len(os.fsencode(folder)) <= _LONGEST:
        return folder
    for base in ("/tmp", "/var/tmp", SHARED_MEMORY):
        with suppress(OSError):
            folder = tempfile.mkdtemp(prefix="pymp-", dir=base)
            Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
            current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
            return folder
    raise OSError(
        f"TMPDIR is too long for a socket: name a folder of at most {_LONGEST - 16} bytes"
    )


@cache
def _remove_stale() -> None:
    """Remove the folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if not is_deletable(folder):
                continue
            fd = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)
