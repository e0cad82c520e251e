"""The entries of a disk cache: files that are there whole or not at all, within a bound."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from twinfeed.loaders.errors import LoaderError, UnsafeContentError
from twinfeed.loaders.storage.disk_cache import DiskCache
from twinfeed.loaders.support.atomic import beside, lock, replace_file
from twinfeed.loaders.support.checksum import crc32c
from twinfeed.loaders.support.regular import open_file, read_file

_ENTRY = re.compile(r"[0-9a-f]{24}-\d{1,12}\.chunk")
_TEMPORARY = re.compile(r"\.[0-9a-f]{24}-\d{1,12}\.chunk-[0-9a-f]{16}")
_PART = re.compile(r"[0-9a-f]{2}")
_USED = struct.Struct("<q")
_TAG = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# A disk cache of twinfeed. It may be deleted while nobody uses it.\n"
)
"""What marks a folder as a cache, for backups too, which leave it out."""

_TRAILER = struct.Struct("<qI")
"""What follows the bytes of an entry: their number, and their CRC-32C."""


class Disk:
    """Read and write entries; one object for each process.

    A file of the folder holds the number of bytes of all entries. The number is changed under a
    lock. The number grows before an entry is written, and shrinks after an entry is deleted. So a
    killed process may leave a number that is too high, but never a number that is too low. A
    process that has the folder alone counts again, and deletes what killed processes were writing.

    On a file system without locks, several processes may together exceed the bound for a while:
    each counts again when it starts.
    """

    def __init__(self, cache: DiskCache, /) -> None:
        self.cache = cache
        self._lock = threading.Lock()
        make_folder_of_cache(cache.path)
        self._state = _opened(cache.path, "used")
        self._users = _opened(cache.path, "users")
        with self._locked(), suppress(BlockingIOError):
            self._count_anew(alone=lock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB))
        lock(self._users, fcntl.LOCK_SH)
        self._warned = False

    def __del__(self) -> None:
        for name in ("_state", "_users"):
            if name in vars(self):
                os.close(getattr(self, name))

    def get(self, name: str, length: int, /) -> bytes | None:
        """Return an entry; None if it is missing, or was damaged and is now deleted."""
        file = self._file(name)
        try:
            with open_file(file) as opened:
                data = opened.read(length + _TRAILER.size + 1)
        except FileNotFoundError:
            return None
        except (LoaderError, OSError) as error:  # no file, or it cannot be read
            self._warn(error)
            self._delete(name)
            return None
        body = data[:length]
        if data[length:] != _TRAILER.pack(length, crc32c(body)):
            self.drop(name, length)
            return None
        with suppress(FileNotFoundError):
            os.utime(file)
        return body

    def put(self, name: str, data: bytes, victims: Iterator[str], /) -> bool:
        """Write an entry, after deleting `victims` for room. Return whether the entry is there.

        An entry for which there is no room, or which cannot be written, is left out.
        """
        file, size = self._file(name), len(data) + _TRAILER.size
        if not self._take(size, victims):
            return False
        temporary = beside(file)
        try:
            file.parent.mkdir(mode=0o700, exist_ok=True)
            with temporary.open("xb") as out:
                out.write(data)
                out.write(_TRAILER.pack(len(data), crc32c(data)))
            with self._locked():
                if file.is_file():  # another process was first
                    temporary.unlink()
                    self._set(self._used() - size)
                else:
                    os.replace(temporary, file)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            with self._locked():
                self._set(self._used() - size)
            self._warn(error)
            return False
        return True

    def _warn(self, error: LoaderError | OSError) -> None:
        """Say once that reading goes on without a part of the cache."""
        if not self._warned:
            self._warned = True
            why = f"{error.path}: {error.problem}" if isinstance(error, LoaderError) else error
            text = f"{self.cache.path}: some bytes are not cached: {why}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def drop(self, name: str, length: int, /) -> None:
        """Delete an entry of `length` bytes."""
        with self._locked():
            if self._delete(name):
                self._set(self._used() - length - _TRAILER.size)

    def entries(self) -> Iterator[tuple[str, float]]:
        """Yield the name of each entry and when it was used last, in seconds."""
        for file in self._files():
            if _ENTRY.fullmatch(file.name):
                with suppress(FileNotFoundError):
                    yield file.name[: -len(".chunk")], file.stat().st_mtime

    def last_use(self, name: str, /) -> float | None:
        """Return when an entry was used last; None if it is gone."""
        with suppress(FileNotFoundError):
            return self._file(name).stat().st_mtime
        return None

    def _take(self, size: int, victims: Iterator[str]) -> bool:
        """Reserve room, before anything is written."""
        with self._locked():
            used = self._used()
            while used + size > self.cache.bytes:
                victim = next(victims, None)
                if victim is None:
                    break
                used -= self._delete(victim)
            fits = used + size <= self.cache.bytes
            self._set(used + size if fits else used)
            return fits

    def _file(self, name: str) -> Path:
        return self.cache.path / name[:2] / f"{name}.chunk"

    def _delete(self, name: str) -> int:
        """Delete an entry, and return its bytes."""
        file = self._file(name)
        with suppress(OSError):  # it is gone, or a folder
            size = file.lstat().st_size
            file.unlink()
            return size
        return 0

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Change how much is used, one thread of one process at a time."""
        with self._lock:
            lock(self._state, fcntl.LOCK_EX)
            try:
                yield
            finally:
                lock(self._state, fcntl.LOCK_UN)

    def _used(self) -> int:
        """Return how many bytes are used; the lock is held."""
        data = os.pread(self._state, _USED.size, 0)
        used = int(_USED.unpack(data)[0]) if len(data) == _USED.size else -1
        return used if used >= 0 else self._count_anew()

    def _set(self, used: int) -> None:
        os.pwrite(self._state, _USED.pack(max(0, used)), 0)

    def _count_anew(self, *, alone: bool = False) -> int:
        """Count the bytes of all entries; if `alone`, delete what killed processes were writing."""
        used = 0
        for file in self._files():
            with suppress(FileNotFoundError):
                if alone and _TEMPORARY.fullmatch(file.name):
                    file.unlink()
                elif _ENTRY.fullmatch(file.name):
                    used += file.stat().st_size
        self._set(used)
        return used

    def _files(self) -> Iterator[Path]:
        """Yield the regular files in the folders of entries, of which some may be deleted."""
        with suppress(FileNotFoundError):
            for part in self.cache.path.iterdir():
                if _PART.fullmatch(part.name) and part.is_dir() and not part.is_symlink():
                    with os.scandir(part) as found:
                        yield from (Path(n) for n in found if n.is_file(follow_symlinks=False))


