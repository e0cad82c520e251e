"""Stores that obstore serves: S3 and what speaks its protocol, GCS, and Azure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.storage import retries as _retries
from twinfeed.loaders.storage.retries import (
    PassingError,
    RefusedError,
    gone,
    no_ranges,
    refusal,
    refused,
)
from twinfeed.loaders.storage.store import Facts, Piece, Store
from twinfeed.loaders.storage.url import OBJECTS, WEB, Location, masked

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig

_STATUS = re.compile(r"status code: (\d{3})")
_BEFORE = re.compile(r".*?Error performing [A-Z]+ \S+ in \S+ - |Generic \w+ error: ", re.DOTALL)
_BODY = re.compile(r"<.*<Code>(.*?)</Code>.*?<Message>(.*?)</Message>.*", re.DOTALL)
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|specified bucket does not exist")
_FINAL = re.compile("builder error|URL error|incorrectly configured region")
_METADATA = re.compile(r"/latest/(api|meta-data)/|/computeMetadata/|/metadata/identity/")

# What to do where a store refuses, by its kind.
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (profiles are not read), or for a "
    "public bucket AWS_SKIP_SIGNATURE=true; for a store elsewhere set AWS_ENDPOINT_URL too",
    "gs": "set GOOGLE_SERVICE_ACCOUNT to the path of a key, or for a public bucket "
    "GOOGLE_SKIP_SIGNATURE=true",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or for a public container "
    "AZURE_SKIP_SIGNATURE=true",
}
# Where the environment gives the URL of a store. obstore panics where some of these are no URL.
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


class Objects(Store):
    """Make single requests with obstore's own API, without its retries and its merging."""

    gives_facts = True

    def __init__(self, root: Location) -> None:
        super().__init__(root)
        network = _retries.NETWORK
        waits: ClientConfig = {"connect_timeout": _span(network.connect_seconds)}
        if _http_allowed():
            waits["allow_http"] = True
        request, silent = _span(network.request_seconds), _span(network.silent_seconds)
        _check_endpoints(root)
        try:
            self._ranges = _open(root, {**waits, "timeout": request})
            self._writes = _open(root, {**waits, "timeout": "7days", "read_timeout": silent})
        except (exceptions.BaseError, OSError) as error:
            raise LoaderError(
                "a store cannot be opened with what the environment says of it",
                path=root,
                found=_reason(error),
                advice="mend or unset the store's variables in the environment",
            ) from None

    def _facts(self, path: str, /) -> Facts:
        with _naming(self.root / path):
            return _facts(obstore.head(self._ranges, path))

    def _read(self, path: str, start: int, stop: int, /) -> Piece:
        with _naming(self.root / path):
            try:
                found = obstore.get(self._ranges, path, options={"range": (start, stop)})
            except exceptions.BaseError as error:
                if _status(error) != 416:  # the file ends before the range begins
                    raise
                return Piece(memoryview(b""), self._facts(path))
            return Piece(memoryview(found.bytes()), _facts(found.meta))

    def _walk(self) -> Iterator[str]:
        with _naming(self.root):
            for chunk in obstore.list(self._ranges):
                yield from (each["path"] for each in chunk)

    def _write(self, path: str, file: Path, /) -> None:
        with _naming(self.root / path):
            obstore.put(self._writes, path, file)

    def _delete(self, path: str, /) -> None:
        with _naming(self.root / path):
            obstore.delete(self._ranges, path)


def _open(root: Location, options: ClientConfig) -> Any:
    """Open a bucket, below a key that is taken as it is. (obstore's `from_url` would decode it.)"""
    more: Any = {
        "prefix": root.key or None,
        "client_options": options,
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(days=1)},
    }
    kind = OBJECTS[root.scheme]
    if kind == "s3":
        return S3Store(root.host, **more)
    if kind == "gs":
        return GCSStore(root.host, **more)
    container, _, server = root.host.partition("@")
    if server:
        more["account_name"] = server.partition(".")[0]
        more["use_fabric_endpoint"] = server.endswith("fabric.microsoft.com")
    return AzureStore(container, **more)


