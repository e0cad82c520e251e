"""Stores of obstore: S3 and compatible ones, Google Cloud Storage, and Azure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.storage import retries as _retries
from twinfeed.loaders.storage.retries import (
    RefusedError,
    TransientError,
    is_final,
    no_ranges_error,
    not_found,
    refused_error,
)
from twinfeed.loaders.storage.store import ObjectInfo, RangeData, Store
from twinfeed.loaders.storage.url import OBJECTS, WEB, Location, masked

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig

_STATUS_CODE = re.compile(r"status code: (\d{3})")
_REQUEST = re.compile(r".*?Error performing [A-Z]+ \S+ in \S+ - |Generic \w+ error: ", re.DOTALL)
_XML_BODY = re.compile(r"<.*<Code>(.*?)</Code>.*?<Message>(.*?)</Message>.*", re.DOTALL)
# Reasons for which a retry cannot help.
_FINAL_REASON = re.compile("builder error|URL error|incorrectly configured region")
# The server from which a virtual machine of a cloud gets credentials.
_METADATA_URL = re.compile(r"/latest/(api|meta-data)/|/computeMetadata/|/metadata/identity/")

# The advice if a store refuses the credentials, by the kind of store.
_CREDENTIALS_ADVICE = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (profiles are not read), or for a "
    "public bucket AWS_SKIP_SIGNATURE=true; for a store elsewhere set AWS_ENDPOINT_URL too",
    "gs": "set GOOGLE_SERVICE_ACCOUNT to the path of a key, or for a public bucket "
    "GOOGLE_SKIP_SIGNATURE=true",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or for a public container "
    "AZURE_SKIP_SIGNATURE=true",
}
# The environment variables with the URL of the server. obstore uses the first that is set, and
# panics if one of them is not a URL.
_ENDPOINT_VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


class ObjectStore(Store):
    """A store that is read through obstore, with obstore's own retries turned off."""

    sends_info = True

    def __init__(self, root: Location) -> None:
        super().__init__(root)
        network = _retries.NETWORK
        timeouts: ClientConfig = {"connect_timeout": _milliseconds(network.connect_seconds)}
        if _http_allowed():
            timeouts["allow_http"] = True
        request_timeout = _milliseconds(network.request_seconds)
        _check_endpoints(root)
        try:
            self._client = _open(root, {**timeouts, "timeout": request_timeout})
        except (exceptions.BaseError, OSError) as error:
            raise LoaderError(
                "a store cannot be opened with its variables in the environment",
                path=root,
                found=_reason(error),
                advice="correct or unset the store's variables in the environment",
            ) from None

    def _stat(self, path: str, /) -> ObjectInfo:
        """Return the size and ETag of an object."""
        with _translated_errors(self.root / path):
            return _stat(obstore.head(self._client, path))

    def _read(self, path: str, start: int, stop: int, /) -> RangeData:
        """Return the bytes [start, stop) of an object, fewer at its end."""
        with _translated_errors(self.root / path):
            try:
                found = obstore.get(self._client, path, options={"range": (start, stop)})
            except exceptions.BaseError as error:
                if _status(error) != 416:  # range not satisfiable: the file ends before it
                    raise
                return RangeData(memoryview(b""), self._stat(path))
            return RangeData(memoryview(found.bytes()), _stat(found.meta))

    def _list(self) -> Iterator[str]:
        """Yield the paths of all objects, relative to the root."""
        with _translated_errors(self.root):
            for chunk in obstore.list(self._client):
                yield from (meta["path"] for meta in chunk)


def _open(root: Location, options: ClientConfig) -> Any:
    """Open a client of obstore for a bucket; the key of `root` is the prefix of all keys.

    The function `from_url` of obstore would decode the key, so a class is called for each kind of
    store. `options` are those of the HTTP client.
    """
    settings: Any = {
        "prefix": root.key or None,
        "client_options": options,
        # No retries by obstore: this library retries by itself (`Store`). obstore's time limit for
        # a request with its retries is so long that it has no effect.
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(days=1)},
    }
    kind = OBJECTS[root.scheme]
    if kind == "s3":
        return S3Store(root.host, **settings)
    if kind == "gs":
        return GCSStore(root.host, **settings)
    # Azure. The host of a URL az://container/key is the container. If the server is named too, as
    # in container@account.blob.core.windows.net, it begins with the name of the account. Microsoft
    # Fabric is a service with the same protocol at other servers.
    container, _, server = root.host.partition("@")
    if server:
        settings["account_name"] = server.partition(".")[0]
        settings["use_fabric_endpoint"] = server.endswith("fabric.microsoft.com")
    return AzureStore(container, **settings)


