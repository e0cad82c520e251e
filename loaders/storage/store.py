"""The base class of stores: the files below a URL, read by byte ranges, with retries."""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.storage.request_pool import request_pool
from twinfeed.loaders.storage.retries import TransientError, no_ranges_error, with_retries
from twinfeed.loaders.storage.url import Location


class ObjectInfo(NamedTuple):
    """The size of an object in bytes, and its ETag, which changes when the object does.

    Each is None if the store does not send it.
    """

    bytes: int | None = None
    tag: str | None = None


class RangeData(NamedTuple):
    """The bytes of a range, and the size and ETag of the object that came with them."""

    data: memoryview
    info: ObjectInfo = ObjectInfo()


class Store(ABC):
    """The files below `root`. Paths are relative to the root.

    The public methods retry transient failures. Subclasses implement single attempts: `_stat`,
    `_read` (fewer bytes at the end of the file) and `_list` (all paths, in any order), and raise
    `TransientError` to be retried.
    """

    sends_info = False
    """Whether each response with a range also has the size and ETag of the file."""

    def __init__(self, root: Location) -> None:
        self.root = root
        self._info: dict[str, ObjectInfo] = {}
        self._urls: dict[str, str] = {}

    @abstractmethod
    def _stat(self, path: str, /) -> ObjectInfo: ...
    @abstractmethod
    def _read(self, path: str, start: int, stop: int, /) -> RangeData: ...
    @abstractmethod
    def _list(self) -> Iterator[str]: ...

    def url(self, path: str, /) -> str:
        """Return the URL of a file, as text.

        Raises:
            LoaderError: a path that cannot be in a URL.
        """
        found = self._urls.get(path)
        if found is None:  # parsing a path costs more than sending the request
            found = self._urls[path] = str(self.root / path)
        return found

    def stat(self, paths: Sequence[str], /, *, fresh: bool = False) -> list[ObjectInfo]:
        """Return the size and ETag of each file, requested in parallel.

        They are cached, and with `fresh` requested again.
        """
        missing = [path for path in dict.fromkeys(paths) if fresh or path not in self._info]
        submit = request_pool().submit
        futures = [submit(partial(self._stat_with_retries, path), 0) for path in missing]
        self._info |= {path: future.result() for path, future in zip(missing, futures, strict=True)}
        return [self._info[path] for path in paths]

    def exists(self, path: str, /) -> bool:
        """Return whether a file exists, by a request of its own."""
        try:
            self.stat([path], fresh=True)
        except FileNotFoundError:
            return False
        return True

    def forget(self) -> None:
        """Clear the cached sizes and ETags."""
        self._info.clear()

    def _stat_with_retries(self, path: str) -> ObjectInfo:
        """Return the size and ETag of a file, from a request that is retried."""
        return with_retries(self.url(path), "its size", lambda: self._stat(path))

    def read(self, path: str, start: int, stop: int, /) -> RangeData:
        """Return the bytes [start, stop) of a file, retrying transient failures.

        If the store says how large the file is, fewer bytes are only returned at its end.
        """
        url, requested = self.url(path), f"bytes {start} to {stop}"

        def attempt() -> RangeData:
            """Read once; raise an error if the number of bytes is wrong."""
            part = self._read(path, start, stop)
            found, size = len(part.data), part.info.bytes
            if found > stop - start:
                raise no_ranges_error(url)
            if found < stop - start and size is not None and start + found < min(stop, size):
                raise TransientError(f"a short body: {found} of {stop - start} bytes")
            return part

        return with_retries(url, requested, attempt)

    def send(self, path: str, start: int, stop: int, /) -> Callable[[], RangeData | None] | None:
        """Send a request for the bytes [start, stop) of a file, if a connection is idle.

        Returns:
            A function that receives the bytes, with the size and ETag; its result is None if `read`
            must read them. None if no request was sent.
        """
        return None

    def glob(self, pattern: str, /) -> list[str]:
        """Return the sorted paths that match a glob pattern, in which only ** crosses a "/"."""
        parts = pattern.split("/")
        return sorted(path for path in self.list() if _matches(path.split("/"), parts))

    def list(self) -> list[str]:
        """Return the paths of all files."""
        return with_retries(str(self.root), "a listing", lambda: [*self._list()])


def not_installed_error(url: object, error: ImportError, /) -> LoaderError:
    """Return the error for a URL that needs a package which is not installed."""
    return LoaderError(
        "the package that reads this URL is not installed",
        path=url,
        found=error,
        advice="pip install 'twinfeed[remote]', or what the message names",
    )


def _matches(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Return whether the names of a path match the parts of a glob pattern; ** matches several.

    For example ["a", "b", "c.tar"] matches ["a", "**", "*.tar"].
    """
    if not parts or not names:
        return not parts and not names
    if parts[0] == "**":
        return any(_matches(names[n:], parts[1:]) for n in range(len(names) + 1))
    return fnmatch.fnmatchcase(names[0], parts[0]) and _matches(names[1:], parts[1:])