def _check_endpoints(root: Location) -> None:
    """Check the URLs of stores in the environment; raise LoaderError for a URL that is none.

    A URL without encryption is refused too, unless the environment allows it.
    """
    names = [name for name in _ENDPOINTS[OBJECTS[root.scheme]] if name in os.environ]
    for number, name in enumerate(names):
        given, problem = os.environ[name], None
        if not _is_url(given):
            problem, advice = "is not the URL of a server", f"mend or unset {name}"
        elif number == 0 and given.startswith("http:") and not _http_allowed():
            problem = "is without encryption, which is not allowed"
            allow = f"{name.partition('_')[0]}_ALLOW_HTTP=true"
            advice = f"set {allow}, in a network that you trust"
        if problem:
            raise LoaderError(
                f"{name} in the environment {problem}",
                path=root,
                found=repr(masked(given)),
                advice=advice,
            )


def _is_url(text: str) -> bool:
    """Whether this is the URL of a web server."""
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:  # a port that is none, or half a pair of brackets
        return False
    return parts.scheme in WEB and bool(parts.hostname) and not re.search(r"\s", text)


def _span(seconds: float) -> str:
    """Return a time as obstore takes it."""
    return f"{round(1000 * seconds)}ms"


def _http_allowed() -> bool:
    """Return whether the environment allows stores without encryption.

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
def _naming(place: Location) -> Iterator[None]:
    """Turn the errors of obstore into the errors of this library."""
    try:
        yield
    except FileNotFoundError as error:
        raise (_no_bucket(place, error) or gone(str(place))) from None
    except exceptions.InvalidPathError as error:
        raise LoaderError(
            "the keys below this place cannot be listed: there is a key that cannot be read",
            path=place,
            found=ascii(_reason(error)),
            advice="name the shards without a pattern, or rename the object",
        ) from None
    except exceptions.BaseError as error:
        reason, credentials = _reason(error), _CREDENTIALS[OBJECTS[place.scheme]]
        if _METADATA.search(str(error)):  # the last resort if there are no credentials
            raise PassingError(
                f"this machine's cloud gives none either: {reason}",
                problem="no credentials are in the environment",
                advice=credentials,
            ) from None
        if _status(error) in (401, 403):  # obstore has no class for these in a listing
            raise RefusedError(
                "the store refuses to serve this", path=place, found=reason, advice=credentials
            ) from None
        if missing := _no_bucket(place, error):
            raise missing from None
        if "non-partial response" in reason:
            raise no_ranges(str(place)) from None
        final = refused(_status(error)) or not isinstance(error, exceptions.GenericError)
        if final or _FINAL.search(reason):
            advice = "check the URL and the store's variables in the environment (AWS_REGION, "
            advice += "AWS_ENDPOINT_URL)"
            raise refusal(place, reason, advice) from None
        raise PassingError(reason) from None


def _no_bucket(place: Location, error: Exception) -> LoaderError | None:
    """Return the error of a bucket that is not there, None if the bucket is there, or unknown."""
    if not _NO_BUCKET.search(str(error)):
        return None
    return LoaderError(
        f"there is no bucket (or container) {place.host}",
        path=place,
        advice="check the name of the bucket, and the store's variables in the environment",
    )


def _reason(error: Exception) -> str:
    """Return the reason that an error of obstore gives.

    The request and the source in Rust are left out. Of an answer in XML, the code and the message
    are the reason.
    """
    text = _BEFORE.sub("", str(error).partition("\n\nDebug source")[0], count=1)
    text = _BODY.sub(r"\1: \2", text)
    kind = re.search(r"kind: (TimedOut|Timeout|Interrupted|Connect)", str(error))
    return masked(" ".join(text.split())) + (f" ({kind[1]})" if kind else "")
