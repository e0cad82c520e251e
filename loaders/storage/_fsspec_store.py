"""Stores that fsspec serves: all that obstore does not."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.storage.retries import PassingError, gone, patiently, refusal, refused
from twinfeed.loaders.storage.store import Facts, Piece, Store, not_installed
from twinfeed.loaders.storage.url import Location, masked

_TAGS = ("ETag", "etag", "version_id", "generation")


class Files(Store):
    """Make single requests with a file system of fsspec."""

    def __init__(self, root: Location) -> None:
        super().__init__(root)
        self.system = patiently(str(root), "its file system", self._system)

    def _system(self) -> Any:
        with _naming(str(self.root)):
            from fsspec.core import url_to_fs

            return url_to_fs(str(self.root))[0]

    def _at(self, path: str) -> str:
        """Return a path as the file system takes it. The file system must take the key whole."""
        place = self.root / path if path else self.root
        found = str(self.system._strip_protocol(str(place)))
        if not found.endswith(place.key):
            raise LoaderError(
                "what reads this URL would read another file",
                path=place,
                found=found,
                advice="rename the file",
            )
        return found

    def _facts(self, path: str, /) -> Facts:
        with _naming(self.url(path)):
            found = self.system.info(self._at(path))
            tags = [str(found[name]) for name in _TAGS if found.get(name)]
            return Facts(found.get("size"), tags[0] if tags else None)

    def _read(self, path: str, start: int, stop: int, /) -> Piece:
        with _naming(self.url(path)):
            return Piece(memoryview(self.system.cat_file(self._at(path), start=start, end=stop)))

    def _walk(self) -> Iterator[str]:
        base = self._at("").rstrip("/")
        with _naming(str(self.root)):
            for path in self.system.find(self._at("")):
                yield str(path)[len(base) :].lstrip("/")

    def _write(self, path: str, file: Path, /) -> None:
        with _naming(self.url(path)):
            place = self._at(path)
            self.system.makedirs(posixpath.dirname(place), exist_ok=True)
            self.system.put_file(str(file), place)

    def _delete(self, path: str, /) -> None:
        with _naming(self.url(path)):
            self.system.rm_file(self._at(path))


@contextmanager
def _naming(url: str) -> Iterator[None]:
    """Turn the errors of fsspec into the errors of this library."""
    try:
        yield
    except (LoaderError, MemoryError, PassingError):
        raise
    except ImportError as error:
        raise not_installed(url, error) from None
    except FileNotFoundError:
        raise gone(url) from None
    except Exception as error:
        status = getattr(error, "status", None)
        final = refused(status if isinstance(status, int) else None)
        if final or isinstance(error, (PermissionError, TypeError, ValueError)):
            said = masked(f"{type(error).__name__}: {error}")
            advice = "check the URL, the credentials and the options of the store"
            raise refusal(url, said, advice) from None
        raise PassingError(f"{type(error).__name__}: {error}") from None
