"""Stores that obstore serves: S3 and what speaks its protocol, GCS, Azure, and HTTP."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import obstore
from obstore import exceptions
from obstore.store import from_url

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.remote import _network
from twinfeed.loaders.remote._network import PassingError, gone, no_ranges, refused
from twinfeed.loaders.remote._store import Facts, Piece, Store, refuse_query

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig

_STATUS = re.compile(r"status code: (\d{3})")
_CHUNK = 1 << 20
_NO_LENGTH = "Content-Length Header missing"

# What to do where a store refuses, by the first letter of its URL.
_CREDENTIALS = {
    "s": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or for a public bucket "
    "AWS_SKIP_SIGNATURE=true",
    "g": "set GOOGLE_SERVICE_ACCOUNT to the path of a key, or for a public bucket "
    "GOOGLE_SKIP_SIGNATURE=true",
    "a": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or for a public container "
    "AZURE_SKIP_SIGNATURE=true",
    "h": "a plain URL carries no credentials: look at the URL, or name the store itself, as in "
    "s3://bucket/shard",
}


class Objects(Store):
    """Make single requests with obstore's own API, without its retries and its merging."""

    tells = True

    def __init__(self, root: str) -> None:
        super().__init__(root)
        network = _network.NETWORK
        waits: ClientConfig = {"connect_timeout": _span(network.connect_seconds)}
        if root.startswith("http://") or _told_of_http():
            waits["allow_http"] = True
        self._web = root.startswith(("http://", "https://"))
        request, silent = _span(network.request_seconds), _span(network.silent_seconds)
        self._ranges = self._open({**waits, "timeout": request})
        self._streams = self._open({**waits, "timeout": "7days", "read_timeout": silent})

    def _open(self, options: ClientConfig) -> Any:
        once = {"max_retries": 0, "retry_timeout": timedelta(days=1)}
        with _told(self.root):
            return from_url(self.root, client_options=options, retry_config=once)  # type: ignore[call-overload]

    def _at(self, path: str) -> str:
        """Return a path as obstore takes it: obstore itself quotes the paths of web servers."""
        if not self._web:
            return path
        refuse_query(self.url(path))
        return unquote(path)

    def _facts(self, path: str, /) -> Facts:
        with _told(self.url(path)):
            try:
                return _facts(obstore.head(self._ranges, self._at(path)))
            except exceptions.GenericError as error:
                if _NO_LENGTH not in str(error):
                    raise
                return Facts()

    def _read(self, path: str, start: int, stop: int, /) -> Piece:
        with _told(self.url(path)):
            try:
                found = obstore.get(self._ranges, self._at(path), options={"range": (start, stop)})
            except exceptions.BaseError as error:
                if _status(error) != 416:  # the file ends before the range begins
                    raise
                return Piece(memoryview(b""), self._facts(path))
            return Piece(memoryview(found.bytes()), _facts(found.meta))

    def _stream(self, path: str, /) -> Iterator[memoryview]:
        with _told(self.url(path)):
            try:
                found = obstore.get(self._streams, self._at(path))
            except exceptions.GenericError as error:
                if _NO_LENGTH not in str(error):
                    raise
                yield from self._lists()._stream(path)
                return
            for chunk in found.stream(min_chunk_size=_CHUNK):
                yield memoryview(chunk)

    def _walk(self) -> Iterator[str]:
        if self._web:
            yield from self._lists()._walk()
            return
        with _told(self.root):
            for chunk in obstore.list(self._ranges):
                yield from (each["path"] for each in chunk)

    def _lists(self) -> Store:
        """Return the store that reads pages of listings, and files of unknown length."""
        from twinfeed.loaders.remote._files import Files

        return Files(self.root)

    def _write(self, path: str, file: Path, /) -> None:
        with _told(self.url(path)):
            obstore.put(self._streams, self._at(path), file)

    def _delete(self, path: str, /) -> None:
        with _told(self.url(path)):
            obstore.delete(self._ranges, self._at(path))


def _span(seconds: float) -> str:
    """Return a time as obstore takes it."""
    return f"{round(1000 * seconds)}ms"


def _told_of_http() -> bool:
    """Whether the environment allows stores without encryption.

    obstore itself reads these variables only if no time-outs are given.
    """
    names = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")
    return any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in names)


def _facts(meta: ObjectMeta) -> Facts:
    return Facts(meta["size"], meta["e_tag"])


def _status(error: Exception) -> int | None:
    """Return the status of a server's answer, which obstore gives only in its message."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


@contextmanager
def _told(url: str) -> Iterator[None]:
    """Turn the errors of obstore into the errors of this library."""
    try:
        yield
    except FileNotFoundError:
        raise gone(url) from None
    except exceptions.NotSupportedError:
        raise no_ranges(url) from None
    except exceptions.BaseError as error:
        reason = _reason(error)
        if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
            raise LoaderError(
                "the store refuses to serve this",
                path=url,
                found=reason,
                advice=_CREDENTIALS[url[0]],
            ) from None
        final = refused(_status(error)) or not isinstance(error, exceptions.GenericError)
        if final or "builder error" in reason:
            raise LoaderError(
                "the server of this shard refuses the request",
                path=url,
                found=reason,
                advice="check the URL and the store's variables in the environment (an endpoint at "
                "http:// needs AWS_ALLOW_HTTP=true)",
            ) from None
        raise PassingError(reason) from None


def _reason(error: Exception) -> str:
    """Return what an error of obstore says first; the rest is its source in Rust."""
    text = str(error).partition("\n\nDebug source")[0]
    kind = re.search(r"kind: (TimedOut|Timeout|Interrupted|Connect)", str(error))
    return " ".join(text.split()) + (f" ({kind[1]})" if kind else "")
