"""Downloads of whole files, in parts that are requested in parallel."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from twinfeed.loaders.errors import LoaderError, StaleIndexError
from twinfeed.loaders.storage import retries
from twinfeed.loaders.storage.request_pool import request_pool
from twinfeed.loaders.storage.store import ObjectInfo, Store


def download(store: Store, path: str, file: Path, max_bytes: int, /) -> ObjectInfo:
    """Download the file at `path` of a store to `file`; return its size and ETag.

    Raises:
        LoaderError: the file has more than `max_bytes` bytes, or the store does not say how many.
        StaleIndexError: the file changes meanwhile.
    """
    size = retries.NETWORK.part_bytes
    first = request_pool().submit(partial(store.read, path, 0, size), size).result()
    info = first.info if store.sends_info else store.stat([path], fresh=True)[0]
    if info.bytes is None or info.bytes > max_bytes:
        raise LoaderError(
            "a file of too many bytes, or of an unknown number",
            path=store.url(path),
            expected=f"at most {max_bytes} bytes",
            found=describe_object(info),
            advice="copy the shard here if it is meant to be this long, and index the copy",
        )
    with file.open("wb") as out:
        out.write(first.data[: info.bytes])
        out.flush()
        starts = range(size, info.bytes, size)
        futures = [
            request_pool().submit(
                partial(_copy, store, path, start, info, out.fileno()), size, urgent=False
            )
            for start in starts
        ]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:  # the file stays open for requests in flight
                if not future.cancel():
                    future.exception()
    return info


def _copy(store: Store, path: str, start: int, info: ObjectInfo, fd: int) -> None:
    """Download the part of a file that starts at `start`, and write it there in the local file.

    Raises:
        StaleIndexError: the file has changed since `info` was read.
    """
    stop = min(start + retries.NETWORK.part_bytes, info.bytes or 0)
    part = store.read(path, start, stop)
    if len(part.data) < stop - start or (store.sends_info and part.info != info):
        raise StaleIndexError(
            "the file changed while it was copied",
            path=store.url(path),
            expected=describe_object(info),
            found=describe_object(part.info),
            advice="wait until nobody writes there, and try again",
        )
    view = part.data
    while len(view):
        written = os.pwrite(fd, view, start)
        view, start = view[written:], start + written


def describe_object(info: ObjectInfo, /) -> str:
    """Format the size and ETag of a file for an error message."""
    tag = "" if info.tag is None else f", tag {info.tag}"
    return f"{'an unknown number of' if info.bytes is None else info.bytes} bytes{tag}"
