"""URLs of files and folders, parsed and checked: the only module that parses URLs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from urllib.parse import quote, quote_from_bytes, unquote

from twinfeed.loaders.errors import LoaderError, UnsafeContentError

ROOTS = "TWINFEED_ROOTS"
"""The environment variable with the URLs, and all below them, that indexes opened on this machine
may refer to, separated by spaces or newlines. A space that is not followed by `scheme://` is a part
of a name.
"""

OBJECTS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("abfs", "abfss", "adl", "az", "azure"), "az"),
}
"""The kind of object store of each scheme that obstore serves."""

WEB = ("http", "https")

_NAME = r"[A-Za-z][A-Za-z0-9+.-]*"
_URL = re.compile(rf"((?:{_NAME}::)*{_NAME})://(.*)", re.DOTALL)
_URL_SEPARATOR = re.compile(rf"\s+(?=(?:{_NAME}::)*{_NAME}://)")
_SECRET_NAMES = r"(X-Amz-|X-Goog-|sig=|[\w.-]*(signature|token|secret|password|credentials?)=)"
_SIGNED = re.compile(rf"[?#;&]{_SECRET_NAMES}", re.IGNORECASE)
_QUERY_START = re.compile(rf"[?#]|[;&]{_SECRET_NAMES}", re.IGNORECASE)
_UNWRITABLE = re.compile(r"[\0-\x1f\x7f\ud800-\udfff]")
_HOSTS = {
    "web": re.compile(r"(\[[0-9a-f:.]+\]|[^\s/?#@\\:%\[\]<>^|\"`{}*\ud800-\udfff]+)(:\d{1,5})?"),
    "s3": re.compile(r"[A-Za-z0-9._-]+"),
    "gs": re.compile(r"[A-Za-z0-9._-]+"),
    "az": re.compile(
        r"[A-Za-z0-9$-]+"
        r"(@[a-z0-9-]+\.(dfs|blob)\.(core\.windows\.net|fabric\.microsoft\.com))?"
    ),
    "other": re.compile(r"(?!.*::)[^\0-\x20\x7f?#\\\ud800-\udfff]*"),
}
_PORTS = {"http": ":80", "https": ":443"}
_UNQUOTED = "/%!$&'()*+,;=:@-._~[]|^"
"""Characters of a URL that are sent to a web server unquoted (RFC 3986)."""

_CREDENTIALS_ADVICE = (
    "credentials belong in the environment (docs/remote.md names the variables): name the "
    "file without them, as in s3://bucket/shard; a web server with a password is not read"
)


@dataclass(frozen=True)
class Location:
    """A parsed URL without secrets: the scheme, the host or bucket, and the key.

    - s3, gs and az: the key is raw. Nothing in the key is decoded, and `?` and `#` belong to it.
    - http and https: the key is the path of the URL, percent-encoded.
    - `from_user`: True for a URL of the caller, False for one that an index contains.

    >>> Location.of("s3://bucket/run#1/100%25/a?.tar")
    Location(scheme='s3', host='bucket', key='run#1/100%25/a?.tar')
    >>> str(Location.of("HTTPS://Example.org:443/a b/") / "c.tar")
    'https://example.org/a%20b/c.tar'
    """

    scheme: str
    host: str
    key: str
    from_user: bool = field(default=True, compare=False, repr=False)

    @classmethod
    def of(cls, url: str, /, *, from_user: bool = True) -> Location:
        """Parse a URL: check it, and split it into scheme, host (or bucket) and key.

        A scheme of fsspec may be a chain of file systems, such as simplecache::https. LoaderError
        if the URL cannot be parsed or has credentials; UnsafeContentError for a key that is not
        allowed.
        """
        match = _URL.fullmatch(url)
        if not match:
            raise LoaderError(
                "not a URL", path=masked(url), advice="write it as in s3://bucket/shard"
            )
        scheme, (host, _, key) = match[1].lower(), match[2].partition("/")
        protocol = scheme.rpartition("::")[2]
        _check_no_password(url, protocol=protocol, host=host)
        _check_not_signed(url)
        store_kind = OBJECTS.get(protocol, "other")
        if protocol in WEB:
            host, store_kind = host.lower().removesuffix(_PORTS[protocol]), "web"
        if not _HOSTS[store_kind].fullmatch(host):
            raise LoaderError(
                "this URL has no host or bucket, or an invalid one",
                path=masked(url),
                advice="write it as in s3://bucket/shard or https://host/shard",
            )
        root = cls(scheme, host, key="", from_user=from_user)
        return root / key.removesuffix("/") if key else root  # the operator "/" checks the key

    @property
    def protocol(self) -> str:
        """The last scheme of a chain of file systems of fsspec: https of simplecache::https."""
        return self.scheme.rpartition("::")[2]

    @property
    def web(self) -> bool:
        """Whether the URL is of a web server."""
        return self.protocol in WEB

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}" + (f"/{self.key}" if self.key else "")

    def __truediv__(self, path: str, /) -> Location:
        """Return the URL of a relative path below this URL: `location / "folder/shard.tar"`.

        Raises:
            UnsafeContentError: the path has "..", an empty name, a control character, a query, ….
        """
        _check_not_signed(f"{self}/{path}")
        web = self.web
        key = quote(path, safe=_UNQUOTED, errors="surrogatepass") if web else path
        parts = [unquote(part) if web else part for part in key.split("/")]
        is_fsspec = not web and self.protocol not in OBJECTS  # it chains file systems by "::"
        faults = {  # whether the path has each of these
            "a query (?), a fragment (#) or a backslash": web and re.search(r"[?#\\]", path),
            "a chain of file systems": is_fsspec and "::" in path,
            "an empty name, as in a//b": "" in parts,
            "the name . or ..": {".", ".."} & {*parts},
            "a control character, or bytes that are not UTF-8": any(map(_UNWRITABLE.search, parts)),
        }
        for fault, found in faults.items():
            if found:
                raise UnsafeContentError(
                    f"a URL with {fault} is not read",
                    path=masked(f"{self}/{path}").encode("utf-8", "backslashreplace").decode(),
                    advice="rename the file (at a web server, write a ? as %3F and a # as %23)",
                )
        return replace(self, key=f"{self.key}/{key}" if self.key else key)

    @property
    def name(self) -> str:
        """The last component of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """The URL of the folder."""
        return replace(self, key=self.key.rpartition("/")[0])

    def below(self, root: Location, /) -> str | None:
        """Return the path of this URL relative to `root`, or None if it is not below `root`."""
        if (self.scheme, self.host) != (root.scheme, root.host) or self == root:
            return None
        base = f"{root.key}/" if root.key else ""
        return self.key[len(base) :] if self.key.startswith(base) else None

    def shares_host(self, location: Location, /) -> bool:
        """Return whether both URLs are of the same host, or of the same bucket."""
        return bool(self.host) and (self.scheme, self.host) == (location.scheme, location.host)


