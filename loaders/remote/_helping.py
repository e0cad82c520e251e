"""What the helper process runs."""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Connection
from typing import Any

from twinfeed.loaders.remote import network
from twinfeed.loaders.remote.link import answer
from twinfeed.loaders.remote.location import Location
from twinfeed.loaders.remote.opening import direct_store
from twinfeed.loaders.remote.stores import Store


def serve(fd: int) -> None:
    """Make the requests that come over a socket, many at once, until the socket closes."""
    lock = threading.Lock()
    stores: dict[Location, Store] = {}

    def call(root: Location, name: str, *arguments: Any) -> Any:
        with lock:
            if root not in stores:
                stores[root] = direct_store(root)
        value = getattr(stores[root], name)(*arguments)
        if name == "_walk":
            return list(value)
        return (bytes(value.data), value.facts) if name == "_read" else value

    answer(Connection(fd), call, network.NETWORK.requests)
    os._exit(0)
