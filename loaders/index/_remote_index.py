"""An index at a URL: brought here once, and written there so that nobody sees half of it."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from twinfeed.loaders._temporary import make_temporary, remove_temporary
from twinfeed.loaders.errors import IndexFormatError, LoaderError
from twinfeed.loaders.formats._sniff import MANIFEST
from twinfeed.loaders.index._paths import is_url
from twinfeed.loaders.index._store import ARRAY_NAME, COLUMNS, read_manifest
from twinfeed.loaders.limits import LIMITS
from twinfeed.loaders.remote._disk import make_folder_of_cache, unusable
from twinfeed.loaders.remote._download import bring
from twinfeed.loaders.remote._network import NETWORK
from twinfeed.loaders.remote._store import store_of
from twinfeed.loaders.remote._wire import wire
from twinfeed.loaders.remote.cache import DiskCache

_UNWRITABLE = (errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EROFS)


def bring_index(url: str, cache: DiskCache | None, /) -> tuple[Path, Path | None]:
    """Return a local folder with the index at `url`, and the temporary folder to remove, or None.

    In a cache the copy stays. Its folder is named after the URL and the manifest.
    """
    url = url.rstrip("/")
    if cache is not None:
        try:
            return _brought(url, _indexes(cache, url)), None
        except OSError as error:
            if error.errno in _UNWRITABLE:
                raise unusable(cache.path, error) from error
            raise
    base = make_temporary()
    try:
        return _brought(url, base), base
    except BaseException:
        remove_temporary(base)
        raise


def _brought(url: str, base: Path) -> Path:
    """Bring the index at `url` to a folder below `base` if it is not there; return the folder."""
    fresh = base / f".{secrets.token_hex(8)}"
    fresh.mkdir()
    try:
        manifest = _manifest(url, fresh)
        digest = hashlib.sha256((fresh / MANIFEST).read_bytes()).hexdigest()[:16]
        final = base / digest / (url.rpartition("/")[2] or "x.index")
        if _is_whole(final, manifest):
            return final
        try:
            _bring_arrays(url, manifest, fresh)
        except FileNotFoundError:  # was it replaced by a new build meanwhile?
            if _manifest(url, fresh) == manifest:
                raise
            return _brought(url, base)
        final.parent.mkdir(exist_ok=True)
        try:
            os.rename(fresh, final)
        except OSError:  # another process was first, or a copy was damaged
            if not _is_whole(final, manifest):
                shutil.rmtree(final)
                os.rename(fresh, final)
        return final
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def send_index(path: Path, url: str, /) -> None:
    """Write the index in a local folder to `url`: its arrays, then the manifest that names them."""
    url = url.rstrip("/")
    store, manifest = store_of(url), read_manifest(path)
    folder = manifest["folder"]
    arrays = [f"{folder}/{name}.npy" for name in manifest["arrays"]]
    sent = [
        wire().submit(partial(store.write, name, path / name), (path / name).stat().st_size)
        for name in arrays
    ]
    wait(sent)
    for one in sent:
        one.result()
    store.write(MANIFEST, path / MANIFEST)  # now the new state is the index
    for old in store.list():
        first, _, name = old.partition("/")
        if COLUMNS.fullmatch(first) and first != folder and _is_array(name):
            store.delete(old)


def _manifest(url: str, folder: Path) -> dict[str, Any]:
    """Bring the manifest of an index, and return what it holds."""
    try:
        bring(store_of(url), MANIFEST, folder / MANIFEST, LIMITS.manifest_bytes)
    except FileNotFoundError:
        missing = f"no index here (no {MANIFEST}); build one: twinfeed index SHARDS --out {url}"
        raise FileNotFoundError(errno.ENOENT, missing, url) from None
    try:
        manifest = read_manifest(folder)
    except LoaderError as error:
        error.path = url
        raise
    names = manifest["arrays"]
    if not isinstance(names, dict) or not all(ARRAY_NAME.fullmatch(name) for name in names):
        raise IndexFormatError("damaged index: bad array name", path=url)
    size = sum(int(entry["bytes"]) for entry in names.values())
    if size > LIMITS.download_bytes:
        raise LoaderError(
            "an index of too many bytes",
            path=url,
            expected=f"at most {LIMITS.download_bytes} bytes",
            found=f"{size} bytes",
            advice="copy the index here if it is meant to be this large, and open the copy",
        )
    return manifest


def _bring_arrays(url: str, manifest: Mapping[str, Any], folder: Path) -> None:
    """Bring all arrays side by side."""
    (folder / manifest["folder"]).mkdir()
    store = store_of(url)

    def one(name: str) -> None:
        file = f"{manifest['folder']}/{name}.npy"
        bring(store, file, folder / file, int(manifest["arrays"][name]["bytes"]))

    with ThreadPoolExecutor(NETWORK.requests) as pool:
        list(pool.map(one, manifest["arrays"]))


def _is_whole(path: Path, manifest: Mapping[str, Any]) -> bool:
    """Tell whether a copy has all arrays of a manifest, each of the right size."""
    try:
        return (path / MANIFEST).exists() and all(
            (path / manifest["folder"] / f"{name}.npy").stat().st_size == entry["bytes"]
            for name, entry in manifest["arrays"].items()
        )
    except FileNotFoundError:
        return False


def _is_array(name: str) -> bool:
    return name.endswith(".npy") and bool(ARRAY_NAME.fullmatch(name[: -len(".npy")]))


def _indexes(cache: DiskCache, url: str) -> Path:
    """Return the folder of a cache for the index at a URL."""
    make_folder_of_cache(cache.path)
    folder = cache.path / "indexes" / hashlib.sha256(url.encode()).hexdigest()[:16]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def index_at_url(path: str | os.PathLike[str], /) -> bool:
    """Tell whether a path is a URL that leads to an index."""
    text = os.fspath(path)
    if not is_url(text):
        return False
    try:
        store_of(text.rstrip("/")).facts([MANIFEST], fresh=True)
    except FileNotFoundError:
        return False
    return True
