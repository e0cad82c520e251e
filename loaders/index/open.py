"""`open_index` opens an index, finds its shards, and checks that they exist."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress

import numpy as np

from twinfeed.loaders.errors import LoaderError, StaleIndexError, UnsafeContentError
from twinfeed.loaders.index.arrays import StringColumn
from twinfeed.loaders.index.index import Index, load_index
from twinfeed.loaders.index.paths import check_files, check_relative, check_shards, join
from twinfeed.loaders.storage.disk_cache import DiskCache, cache_of_environment
from twinfeed.loaders.storage.open_store import store_of
from twinfeed.loaders.storage.retries import RefusedError
from twinfeed.loaders.storage.url import ROOTS, Location, Root, allowed, is_url
from twinfeed.samplers import validate

_STAT_ALL, _STAT_SAMPLE = 1000, 16
"""With at most `_STAT_ALL` shards, the sizes of all are checked, and else of `_STAT_SAMPLE`."""


@validate.show_call("open_index(path)")
def open_index(
    path: str | os.PathLike[str],
    /,
    *,
    root: str | os.PathLike[str] | None = None,
    digest: str | None = None,
    cache: DiskCache | None = None,
    checksums: bool = True,
) -> Index:
    """Open the index folder at `path`, a path or a URL, and check that its shards are there.

    Each shard must have the size that it was indexed with. If there are more than a thousand
    shards, only sixteen are checked, spread over all. The others are checked when they are first
    read, and so are shards at a URL. With loose files, at least one of sixteen must exist, and each
    is checked when it is read.

    Args:
        path: the index folder, or its URL.
        root: what shard paths are relative to. The default is the folder, or the URL prefix,
            that holds the index folder. If the first shard does not lie there, the index may lead
            to the URL that it was built with: to the host or the bucket of the index itself, or to
            a URL that TWINFEED_ROOTS in the environment allows (URLs with spaces or newlines
            between them, each with all that lies below). Any other URL is refused, and the error
            has the `root` to give.
        digest: the `Index.digest`, for an index from somebody else. Get the digest in a way that
            you trust. A checksum is not a signature: whoever can write the index can write
            checksums that fit. The digest covers the index with all its checksums.
        cache: keeps on a local disk what is read of shards at a URL, for later epochs and other
            processes. The default is the cache that the environment names; see `DiskCache`. An
            index at a URL is copied to the cache, where the copy stays, or else to a temporary
            folder.
        checksums: whether all readers of the index compare the bytes of each field with the CRC-32C
            that the index holds.

    Raises:
        FileNotFoundError: no index is there, or shards are missing: the first five are named.
        IndexFormatError: the index is incomplete or damaged, or has another version.
        StaleIndexError: a shard has another size, or the index another digest.
        UnsafeContentError: a path leads outside the root, or the shards are at a URL that is not
            allowed.
        LoaderError: the store cannot be reached, or refuses the request.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> folder = mkdtemp()
    >>> index = pack([{"word": b"to"}], folder)["data"]
    >>> open_index(f"{folder}/data.index", digest=index.digest).fingerprint == index.fingerprint
    True
    """
    if not isinstance(cache, DiskCache | None):
        raise TypeError(f"cache must be a DiskCache, got {cache!r}")
    if cache is None and is_url(os.fspath(path)):
        cache = cache_of_environment()
    index = load_index(path, root, cache)
    index.checksums = validate.flag("checksums", checksums)
    if root is None:
        set_shards_root(index)
    if index.remote:
        index.cache = cache or cache_of_environment()
    if isinstance(index.shards_root, Location):
        store_of(index.shards_root).forget()
    if digest is not None and index.digest != digest:
        raise StaleIndexError(
            "this is another index",
            path=index.where,
            expected=f"digest {digest}",
            found=index.digest,
            advice="get the index again from where the digest comes from",
        )
    _stat_shards(index)
    return index


def set_shards_root(index: Index) -> None:
    """Set `index.shards_root` to the URL that the index was built with, if the shards are not
    beside it.

    An index could name any URL: UnsafeContentError unless it has the host of the index, or is
    allowed.
    """
    folder, indexed_url = index.shards_root, index.built_root
    if indexed_url is None or indexed_url == folder or _has_first_shard(index):
        return
    same_host = isinstance(folder, Location) and indexed_url.shares_host(folder)
    if not same_host and not allowed(indexed_url):
        raise UnsafeContentError(
            "the shards of this index lie elsewhere, at a URL that is not allowed",
            path=index.where,
            expected=f"shards beside the index, below {folder}",
            found=f"shards at {indexed_url}",
            advice=f"if you trust this URL, open the index with root={str(indexed_url)!r} (in a "
            f"terminal --root {shlex.quote(str(indexed_url))}), or set {ROOTS} to it",
        )
    index.shards_root = indexed_url


def _has_first_shard(index: Index) -> bool:
    """Return whether the first shard or file is below `index.shards_root`; else, or if unknown,
    False.
    """
    # No error is raised here, as the shards may be elsewhere: below the root that the caller takes,
    # the path is checked again when it is read. The two errors are that a store refuses the request
    # (403 for example), and that the path is not allowed, such as "../x".
    with suppress(RefusedError, UnsafeContentError):
        return file_exists(index.shards_root, _unverified_paths(index)[0])
    return False


def _unverified_paths(index: Index) -> StringColumn:
    """Return the paths of the shards, or of the loose files, without comparing their checksum."""
    name = "files" if index.container == "files" else "shardpaths"
    return index._strings(name, verify=False)


def file_exists(root: Root, name: str, /) -> bool:
    """Return whether the file `name` exists below a root, a folder or a URL."""
    if isinstance(root, str):
        return os.path.exists(join(root, name))
    return store_of(root).exists(check_relative(name, is_object_key=True))


def _stat_shards(index: Index) -> None:
    """Check that shards exist with their sizes: all, or a sample of many. Of a sample of loose
    files at least one must exist. At a URL, only the names of shards are checked.
    """
    is_loose = index.container == "files"
    paths = _unverified_paths(index)
    max_checked = _STAT_SAMPLE if is_loose or len(paths) > _STAT_ALL else _STAT_ALL
    num_checked = min(len(paths), max_checked)
    sample = np.linspace(0, len(paths) - 1, num_checked).astype(np.int64)
    try:
        names = [paths[number] for number in sample.tolist()]
        if not is_loose:
            sizes = index._arrays["shards"]["bytes"][sample].tolist()
            check_shards(index.shards_root, names, sizes)
        elif isinstance(index.shards_root, str):
            check_files(index.shards_root, names)
    except (LoaderError, OSError):
        # A damaged index may be the cause. Reading these arrays compares their checksums, and
        # raises IndexFormatError if the index is damaged.
        _ = index.shards, index.shard_paths, index.files
        raise
