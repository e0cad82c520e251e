"""Where something lies: the only module that parses URLs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from urllib.parse import quote, quote_from_bytes, unquote

from twinfeed.loaders.errors import LoaderError, UnsafeContentError

ROOTS = "TWINFEED_ROOTS"
"""The environment variable that names the places (a URL and all below it) that the indexes opened
on this machine may lead to, with spaces or newlines between them. A space that no `scheme://`
follows belongs to a name.
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
_BETWEEN = re.compile(rf"\s+(?=(?:{_NAME}::)*{_NAME}://)")
_NAMED = r"(X-Amz-|X-Goog-|sig=|[\w.-]*(signature|token|secret|password|credentials?)=)"
_SIGNED = re.compile(rf"[?#;&]{_NAMED}", re.IGNORECASE)
_HIDDEN = re.compile(rf"[?#]|[;&]{_NAMED}", re.IGNORECASE)
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
_AS_TYPED = "/%!$&'()*+,;=:@-._~[]|^"
"""What a web server is sent as it is typed. All else is quoted, as the standard of URLs has it."""

_SECRET = (
    "credentials belong in the environment (docs/remote.md names the variables): name the place "
    "without them, as in s3://bucket/shard; a web server with a password is not read"
)


@dataclass(frozen=True)
class Location:
    """A place in a store: the scheme, the host or bucket, and the key, without a secret.

    - s3, gs and az: the key is raw. Nothing in the key is decoded, and `?` and `#` belong to it.
    - http and https: the key is the path of the URL, quoted as the standard of URLs has it.
    - `typed`: whether the caller gave the place. A place that only an index names is not `typed`.

    Raises:
        LoaderError: a URL that cannot be parsed, or has credentials. The message has no
            credentials.

    >>> Location.of("s3://bucket/run#1/100%25/a?.tar")
    Location(scheme='s3', host='bucket', key='run#1/100%25/a?.tar')
    >>> str(Location.of("HTTPS://Example.org:443/a b/") / "c.tar")
    'https://example.org/a%20b/c.tar'
    """

    scheme: str
    host: str
    key: str
    typed: bool = field(default=True, compare=False, repr=False)

    @classmethod
    def of(cls, url: str, /, *, typed: bool = True) -> Location:
        """Parse a URL."""
        match = _URL.fullmatch(url)
        if not match:
            raise LoaderError("no URL", path=masked(url), advice="write it as in s3://bucket/shard")
        scheme, (host, _, key) = match[1].lower(), match[2].partition("/")
        _refuse_user(url, scheme.rpartition("::")[2], host)
        _refuse_signed(url)
        place = cls(scheme, host, "", typed)
        if place.web:
            host = host.lower().removesuffix(_PORTS[place.protocol])
        kind = "web" if place.web else OBJECTS.get(place.protocol, "other")
        if not _HOSTS[kind].fullmatch(host):
            raise LoaderError(
                "this URL names no host or bucket, or none that can be",
                path=masked(url),
                advice="write it as in s3://bucket/shard or https://host/shard",
            )
        place = replace(place, host=host)
        return place / key.removesuffix("/") if key else place

    @property
    def protocol(self) -> str:
        """The scheme, without what wraps it (as in simplecache::https)."""
        return self.scheme.rpartition("::")[2]

    @property
    def web(self) -> bool:
        """Whether the place is on a web server."""
        return self.protocol in WEB

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}" + (f"/{self.key}" if self.key else "")

    def __truediv__(self, path: str, /) -> Location:
        """Return the place of a path below this place."""
        _refuse_signed(f"{self}/{path}")
        key = quote(path, safe=_AS_TYPED, errors="surrogatepass") if self.web else path
        parts = [unquote(part) if self.web else part for part in key.split("/")]
        chains = not self.web and self.protocol not in OBJECTS
        faults = {
            "a query (?), a fragment (#) or a backslash": self.web and re.search(r"[?#\\]", path),
            "a chain of file systems": chains and "::" in path,
            "an empty name, as in a//b": "" in parts,
            "the name . or ..": {".", ".."} & {*parts},
            "a control character, or bytes that are not UTF-8": any(map(_UNWRITABLE.search, parts)),
        }
        for what, found in faults.items():
            if found:
                raise UnsafeContentError(
                    f"a URL with {what} is not read",
                    path=masked(f"{self}/{path}").encode("utf-8", "backslashreplace").decode(),
                    advice="rename the file (a ? or # in a name of a web server is written %3F or "
                    "%23)",
                )
        return replace(self, key=f"{self.key}/{key}" if self.key else key)

    @property
    def name(self) -> str:
        """The last name of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """The place that this place lies in."""
        return replace(self, key=self.key.rpartition("/")[0])

    def below(self, root: Location, /) -> str | None:
        """Return the path of this place below `root`, None if it does not lie there."""
        if (self.scheme, self.host) != (root.scheme, root.host) or self == root:
            return None
        base = f"{root.key}/" if root.key else ""
        return self.key[len(base) :] if self.key.startswith(base) else None

    def shares_host(self, other: Location, /) -> bool:
        """Return whether both places are on the same host, or in the same bucket."""
        return bool(self.host) and (self.scheme, self.host) == (other.scheme, other.host)


def place_of(path: str | os.PathLike[str], /) -> Root:
    """Return the place that a caller named: a Location for a URL, or a local path."""
    text = os.fspath(path)
    return Location.of(text) if is_url(text) else text


def is_url(text: str, /) -> bool:
    """Return whether a path is a URL."""
    return _URL.fullmatch(text) is not None


Root = str | Location
"""Where shards are: in a local folder, or at a Location."""


def masked(text: str, /) -> str:
    """Return a URL, or another program's message, without what may be a secret.

    >>> masked("no route to https://user:word@host/a.tar?token=1")
    'no route to https://***@host/a.tar?***'
    """
    words, separator, url = text.partition("://")
    if not separator:
        words, url = "", text
    found = _HIDDEN.search(url)
    shown, hidden = (url[: found.start()], url[found.start() :]) if found else (url, "")
    user, at, host = shown.rpartition("@")
    if "@" in words + hidden:  # a password may hold a ? or a #
        return "***"
    if at and (":" in user or "/" not in user):
        shown = f"***@{host}"
    return f"{words}{separator}{shown}{hidden[:1]}{'***' if hidden else ''}"


def allowed(place: Location, /) -> bool:
    """Return whether the environment allows indexes to lead to a place.

    Raises:
        LoaderError: the variable of the environment is no list of URLs, or has a URL that is
            refused.
    """
    given = os.environ.get(ROOTS, "").strip()
    try:
        roots = [Location.of(url) for url in _BETWEEN.split(given)] if given else []
    except LoaderError as error:
        error.problem = f"{ROOTS} in the environment: {error.problem}"
        raise
    return any(place == root or place.below(root) is not None for root in roots)


def quoted(name: str, /) -> str:
    """Return the name of a file as the URL of a web server has it.

    >>> quoted("50% of #1?.tar")
    '50%25%20of%20%231%3F.tar'
    """
    return quote_from_bytes(name.encode("utf-8", "surrogateescape"), safe="/!$&'()*+,;=:@-._~")


def unquoted(path: str, /) -> str:
    """Return the name of a file whose path in a URL is `path`.

    Raises:
        UnsafeContentError: a quoted "/", which no name of a file can have.
    """
    if re.search("%2f", path, re.IGNORECASE):
        raise UnsafeContentError("a name with a quoted / is no path here", path=path)
    return unquote(path, errors="surrogateescape")


def _refuse_user(url: str, protocol: str, host: str) -> None:
    """Raise LoaderError for a URL with a password, or with a user that its scheme does not have."""
    user = host.rpartition("@")[0]
    if ":" in host and not _HOSTS["web"].fullmatch(host):  # a password may hold a "/"
        user = url.partition("://")[2].rpartition("@")[0]
    plain = protocol not in (*WEB, *OBJECTS) or protocol in ("abfs", "abfss")
    if ":" in user or (user and not plain):
        problem = "a URL with a user or a password is not read"
        raise LoaderError(problem, path=masked(url), advice=_SECRET)


def _refuse_signed(url: str) -> None:
    """Raise LoaderError for a URL with a signature or a token."""
    if _SIGNED.search(url):
        problem = "a URL with a signature or a token, such as a presigned URL, is not read"
        raise LoaderError(problem, path=masked(url), advice=_SECRET)
