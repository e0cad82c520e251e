"""The store of a place, by the scheme; each process has its own stores."""

from __future__ import annotations

import os

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.storage._fsspec_store import Files
from twinfeed.loaders.storage.store import Store, not_installed
from twinfeed.loaders.storage.url import OBJECTS, WEB, Location

_stores: dict[tuple[int, Location, bool], Store] = {}


_obstore_users: set[int] = set()


def store_of(root: Location, /) -> Store:
    """Return the store of a place. Each process has its own store, with its own connections."""
    key = os.getpid(), root, root.typed
    store = _stores.get(key)
    if store is None:
        store = _stores[key] = _open(root)
    return store


def split(place: Location, /) -> tuple[Store, str]:
    """Return the store that a file lies in, and its path there."""
    if not place.key:
        raise LoaderError(
            "this URL names no file", path=place, advice="name a file or a folder in it"
        )
    return store_of(place.parent), place.name


def _open(root: Location) -> Store:
    """Return a store.

    A process that was forked from a process that used obstore has the locks of obstore's threads,
    but not the threads. obstore would wait for ever.
    """
    if root.scheme not in (*WEB, *OBJECTS):
        return Files(root)
    try:
        if root.scheme in WEB:
            from twinfeed.loaders.storage._http import Web

            return Web(root)
        from twinfeed.loaders.storage._object_store import Objects
    except ImportError as error:
        raise not_installed(root, error) from None
    if _obstore_users - {os.getpid()}:
        raise LoaderError(
            "a store cannot be read in a process that was forked from a process that read one",
            path=root,
            advice='start processes by "forkserver" or "spawn", as in '
            'DataLoader(multiprocessing_context="forkserver")',
        )
    _obstore_users.add(os.getpid())
    return Objects(root)
