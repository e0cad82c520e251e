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
        LoaderError: the file has more than `max_bytes` bytes, or the store does not send its size.
        StaleIndexError: the file changes during the download.
    """
    part_bytes = retries.NETWORK.part_bytes
    first = request_pool().submit(partial(store.read, path, 0, part_bytes), part_bytes).result()
    info = first.info if store.sends_info else store.stat([path], fresh=True)[0]
    if info.bytes is None or info.bytes > max_bytes:
        raise LoaderError(
            "a file is too large, or the store does not send its size",
            path=store.url(path),
            expected=f"at most {max_bytes} bytes",
            found=describe_object(info),
            advice="copy the shard to a local folder, and index the copy",
        )
    with file.open("wb") as out:
        out.write(first.data[: info.bytes])
        out.flush()
        copies = [
            partial(_copy_part, store, path, start, info, out.fileno())
            for start in range(part_bytes, info.bytes, part_bytes)
        ]
        futures = [request_pool().submit(copy, part_bytes, urgent=False) for copy in copies]
        try:
            for future in futures:
                future.result()
        finally:
            # After an error, cancel what has not started, and wait for what is in flight, since it
            # writes to the open file.
            for future in futures:
                if not future.cancel():
                    future.exception()  # waits; the first error is raised already
    return info


def _copy_part(store: Store, path: str, start: int, info: ObjectInfo, fd: int) -> None:
    """Download the part of a file that starts at `start`, and write it to the local file with the
    descriptor `fd`, at the same offset.

    Raises:
        StaleIndexError: the size or ETag of the file is no longer `info`.
    """
    stop = min(start + retries.NETWORK.part_bytes, info.bytes or 0)
    part = store.read(path, start, stop)
    if len(part.data) < stop - start or (store.sends_info and part.info != info):
        raise StaleIndexError(
            "the file changed during the download",
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
