"""Temporary folders, which the next process removes if their own was killed."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import current_process
from multiprocessing.util import Finalize, get_temp_dir
from pathlib import Path

from twinfeed.loaders.support.deletable import delete_stale, new_folder
from twinfeed.loaders.support.fork import PerProcess
from twinfeed.loaders.support.system import SHARED_MEMORY

_PREFIX = "twinfeed-"

# The longest path, in bytes, of a folder in which multiprocessing may put its sockets.
_MAX_NAME_BYTES = 80

_locks: PerProcess[dict[Path, int]] = PerProcess(dict)
"""The folders of this process, and the descriptor that keeps each locked."""


def make_temporary() -> Path:
    """Create a temporary folder, which is locked until the process ends.

    The first call also removes the folders of killed processes, which are not locked.
    """
    _remove_stale()
    folder = Path(tempfile.gettempdir(), f"{_PREFIX}{secrets.token_hex(8)}")
    _locks()[folder] = new_folder(folder)
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
    """Remove temporary folders of this user's killed processes."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(FileNotFoundError):
            # Another user could put a link in the place of a folder while it is deleted.
            if folder.lstat().st_uid == os.geteuid():
                delete_stale(folder)
