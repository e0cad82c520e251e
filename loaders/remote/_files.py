"""Stores that fsspec serves: all that obstore does not."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.remote import _network
from twinfeed.loaders.remote._network import PassingError, gone, refused
from twinfeed.loaders.remote._store import Facts, Piece, Store, refuse_query

_CHUNK = 1 << 20
_TAGS = ("ETag", "etag", "version_id", "generation")


class Files(Store):
    """Make single requests with a file system of fsspec."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        with _told(root):
            from fsspec.core import url_to_fs

            self.system, _ = url_to_fs(root, **_waits(root))

    def _at(self, path: str) -> str:
        refuse_query(self.url(path))
        return str(self.system._strip_protocol(self.url(path)))

    def _facts(self, path: str, /) -> Facts:
        with _told(self.url(path)):
            found = self.system.info(self._at(path))
            tags = [str(found[name]) for name in _TAGS if found.get(name)]
            return Facts(found.get("size"), tags[0] if tags else None)

    def _read(self, path: str, start: int, stop: int, /) -> Piece:
        with _told(self.url(path)):
            return Piece(memoryview(self.system.cat_file(self._at(path), start=start, end=stop)))

    def _stream(self, path: str, /) -> Iterator[memoryview]:
        with _told(self.url(path)), self.system.open(self._at(path), "rb", block_size=0) as file:
            while chunk := file.read(_CHUNK):
                yield memoryview(chunk)

    def _walk(self) -> Iterator[str]:
        base = self._at("").rstrip("/")
        with _told(self.root):
            for path in self.system.find(self._at("")):
                yield str(path)[len(base) :].lstrip("/")

    def _write(self, path: str, file: Path, /) -> None:
        with _told(self.url(path)):
            place = self._at(path)
            self.system.makedirs(posixpath.dirname(place), exist_ok=True)
            self.system.put_file(str(file), place)

    def _delete(self, path: str, /) -> None:
        with _told(self.url(path)):
            self.system.rm_file(self._at(path))


def _waits(root: str) -> dict[str, object]:
    """Return the time-outs of a web server's file system."""
    if not root.startswith(("http://", "https://")):
        return {}
    from aiohttp import ClientTimeout

    network = _network.NETWORK
    waits = ClientTimeout(
        total=None, sock_connect=network.connect_seconds, sock_read=network.silent_seconds
    )
    return {"client_kwargs": {"timeout": waits}}


@contextmanager
def _told(url: str) -> Iterator[None]:
    """Turn the errors of fsspec into the errors of this library. fsspec reports a server that
    refuses connections as a missing file.
    """
    try:
        yield
    except (LoaderError, MemoryError, PassingError):
        raise
    except ImportError as error:
        raise LoaderError(
            "what reads this URL is not installed",
            path=url,
            found=error,
            advice="pip install 'twinfeed[remote]', or what the message names",
        ) from None
    except Exception as error:
        cause = error.__cause__ or error.__context__
        if isinstance(error, FileNotFoundError) and not _unreachable(cause):
            raise gone(url) from None
        reason = cause if isinstance(error, FileNotFoundError) else error
        status = getattr(error, "status", None)
        final = refused(status if isinstance(status, int) else None)
        if final or isinstance(error, (PermissionError, TypeError, ValueError)):
            raise LoaderError(
                "the server of this shard refuses the request",
                path=url,
                found=f"{type(reason).__name__}: {reason}",
                advice="check the URL, the credentials and the options of the store",
            ) from error
        raise PassingError(f"{type(reason).__name__}: {reason}") from error


def _unreachable(cause: BaseException | None) -> bool:
    """Return whether a FileNotFoundError has its cause in a failed connection."""
    if isinstance(cause, (ConnectionError, TimeoutError)):
        return True
    return any(kind.__name__ == "ClientConnectionError" for kind in type(cause).__mro__)
