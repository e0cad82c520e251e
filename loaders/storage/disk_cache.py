"""The setting of a disk cache: its folder and its size limit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from twinfeed.loaders.support import checks
from twinfeed.samplers import validate

FOLDER, BYTES = "TWINFEED_CACHE", "TWINFEED_CACHE_BYTES"
"""The environment variables that set a cache for every index at a URL."""


@dataclass(frozen=True)
class DiskCache:
    """Keep data that were read from remote shards in a local `folder`, up to `bytes` bytes.

    Every process of this user on this machine may use the folder at the same time, for any number
    of data sets. A full cache keeps what it has, but for shards that no run has used for an hour.

    A cache is a value: `open_index(url, cache=DiskCache(...))` uses it. The variables
    TWINFEED_CACHE (the folder) and TWINFEED_CACHE_BYTES (`bytes`) name a cache for every index that
    is opened without a cache, if the index or its shards lie at a URL.

    Args:
        folder: if it does not exist, it is created, with access only for its owner. `~` is your
            home folder. The folder may be deleted when no process uses it.
        bytes: the maximum number of bytes in the folder, or a string such as 200G or 1.5 TiB.

    Raises:
        TypeError: `bytes` is neither a number nor a str.
        ValueError: `bytes` is not positive, or not a size.

    >>> DiskCache("/mnt/ssd/twinfeed", bytes="200G").bytes
    200000000000
    """

    folder: str
    bytes: int

    def __init__(self, folder: str | os.PathLike[str], /, *, bytes: int | str) -> None:  # noqa: A002
        object.__setattr__(self, "folder", os.path.abspath(os.path.expanduser(folder)))
        number = checks.bytes_of(bytes) if isinstance(bytes, str) else bytes
        object.__setattr__(self, "bytes", validate.integer("bytes", number, minimum=1))

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)


def cache_of_environment() -> DiskCache | None:
    """Return the disk cache that the environment variables set, or None.

    Raises:
        ValueError: only one of the two variables is set, or the size is not valid.
    """
    folder, size = os.environ.get(FOLDER), os.environ.get(BYTES)
    if not folder and not size:
        return None
    if not folder or not size:
        raise ValueError(
            f"{FOLDER} must be a folder and {BYTES} a number of bytes, both or neither, "
            f"got {folder!r} and {size!r}"
        )
    return DiskCache(folder, bytes=size)