def _check_endpoints(root: Location) -> None:
    """Raise LoaderError for an endpoint in the environment that is no URL, at which obstore panics.

    The first one that is set, to which obstore connects, must be https://, or http:// with
    permission.
    """
    names = [name for name in _ENDPOINT_VARIABLES[OBJECTS[root.scheme]] if name in os.environ]
    for name in names:
        endpoint, problem = os.environ[name], None
        if not _is_url(endpoint):
            problem, advice = "is not the URL of a server", f"correct or unset {name}"
        elif name == names[0] and endpoint.startswith("http:") and not _http_allowed():
            problem = "is http://, which is not encrypted and not allowed"
            advice = f"set {name.partition('_')[0]}_ALLOW_HTTP=true if you trust the network"
        if problem:
            raise LoaderError(
                f"{name} in the environment {problem}",
                path=root,
                found=repr(masked(endpoint)),
                advice=advice,
            )


def _is_url(text: str) -> bool:
    """Return whether a string is a valid URL of a web server (http or https)."""
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises ValueError if it is not a number up to 65535
    except ValueError:  # an invalid port, or an unpaired bracket
        return False
    return parts.scheme in WEB and bool(parts.hostname) and not re.search(r"\s", text)


def _milliseconds(seconds: float) -> str:
    """Return a duration as text, for obstore."""
    return f"{round(1000 * seconds)}ms"


def _http_allowed() -> bool:
    """Return whether the environment allows stores without encryption.

    obstore itself ignores these variables if timeouts are set.
    """
    names = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")
    return any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in names)


def _stat(meta: ObjectMeta) -> ObjectInfo:
    return ObjectInfo(meta["size"], meta["e_tag"])


def _status(error: Exception) -> int | None:
    """Return the HTTP status in the text of an error of obstore; None if there is none."""
    match = _STATUS_CODE.search(str(error))
    return int(match[1]) if match else None


@contextmanager
def _translated_errors(location: Location) -> Iterator[None]:
    """Turn exceptions of obstore in the `with` block into those of this library.

    Transient failures, such as a timeout, become a `TransientError`, which is retried. Missing
    objects, refused credentials and other final failures become errors with advice.
    """
    try:
        yield
    except FileNotFoundError:
        raise not_found(str(location)) from None
    except exceptions.BaseError as error:
        reason, credentials = _reason(error), _CREDENTIALS_ADVICE[OBJECTS[location.scheme]]
        # Without credentials in the environment, obstore asks the metadata server of the cloud.
        if _METADATA_URL.search(str(error)):
            raise TransientError(
                f"the metadata server of a cloud was asked for credentials, and failed: {reason}",
                problem="no credentials are in the environment",
                advice=credentials,
            ) from None
        if _status(error) in (401, 403):  # obstore has no class for these in a listing
            raise RefusedError(
                "the store refuses to serve this", path=location, found=reason, advice=credentials
            ) from None
        if "non-partial response" in reason:
            raise no_ranges_error(str(location)) from None
        is_known = not isinstance(error, exceptions.GenericError)  # generic: timeouts, 5xx, …
        if is_known or is_final(_status(error)) or _FINAL_REASON.search(reason):
            variables = "AWS_REGION, AWS_ENDPOINT_URL"
            advice = f"check the URL and the store's variables in the environment ({variables})"
            raise refused_error(location, reason, advice) from None
        raise TransientError(reason) from None


def _reason(error: Exception) -> str:
    """Return the reason of an error of obstore, as one line of text without secrets.

    The text of such an error begins with the request, and ends with the error of Rust's library
    ("Debug source"); both are removed. A response in XML is reduced to its code and message.
    """
    text, _, _ = str(error).partition("\n\nDebug source")
    text = _REQUEST.sub("", text, count=1)
    text = _XML_BODY.sub(r"\1: \2", text)
    kind = re.search(r"kind: (TimedOut|Timeout|Interrupted|Connect)", str(error))
    return masked(" ".join(text.split())) + (f" ({kind[1]})" if kind else "")