def parse_location(path: str | os.PathLike[str], /) -> Root:
    """Return the `Location` of a URL, or a local path as it is, as text."""
    text = os.fspath(path)
    return Location.of(text) if is_url(text) else text


def is_url(text: str, /) -> bool:
    """Return whether a string is a URL, as "scheme://…", and not a local path."""
    return _URL.fullmatch(text) is not None


Root = str | Location
"""A local folder, or the URL of one."""


def masked(text: str, /) -> str:
    """Replace what may be a secret in a URL, or in a message of another program, by ***: a user
    with a password, and the query.

    A user without a password is hidden too, but not a path with an @. A text such as user:a?b@host,
    whose password may contain a ?, is hidden as a whole.

    >>> masked("no route to https://user:word@host/a.tar?token=1")
    'no route to https://***@host/a.tar?***'
    >>> masked("https://user@host/a.tar"), masked("https://host/a@b.tar")
    ('https://***@host/a.tar', 'https://host/a@b.tar')
    >>> masked("https://user:a?b@host/a.tar")
    '***'
    """
    scheme, separator, url = text.partition("://")
    if not separator:
        scheme, url = "", text
    query = _QUERY_START.search(url)
    end = query.start() if query else len(url)
    shown, hidden = url[:end], url[end:]
    user, at, host = shown.rpartition("@")
    if "@" in scheme + hidden:  # perhaps user:a?b@host or user:a://b@host: hide the whole text
        return "***"
    # `user` is all before the last @: "user:word" or "user" of a host, but "host/a" of host/a@b.
    if at and (":" in user or "/" not in user):
        shown = f"***@{host}"
    return f"{scheme}{separator}{shown}{hidden[:1]}{'***' if hidden else ''}"


def allowed(location: Location, /) -> bool:
    """Return whether the environment variable TWINFEED_ROOTS allows indexes to refer to a URL.

    Raises:
        LoaderError: the variable is not a list of URLs, or has a URL that is refused.
    """
    text = os.environ.get(ROOTS, "").strip()
    try:
        roots = [Location.of(url) for url in _URL_SEPARATOR.split(text)] if text else []
    except LoaderError as error:
        error.problem = f"{ROOTS} in the environment: {error.problem}"
        raise
    return any(location == root or location.below(root) is not None for root in roots)


def quoted(name: str, /) -> str:
    """Percent-encode the name of a file for the URL of a web server.

    >>> quoted("50% of #1?.tar")
    '50%25%20of%20%231%3F.tar'
    """
    return quote_from_bytes(name.encode("utf-8", "surrogateescape"), safe="/!$&'()*+,;=:@-._~")


def unquoted(path: str, /) -> str:
    """Decode the percent-encoded path of a URL to the name of a file.

    Raises:
        UnsafeContentError: an encoded "/", which a file name cannot contain.
    """
    if re.search("%2f", path, re.IGNORECASE):
        raise UnsafeContentError(
            "a URL with an encoded / cannot be the name of a local file", path=path
        )
    return unquote(path, errors="surrogateescape")


def _check_no_password(url: str, *, protocol: str, host: str) -> None:
    """Raise LoaderError for a password, or a user that is not a container of abfss, in a URL."""
    user = host.rpartition("@")[0]
    is_host_and_port = _HOSTS["web"].fullmatch(host)  # such as example.org:443
    if ":" in host and not is_host_and_port:
        # "user:a" is not a host. A password may contain a slash, as in sftp://user:a/b@host: `host`
        # is then cut at the slash. So take all that lies before the last @ of the URL: "user:a/b".
        user = url.partition("://")[2].rpartition("@")[0]
    may_have_user = protocol not in (*WEB, *OBJECTS) or protocol in ("abfs", "abfss")
    if ":" in user or (user and not may_have_user):
        problem = "a URL with a user or a password is not read"
        raise LoaderError(problem, path=masked(url), advice=_CREDENTIALS_ADVICE)


def _check_not_signed(url: str) -> None:
    """Raise LoaderError for a URL with a signature or a token, which is a secret."""
    if _SIGNED.search(url):
        problem = "a URL with a signature or a token, such as a presigned URL, is not read"
        raise LoaderError(problem, path=masked(url), advice=_CREDENTIALS_ADVICE)
