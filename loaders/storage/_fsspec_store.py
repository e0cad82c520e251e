"""Stores of fsspec: every scheme that obstore and HTTP do not serve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.storage.retries import (
    TransientError,
    is_final,
    not_found,
    refused_error,
    with_retries,
)
from twinfeed.loaders.storage.store import ObjectInfo, RangeData, Store, not_installed_error
from twinfeed.loaders.storage.url import Location, masked

_TAGS = ("ETag", "etag", "version_id", "generation")


class FsspecStore(Store):
    """A store that is read through a file system of fsspec."""

    def __init__(self, root: Location) -> None:
        super().__init__(root)
        self.system = with_retries(str(root), "its file system", self._system)

    def _system(self) -> Any:
        """Return the file system of fsspec that serves the root URL."""
        with _translated_errors(str(self.root)):
            from fsspec.core import url_to_fs

            return url_to_fs(str(self.root))[0]

    def _fsspec_path(self, path: str) -> str:
        """Return the path of a file in the format of its fsspec file system.

        Raises:
            LoaderError: fsspec would change the key, and read another file.
        """
        location = self.root / path if path else self.root
        fsspec_path = str(self.system._strip_protocol(str(location)))
        if not fsspec_path.endswith(location.key):
            raise LoaderError(
                "fsspec would read another file than the one that this URL names",
                path=location,
                found=fsspec_path,
                advice="rename the file",
            )
        return fsspec_path

    def _stat(self, path: str, /) -> ObjectInfo:
        """Return the size and the ETag or version of a file."""
        with _translated_errors(self.url(path)):
            found = self.system.info(self._fsspec_path(path))
            tags = [str(found[name]) for name in _TAGS if found.get(name)]
            return ObjectInfo(found.get("size"), tags[0] if tags else None)

    def _read(self, path: str, start: int, stop: int, /) -> RangeData:
        """Return the bytes [start, stop) of a file."""
        with _translated_errors(self.url(path)):
            data = self.system.cat_file(self._fsspec_path(path), start=start, end=stop)
            return RangeData(memoryview(data))

    def _list(self) -> Iterator[str]:
        """Yield the paths of all files, relative to the root."""
        base = self._fsspec_path("").rstrip("/")
        with _translated_errors(str(self.root)):
            for path in self.system.find(self._fsspec_path("")):
                yield str(path)[len(base) :].lstrip("/")


@contextmanager
def _translated_errors(url: str) -> Iterator[None]:
    """Turn exceptions of fsspec in the `with` block into those of this library.

    Failures that may be transient become a `TransientError`, which is retried.
    """
    try:
        yield
    except (LoaderError, MemoryError, TransientError):
        raise
    except ImportError as error:
        raise not_installed_error(url, error) from None
    except FileNotFoundError:
        raise not_found(url) from None
    except Exception as error:
        # An HTTP status such as 403 is a final failure, which a retry cannot help. Without a
        # status, only some classes of errors are final.
        status = getattr(error, "status", None)
        final = is_final(status if isinstance(status, int) else None)
        if final or isinstance(error, (PermissionError, TypeError, ValueError)):
            message = masked(f"{type(error).__name__}: {error}")
            advice = "check the URL, the credentials and the options of the store"
            raise refused_error(url, message, advice) from None
        raise TransientError(f"{type(error).__name__}: {error}") from None
