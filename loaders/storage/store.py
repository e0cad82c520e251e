"""A store: the files below one URL, read by ranges."""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.storage.request_pool import request_pool
from twinfeed.loaders.storage.retries import PassingError, no_ranges, patiently
from twinfeed.loaders.storage.url import Location


class Facts(NamedTuple):
    """How many bytes a file has, and its tag, which changes when the file does.

    None if the store does not say.
    """

    bytes: int | None = None
    tag: str | None = None


class Piece(NamedTuple):
    """A range of a file, and the facts of the file that came with the range."""

    data: memoryview
    facts: Facts = Facts()


class Store(ABC):
    """Read and write what lies below `root`. Paths are relative to the root.

    The methods try again after a failure that may pass. They raise FileNotFoundError for a missing
    file, and LoaderError with the URL, the range and the attempts.

    The methods of a subclass make a single request, and raise PassingError for a failure that may
    pass: `_facts`, `_read` (as much of a range as the file has), `_walk` (the paths of all files,
    in any order), and, if the store can be written to, `_write` (a file is there whole or not at
    all) and `_delete`.
    """

    gives_facts = False
    """Whether a range comes together with the facts of its file."""

    def __init__(self, root: Location) -> None:
        self.root = root
        self._known: dict[str, Facts] = {}
        self._urls: dict[str, str] = {}

    @abstractmethod
    def _facts(self, path: str, /) -> Facts: ...
    @abstractmethod
    def _read(self, path: str, start: int, stop: int, /) -> Piece: ...
    @abstractmethod
    def _walk(self) -> Iterator[str]: ...

    def _write(self, path: str, file: Path, /) -> None:
        raise not_written(self.root)

    def _delete(self, path: str, /) -> None:
        raise not_written(self.root)

    def url(self, path: str, /) -> str:
        """Return the URL of a file.

        Raises:
            LoaderError: a path that cannot be in a URL.
        """
        found = self._urls.get(path)
        if found is None:  # checking a path costs more than sending the request
            found = self._urls[path] = str(self.root / path)
        return found

    def facts(self, paths: Sequence[str], /, *, fresh: bool = False) -> list[Facts]:
        """Return the facts of files, requested at once. Unless `fresh`, each is requested once."""
        asked = [path for path in dict.fromkeys(paths) if fresh or path not in self._known]
        waiting = [request_pool().submit(partial(self._ask, path), 0) for path in asked]
        self._known |= {path: one.result() for path, one in zip(asked, waiting, strict=True)}
        return [self._known[path] for path in paths]

    def forget(self) -> None:
        """Request the facts anew the next time."""
        self._known.clear()

    def _ask(self, path: str) -> Facts:
        return patiently(self.url(path), "its size", lambda: self._facts(path))

    def read(self, path: str, start: int, stop: int, /) -> Piece:
        """Return a range, shorter only at the end of the file, as far as its size is known."""
        url, wanted = self.url(path), f"bytes {start} to {stop}"

        def attempt() -> Piece:
            piece = self._read(path, start, stop)
            found, size = len(piece.data), piece.facts.bytes
            if found > stop - start:
                raise no_ranges(url)
            if found < stop - start and size is not None and start + found < min(stop, size):
                raise PassingError(f"a short body: {found} of {stop - start} bytes")
            return piece

        return patiently(url, wanted, attempt)

    def glob(self, pattern: str, /) -> list[str]:
        """Return the paths that match a pattern, sorted. Only the wildcard ** crosses a "/"."""
        parts = pattern.split("/")
        return sorted(path for path in self.list() if _matches(path.split("/"), parts))

    def write(self, path: str, file: Path, /) -> None:
        """Write a local file to `path`."""
        patiently(self.url(path), "to write there", lambda: self._write(path, file))

    def list(self) -> list[str]:
        """Return the paths of all files."""
        return patiently(str(self.root), "a listing", lambda: [*self._walk()])

    def delete(self, path: str, /) -> None:
        """Delete a file."""
        patiently(self.url(path), "to delete", lambda: self._delete(path))


def not_written(place: Location, /) -> LoaderError:
    """Return the error of an index that is to be written to a web server."""
    return LoaderError(
        "a web server cannot be written to", path=place, advice="write to a store, as s3://bucket/x"
    )


def not_installed(url: object, error: ImportError, /) -> LoaderError:
    """Return the error of a missing package."""
    return LoaderError(
        "what reads this URL is not installed",
        path=url,
        found=error,
        advice="pip install 'twinfeed[remote]', or what the message names",
    )


def _matches(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Return whether the names of a path match the parts of a pattern."""
    if not parts or not names:
        return not parts and not names
    if parts[0] == "**":
        return any(_matches(names[n:], parts[1:]) for n in range(len(names) + 1))
    return fnmatch.fnmatchcase(names[0], parts[0]) and _matches(names[1:], parts[1:])
