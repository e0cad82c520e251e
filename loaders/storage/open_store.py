"""The store of a URL, chosen by its scheme; each process opens its own."""

from __future__ import annotations

import os

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.storage._fsspec_store import FsspecStore
from twinfeed.loaders.storage.store import Store, not_installed_error
from twinfeed.loaders.storage.url import OBJECTS, WEB, Location

_stores: dict[tuple[int, Location, bool], Store] = {}


_obstore_users: set[int] = set()


def store_of(root: Location, /) -> Store:
    """Return the store of a URL, opened once in each process, which has its own connections."""
    key = os.getpid(), root, root.from_user
    store = _stores.get(key)
    if store is None:
        store = _stores[key] = _open(root)
    return store


def split(location: Location, /) -> tuple[Store, str]:
    """Split the URL of a file into the store of its folder and its name."""
    if not location.key:
        raise LoaderError(
            "this URL names no file", path=location, advice="name a file or a folder in it"
        )
    return store_of(location.parent), location.name


def _open(root: Location) -> Store:
    """Open a store; refuse obstore in a process that was forked after obstore was used.

    obstore is not fork-safe: the child has the locks of obstore's threads, but not the threads, and
    would wait for ever.
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
