"""The entries of a disk cache, written atomically, and evicted to keep the size limit."""

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
from twinfeed.loaders.support.atomic import flock, replace_file, temporary_name
from twinfeed.loaders.support.checksum import crc32c
from twinfeed.loaders.support.regular import open_file, read_file

_ENTRY = re.compile(r"[0-9a-f]{24}-\d{1,12}\.chunk")
_TEMPORARY = re.compile(r"\.[0-9a-f]{24}-\d{1,12}\.chunk-[0-9a-f]{16}")
_SUBFOLDER = re.compile(r"[0-9a-f]{2}")
_USED_BYTES = struct.Struct("<q")
_CACHE_TAG = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# A disk cache of twinfeed. It may be deleted while nobody uses it.\n"
)
"""The content of CACHEDIR.TAG, which marks a cache. Backup programs skip such a folder."""

_TRAILER = struct.Struct("<qI")
"""The trailer of an entry: the number of its bytes, and their CRC-32C."""


class Disk:
    """The entries of a disk cache, as files in a folder that several processes may share.

    A file of the folder holds the total size of all entries, and is changed under a file lock. The
    total grows before an entry is written, and shrinks after one is deleted, so a killed process
    may leave a total that is too high, but never too low. A process that is the only user of the
    folder recounts the total, and deletes temporary files of killed processes.

    On a file system without locks, several processes may together exceed the limit for a while,
    since each recounts when it starts.
    """

    def __init__(self, cache: DiskCache, /) -> None:
        self._folder, self._limit = cache.path, cache.bytes
        self._lock = threading.Lock()
        make_cache_folder(self._folder)
        self._used_fd = _open_state_file(self._folder, "used")
        self._users_fd = _open_state_file(self._folder, "users")
        with self._locked(), suppress(BlockingIOError):
            self._recount(exclusive=flock(self._users_fd, fcntl.LOCK_EX | fcntl.LOCK_NB))
        flock(self._users_fd, fcntl.LOCK_SH)
        self._warned = False

    def __del__(self) -> None:
        for name in ("_used_fd", "_users_fd"):
            if name in vars(self):
                os.close(getattr(self, name))

    def get(self, name: str, length: int, /) -> bytes | None:
        """Return the bytes of an entry of this length, or None if it is missing or damaged.

        A damaged entry is deleted. The modification time of an entry is the time of its last use.
        """
        file = self._file(name)
        try:
            with open_file(file) as entry:
                data = entry.read(length + _TRAILER.size + 1)
        except FileNotFoundError:
            return None
        except (LoaderError, OSError) as error:  # not a regular file, or unreadable
            self._warn(error)
            self._unlink(name)  # its size is not known, so it is not subtracted from the total
            return None
        body = data[:length]
        if data[length:] != _TRAILER.pack(length, crc32c(body)):
            self.drop(name, length)
            return None
        with suppress(FileNotFoundError):  # evicted meanwhile
            os.utime(file)  # sets the time of the last use to now
        return body

    def put(self, name: str, data: bytes, victims: Iterator[str], /) -> bool:
        """Write an entry, after evicting entries (`victims`) until it fits.

        Returns:
            Whether the entry is cached. It is not if it does not fit or cannot be written.
        """
        file, size = self._file(name), len(data) + _TRAILER.size
        if not self._reserve(size, victims):
            return False
        temporary = temporary_name(file)
        try:
            file.parent.mkdir(mode=0o700, exist_ok=True)
            with temporary.open("xb") as out:
                out.write(data)
                out.write(_TRAILER.pack(len(data), crc32c(data)))
            with self._locked():
                if file.is_file():  # another process has written it
                    temporary.unlink()
                    self._store_used(self._load_used() - size)
                else:
                    os.replace(temporary, file)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            with self._locked():
                self._store_used(self._load_used() - size)
            self._warn(error)
            return False
        return True

    def _warn(self, error: LoaderError | OSError) -> None:
        """Warn that some bytes are not cached because of this error; later errors do not warn."""
        if not self._warned:
            self._warned = True
            why = f"{error.path}: {error.problem}" if isinstance(error, LoaderError) else error
            text = f"{self._folder}: some bytes are not cached: {why}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def drop(self, name: str, length: int, /) -> None:
        """Delete an entry with `length` bytes of data, and subtract its size from the total."""
        with self._locked():
            if self._unlink(name):
                self._store_used(self._load_used() - length - _TRAILER.size)

    def entries(self) -> Iterator[tuple[str, float]]:
        """Yield the name of each entry and the time of its last use, in seconds."""
        for file in self._files():
            if _ENTRY.fullmatch(file.name):
                with suppress(FileNotFoundError):
                    yield file.name[: -len(".chunk")], file.stat().st_mtime

    def last_use(self, name: str, /) -> float | None:
        """Return the time of the last use of an entry, or None if it is deleted."""
        with suppress(FileNotFoundError):
            return self._file(name).stat().st_mtime
        return None

    def _reserve(self, size: int, victims: Iterator[str]) -> bool:
        """Evict entries (`victims`) until `size` more bytes fit in the limit, and add `size` to the
        total.

        Returns:
            Whether they fit. If not, they are not added.
        """
        with self._locked():
            used = self._load_used()
            while used + size > self._limit:
                victim = next(victims, None)
                if victim is None:
                    break
                used -= self._unlink(victim)
            fits = used + size <= self._limit
            self._store_used(used + size if fits else used)
            return fits

    def _file(self, name: str) -> Path:
        """Return the path of the file of an entry."""
        return self._folder / name[:2] / f"{name}.chunk"

    def _unlink(self, name: str) -> int:
        """Delete the file of an entry; return its size, or 0 if it was deleted already. The caller
        subtracts the size from the total.
        """
        file = self._file(name)
        with suppress(OSError):  # deleted already, or a folder
            size = file.lstat().st_size
            file.unlink()
            return size
        return 0

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the total size against other threads and processes, in the `with` block."""
        with self._lock:
            flock(self._used_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                flock(self._used_fd, fcntl.LOCK_UN)

    def _load_used(self) -> int:
        """Return the total size of all entries. The caller has the lock."""
        data = os.pread(self._used_fd, _USED_BYTES.size, 0)
        used = int(_USED_BYTES.unpack(data)[0]) if len(data) == _USED_BYTES.size else -1
        return used if used >= 0 else self._recount()

    def _store_used(self, used: int) -> None:
        """Store the total size of all entries. The caller has the lock."""
        os.pwrite(self._used_fd, _USED_BYTES.pack(max(0, used)), 0)

    def _recount(self, *, exclusive: bool = False) -> int:
        """Add up the sizes of all entries, store the total, and return it.

        If this process is the only user of the folder (`exclusive`), temporary files are of killed
        processes, and are deleted.
        """
        used = 0
        for file in self._files():
            with suppress(FileNotFoundError):
                if exclusive and _TEMPORARY.fullmatch(file.name):
                    file.unlink()
                elif _ENTRY.fullmatch(file.name):
                    used += file.stat().st_size
        self._store_used(used)
        return used

    def _files(self) -> Iterator[Path]:
        """Yield the regular files in the folders of entries. Other processes may delete some."""
        with suppress(FileNotFoundError):
            for folder in self._folder.iterdir():
                is_folder = folder.is_dir() and not folder.is_symlink()
                if is_folder and _SUBFOLDER.fullmatch(folder.name):
                    with os.scandir(folder) as found:
                        yield from (Path(e) for e in found if e.is_file(follow_symlinks=False))


def _open_state_file(folder: Path, name: str) -> int:
    """Open a state file of a cache folder, creating it if needed; return its file descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(folder / name, flags, 0o600)
    except OSError as error:
        raise cache_error(folder, f"{name}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise cache_error(folder, f"{name} is not a regular file")
    return fd


def cache_error(folder: Path, why: str | None, /) -> LoaderError:
    """Return the error for a cache folder that cannot be used; `why` is the reason."""
    return LoaderError(
        f"the disk cache cannot be used: {why}",
        path=folder,
        advice="free disk space, give another folder by cache= or TWINFEED_CACHE, or use no cache",
    )


def make_cache_folder(folder: Path) -> None:
    """Create the folder of a cache, with access for its owner only.

    An empty folder gets the tag of a cache, in the file CACHEDIR.TAG. Hidden files, such as
    .DS_Store, do not count. Any other folder must have this tag already, since files of a cache are
    deleted by their names.

    Raises:
        LoaderError: the folder has other files, or cannot be written.
        UnsafeContentError: other users have access to the folder.
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
