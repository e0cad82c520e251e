"""Whole files of stores, downloaded in pieces at the same time."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from twinfeed.loaders.errors import LoaderError, StaleIndexError
from twinfeed.loaders.storage import retries
from twinfeed.loaders.storage.request_pool import request_pool
from twinfeed.loaders.storage.store import Facts, Store


def bring(store: Store, path: str, file: Path, most: int, /) -> Facts:
    """Write the file at `path` of a store to `file`, and return its facts.

    Raises:
        LoaderError: the file has more than `most` bytes, or the store does not say how many.
        StaleIndexError: the file changes meanwhile.
    """
    piece = retries.NETWORK.piece
    first = request_pool().submit(partial(store.read, path, 0, piece), piece).result()
    facts = first.facts if store.gives_facts else store.facts([path], fresh=True)[0]
    if facts.bytes is None or facts.bytes > most:
        raise LoaderError(
            "a file of too many bytes, or of an unknown number",
            path=store.url(path),
            expected=f"at most {most} bytes",
            found=describe(facts),
            advice="copy the shard here if it is meant to be this long, and index the copy",
        )
    with file.open("wb") as out:
        out.write(first.data[: facts.bytes])
        out.flush()
        starts = range(piece, facts.bytes, piece)
        waiting = [
            request_pool().submit(
                partial(_copy, store, path, start, facts, out.fileno()), piece, urgent=False
            )
            for start in starts
        ]
        try:
            for one in waiting:
                one.result()
        finally:
            for one in waiting:  # the file must stay open for those under way
                if not one.cancel():
                    one.exception()
    return facts


def _copy(store: Store, path: str, start: int, facts: Facts, fd: int) -> None:
    """Write one piece of a file to its place."""
    stop = min(start + retries.NETWORK.piece, facts.bytes or 0)
    piece = store.read(path, start, stop)
    if len(piece.data) < stop - start or (store.gives_facts and piece.facts != facts):
        raise StaleIndexError(
            "the file changed while it was copied",
            path=store.url(path),
            expected=describe(facts),
            found=describe(piece.facts),
            advice="wait until nobody writes there, and try again",
        )
    view = piece.data
    while len(view):
        written = os.pwrite(fd, view, start)
        view, start = view[written:], start + written


def describe(facts: Facts, /) -> str:
    """Say the facts of a file in words."""
    tag = "" if facts.tag is None else f", tag {facts.tag}"
    return f"{'an unknown number of' if facts.bytes is None else facts.bytes} bytes{tag}"