def _opened(folder: Path, name: str) -> int:
    """Open a file of the cache's own, which is made if need be."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(folder / name, flags, 0o600)
    except OSError as error:
        raise unusable(folder, f"{name}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise unusable(folder, f"{name} is not a regular file")
    return fd


def unusable(folder: Path, why: str | None, /) -> LoaderError:
    """Return the error of a cache that cannot be read and written."""
    return LoaderError(
        f"the disk cache cannot be used: {why}",
        path=folder,
        advice="give another folder by cache= or TWINFEED_CACHE, make room, or go on without",
    )


def make_folder_of_cache(folder: Path) -> None:
    """Make the folder of a cache, which only its owner may enter.

    A folder that holds anything must have the tag of a cache: entries are deleted by name there.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder)
        if all(name.startswith(".") for name in os.listdir(folder)):
            replace_file(folder / "CACHEDIR.TAG", _TAG)
        elif read_file(folder / "CACHEDIR.TAG", len(_TAG)) != _TAG:
            raise unusable(folder, "it belongs to another program")
    except FileNotFoundError:
        raise unusable(folder, "the folder holds other files") from None
    except OSError as error:
        raise unusable(folder, error.strerror) from error


def _check_owner(folder: Path) -> None:
    """Refuse a folder that others may enter."""
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UnsafeContentError(
            "the folder of a cache must be its owner's alone: others could put bytes there",
            path=folder,
            expected=f"user {os.geteuid()}, mode 0700",
            found=f"user {found.st_uid}, mode {found.st_mode & 0o7777:04o}",
            advice="name a folder that does not exist yet: it is made for its owner alone",
        )
