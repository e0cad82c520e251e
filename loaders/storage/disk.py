"""The entries of a disk cache, written atomically, within its size limit."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from twinfeed.loaders.errors import LoaderError, UnsafeContentError
from twinfeed.loaders.storage.disk_cache import DiskCache
from twinfeed.loaders.support.atomic import flock, new_file, replace_file
from twinfeed.loaders.support.checksum import crc32c
from twinfeed.loaders.support.regular import open_file, open_regular, read_file

_SHARD, _ENTRY = re.compile(r"[0-9a-f]{24}"), re.compile(r"(\d{1,12}-)?\d{1,12}\.chunk")
_USED_BYTES = struct.Struct("<q")
_CACHE_TAG = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# A disk cache of twinfeed. It may be deleted while nobody uses it.\n"
)
"""The content of CACHEDIR.TAG, which marks a cache. Backup programs skip such a folder."""

_TRAILER = struct.Struct("<qI")
"""The trailer of an entry: the number of its bytes, and their CRC-32C."""

_UNUSED_SECONDS, _MARK_SECONDS, _FULL_SECONDS = 3600.0, 300.0, 300.0
"""A full cache deletes the entries of shards that no run has used for `_UNUSED_SECONDS`. A run
marks its shards as used every `_MARK_SECONDS`. If nothing can be deleted, the cache stays full for
`_FULL_SECONDS`.
"""


class Disk:
    """The entries of a disk cache, as files in a folder that several processes may share.

    The modification time of a shard's folder is when a run last used the shard. The file "used" has
    the total size of all entries, which is changed under a lock, and grows before an entry is
    there: it may be too high, but never too low. A process that finds the cache full counts again.
    An entry is written as the file "writing" and renamed. Without locks, the limit may be exceeded
    for a while.
    """

    def __init__(self, cache: DiskCache, shards: Sequence[str] = (), /) -> None:
        self._folder, self._limit = cache.path, cache.bytes
        self._shards = [self._folder / shard for shard in shards]
        self._lock, self._warned = threading.Lock(), False
        self._next_mark = self._full_until = 0.0
        make_cache_folder(self._folder)
        try:
            with self._locked():
                pass
        except (LoaderError, OSError) as error:
            raise cache_error(self._folder, f"the file 'used': {_reason(error)}") from error

    @property
    def full(self) -> bool:
        """Whether a new entry did not fit a short time ago."""
        return time.monotonic() < self._full_until

    def get(self, name: str, length: int, /) -> bytes | None:
        """Return the bytes of an entry of this length, or None if it is missing or damaged.

        A damaged entry is deleted.
        """
        self._mark_shards()
        try:
            with open_file(self._file(name)) as entry:
                data = entry.read(length + _TRAILER.size + 1)
        except FileNotFoundError:
            return None
        except (LoaderError, OSError) as error:  # not a regular file, or unreadable
            self._warn(error)
            data = b""
        body = data[:length]
        if data[length:] == _TRAILER.pack(length, crc32c(body)):
            return body
        self.drop(name)
        return None

    def put(self, name: str, data: memoryview | bytes, /) -> None:
        """Write an entry, if it fits and can be written."""
        file, trailer = self._file(name), _TRAILER.pack(len(data), crc32c(data))
        try:
            with self._locked() as used:
                if file.is_file() or not self._reserve(used, len(data) + len(trailer)):
                    return  # another process has written it, or the cache is full
                file.parent.mkdir(mode=0o700, exist_ok=True)
                temporary = self._folder / "writing"
                temporary.unlink(missing_ok=True)  # of a killed process
                with new_file(file, temporary, sync=False) as out:
                    out.writelines([data, trailer])
        except (LoaderError, OSError) as error:
            self._warn(error)

    def drop(self, name: str, /) -> None:
        """Delete an entry. Its bytes count until the cache is full, and counted anew."""
        with suppress(LoaderError, OSError), self._locked():  # deleted already, or a folder
            self._file(name).unlink()

    def _warn(self, error: LoaderError | OSError) -> None:
        """Warn that some bytes are not cached because of this error; later errors do not warn."""
        if not self._warned:
            self._warned = True
            text = f"{self._folder}: some bytes are not cached: {_reason(error)}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _mark_shards(self) -> None:
        """Mark the shards of this run as used, unless this was done a short time ago."""
        if time.monotonic() >= self._next_mark:
            self._next_mark = time.monotonic() + _MARK_SECONDS
            for folder in self._shards:
                with suppress(OSError):  # nothing of this shard is cached
                    os.utime(folder)

    def _reserve(self, used_fd: int, size: int) -> bool:
        """Add `size` to the total if it fits in the limit, and return whether it does."""
        data, most = os.pread(used_fd, _USED_BYTES.size, 0), self._limit - size
        used = _USED_BYTES.unpack(data)[0] if len(data) == _USED_BYTES.size else -1
        if not 0 <= used <= most and not self.full:
            used = self._make_room(most)
            if used > most:
                self._full_until = time.monotonic() + _FULL_SECONDS
        fits = bool(0 <= used <= most)
        os.pwrite(used_fd, _USED_BYTES.pack(used + size if fits else used), 0)
        return fits

    def _make_room(self, most: int) -> int:
        """Delete what no run has used for an hour, the shard that was used least recently first.

        Stops when there are `most` bytes left, and returns the number of bytes.
        """
        with os.scandir(self._folder) as found:
            shards = [entry for entry in found if _SHARD.fullmatch(entry.name)]
            folders = [Path(shard) for shard in shards if shard.is_dir(follow_symlinks=False)]
        files = {folder: _entries(folder) for folder in folders}
        used = sum(size for sizes in files.values() for size in sizes.values())
        for last_use, folder in sorted((folder.stat().st_mtime, folder) for folder in folders):
            if used > most and last_use < time.time() - _UNUSED_SECONDS:
                for file, size in files[folder].items():
                    file.unlink(missing_ok=True)
                    used -= size
                with suppress(OSError):  # it has files of the user
                    folder.rmdir()
        return used

    def _file(self, name: str) -> Path:
        """Return the path of the file of an entry."""
        return self._folder / f"{name}.chunk"

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Lock the cache against other threads and processes, and yield the file "used"."""
        with self._lock:
            fd = open_regular(self._folder / "used", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            try:
                flock(fd, fcntl.LOCK_EX)
                yield fd
            finally:
                flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
                os.close(fd)


def _entries(folder: Path) -> dict[Path, int]:
    """Return the size of each entry in the folder of a shard."""
    with os.scandir(folder) as found:
        files = [file for file in found if file.is_file(follow_symlinks=False)]
        return {Path(file): file.stat().st_size for file in files if _ENTRY.fullmatch(file.name)}


def _reason(error: LoaderError | OSError) -> str:
    """Return what is wrong with a file of the cache, and its path."""
    return f"{error.path}: {error.problem}" if isinstance(error, LoaderError) else str(error)


def cache_error(folder: Path, why: str | None, /) -> LoaderError:
    """Return the error for a cache folder that cannot be used; `why` is the reason."""
    return LoaderError(
        f"the disk cache cannot be used: {why}",
        path=folder,
        advice="free disk space, give another folder by cache= or TWINFEED_CACHE, or use no cache",
    )


def make_cache_folder(folder: Path) -> None:
    """Create the folder of a cache, with access for its owner only, and a tag, CACHEDIR.TAG.

    A folder that has other files, but no tag, is refused, since files of a cache are deleted by
    their names.
    """
    tag_file = folder / "CACHEDIR.TAG"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder)
        if all(name.startswith(".") for name in os.listdir(folder)):
            replace_file(tag_file, _CACHE_TAG, "a tag", lambda file: file.read() == _CACHE_TAG)
        elif not tag_file.exists():
            raise cache_error(folder, "the folder has other files")
        elif read_file(tag_file, len(_CACHE_TAG)) != _CACHE_TAG:
            raise cache_error(folder, "the folder belongs to another program")
    except OSError as error:
        raise cache_error(folder, error.strerror) from error


def _check_owner(folder: Path) -> None:
    """Raise UnsafeContentError for a cache folder that other users own or have access to."""
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UnsafeContentError(
            "only its owner may have access to the folder of a cache: others could change its data",
            path=folder,
            expected=f"user {os.geteuid()}, mode 0700",
            found=f"user {found.st_uid}, mode {found.st_mode & 0o7777:04o}",
            advice="give a folder that does not exist yet: it is created with mode 0700",
        )
