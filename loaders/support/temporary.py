"""Temporary folders, which the next process removes if their own was killed."""

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

# The longest path, in bytes, of a folder in which multiprocessing may put its sockets.
_MAX_NAME_BYTES = 80

_locks: PerProcess[dict[Path, int]] = PerProcess(dict)
"""The folders of this process, and the descriptor of the locked file in each."""


def make_temporary() -> Path:
    """Create a temporary folder, with a file in it that stays locked until the process ends.

    The first call also removes the folders of killed processes, whose files are not locked.
    """
    _remove_stale()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    mark_deletable(folder)
    fd = os.open(folder / ".new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _locks()[folder] = fd
    # A file system without locks raises here. Then no process finds a lock file in the folder, and
    # so none removes it.
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(folder / ".new", folder / _LOCK)  # other processes look for this name
    return folder


def remove_temporary(folder: Path, /) -> None:
    """Remove a folder of `make_temporary`; do nothing in a forked child, which does not own it."""
    if folder in _locks():
        shutil.rmtree(folder, ignore_errors=True)
        os.close(_locks().pop(folder))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a temporary folder, and remove it afterwards."""
    folder = make_temporary()
    try:
        yield folder
    finally:
        remove_temporary(folder)


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


@cache
def _remove_stale() -> None:
    """Remove temporary folders of killed processes: those whose file is not locked."""
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
