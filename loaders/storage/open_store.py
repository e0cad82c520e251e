"""The store of a URL, chosen by its scheme; each process opens its own."""

from __future__ import annotations

import os

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.storage._fsspec_store import FsspecStore
from twinfeed.loaders.storage.store import Store, not_installed_error
from twinfeed.loaders.storage.url import OBJECTS, WEB, Location

_stores: dict[tuple[int, Location, bool], Store] = {}


_obstore_users: set[int] = set()  # the ids of this process and its parents that use obstore


def store_of(root: Location, /) -> Store:
    """Return the store of a URL; each process opens it once, with connections of its own."""
    key = os.getpid(), root, root.from_user
    store = _stores.get(key)
    if store is None:
        store = _stores[key] = _open(root)
    return store


def store_and_name(location: Location, /) -> tuple[Store, str]:
    """Return the store of the folder that contains a file, and the name of the file.

    Raises:
        LoaderError: the URL is that of a bucket or a server, without the name of a file.
    """
    if not location.key:
        raise LoaderError(
            "this URL names no file", path=location, advice="name a file or a folder in it"
        )
    return store_of(location.parent), location.name


def _open(root: Location) -> Store:
    """Open the store of a URL: by HTTP, obstore or fsspec.

    A forked child has the locks of obstore's threads, but not the threads, so it is refused.
    """
    if root.scheme not in (*WEB, *OBJECTS):
        return FsspecStore(root)
    try:
        if root.scheme in WEB:
            from twinfeed.loaders.storage._http import HttpStore

            return HttpStore(root)
        from twinfeed.loaders.storage._object_store import ObjectStore
    except ImportError as error:
        raise not_installed_error(root, error) from None
    if _obstore_users - {os.getpid()}:
        raise LoaderError(
            "a store cannot be read in a process that was forked from a process that read one",
            path=root,
            advice='start processes by "forkserver" or "spawn", as in '
            'DataLoader(multiprocessing_context="forkserver")',
        )
    _obstore_users.add(os.getpid())
    return ObjectStore(root)
