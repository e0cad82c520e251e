"""Download indexes from URLs, into a cache if there is one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from twinfeed.loaders.errors import StaleIndexError, check_bytes
from twinfeed.loaders.index.manifest import (
    MANIFEST,
    array_files,
    is_index,
    no_index_error,
    read_manifest,
)
from twinfeed.loaders.storage.disk import cache_error, make_cache_folder
from twinfeed.loaders.storage.disk_cache import DiskCache
from twinfeed.loaders.storage.download import download
from twinfeed.loaders.storage.open_store import store_of
from twinfeed.loaders.storage.retries import NETWORK
from twinfeed.loaders.storage.url import Location, parse_location
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.temporary import make_temporary, remove_temporary, temporary_folder

_ATTEMPTS = 3


def download_index(url: Location, cache: DiskCache | None, /) -> tuple[Path, Path | None]:
    """Download the index at a URL, unless the cache has the same copy already; return its folder,
    and the temporary folder to remove later, if there is no cache.
    """
    if cache is not None:
        try:
            return _download(url, _cache_folder(cache, url)), None
        except FileNotFoundError:  # no index is there; all other errors of files are of the cache
            raise
        except OSError as error:
            raise cache_error(cache.path, error.strerror) from error
    parent_folder = make_temporary()
    try:
        return _download(url, parent_folder), parent_folder
    except BaseException:
        remove_temporary(parent_folder)
        raise


def _download(url: Location, parent_folder: Path) -> Path:
    """Download an index to a new folder, again if it is replaced meanwhile."""
    for _ in range(_ATTEMPTS):
        if (folder := _download_once(url, parent_folder)) is not None:
            return folder
    raise StaleIndexError(
        f"the index was replaced {_ATTEMPTS} times during its download",
        path=url,
        advice="wait until nobody writes there, and try again",
    )


def _download_once(url: Location, parent_folder: Path) -> Path | None:
    """Download an index, and rename it when complete; None if it was replaced meanwhile."""
    with temporary_folder(parent_folder) as temporary:
        download_folder = temporary / "index"
        download_folder.mkdir()
        manifest = _download_manifest(url, download_folder)
        digest = hashlib.sha256((download_folder / MANIFEST).read_bytes()).hexdigest()[:16]
        copy_folder = parent_folder / digest / "index"
        if _is_complete(copy_folder, manifest):
            return copy_folder
        try:
            _download_arrays(url, manifest, download_folder)
        except FileNotFoundError:  # if the manifest has changed, a build has replaced the index
            if _download_manifest(url, download_folder) == manifest:
                raise
            return None
        copy_folder.parent.mkdir(exist_ok=True)
        try:
            os.rename(download_folder, copy_folder)
        except OSError:  # another process has created it, or it is damaged
            if not _is_complete(copy_folder, manifest):
                os.rename(copy_folder, temporary / "damaged")
                os.rename(download_folder, copy_folder)
        return copy_folder


def _download_manifest(url: Location, folder: Path) -> dict[str, Any]:
    """Download the manifest of an index to a folder, and return it."""
    try:
        download(store_of(url), MANIFEST, folder / MANIFEST, LIMITS.manifest_bytes)
    except FileNotFoundError:
        raise no_index_error(url) from None
    manifest = read_manifest(folder, url)
    size = sum(array_files(manifest).values())
    advice = "copy the index here if it is meant to be this large, and open the copy"
    check_bytes("an index", size, LIMITS.download_bytes, path=url, advice=advice)
    return manifest


def _download_arrays(url: Location, manifest: Mapping[str, Any], folder: Path) -> None:
    """Download all arrays of an index to a folder, in parallel."""
    (folder / manifest["folder"]).mkdir()
    sizes = array_files(manifest)
    paths = [folder / file for file in sizes]
    with ThreadPoolExecutor(NETWORK.requests) as pool:
        list(pool.map(partial(download, store_of(url)), sizes, paths, sizes.values()))  # may raise


def _is_complete(path: Path, manifest: Mapping[str, Any]) -> bool:
    """Return whether the folder `path` has all arrays of a manifest, each with the right size."""
    try:
        return (path / MANIFEST).exists() and all(
            (path / file).stat().st_size == size for file, size in array_files(manifest).items()
        )
    except FileNotFoundError:
        return False


def _cache_folder(cache: DiskCache, url: Location) -> Path:
    """Return the folder of a cache for copies of the index at a URL, created if it is missing."""
    make_cache_folder(cache.path)
    folder = cache.path / "indexes" / hashlib.sha256(str(url).encode()).hexdigest()[:16]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def is_index_path(path: str | os.PathLike[str], /) -> bool:
    """Return whether a local path or a URL is that of an index."""
    location = parse_location(path)
    if isinstance(location, Location):
        return store_of(location).exists(MANIFEST)
    return is_index(Path(location))
