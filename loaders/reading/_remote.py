"""Ranges of remote shards to bytes, by fsspec."""

from __future__ import annotations

import numpy as np

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.index import Index
from twinfeed.loaders.index._paths import join, remote_errors, stale_file
from twinfeed.loaders.reading._fetch import (
    MOST_AT_ONCE,
    REMOTE_GAP,
    Fetcher,
    Rows,
    cut_rows,
    extent_of,
    near_rows,
    pieces_of,
)


class RemoteShards(Fetcher):
    """Read ranges of remote files with fsspec, all ranges of a batch in one request to it."""

    def __init__(self, index: Index, verify: bool) -> None:
        from fsspec.core import url_to_fs

        super().__init__(index, verify)
        self.system, _ = url_to_fs(index.root)  # which keeps its own connections
        self.checked: set[int] = set()

    def fetch(self, rows: Rows, /, *, neighbours: bool = True) -> list[bytes]:
        """Return the bytes of each row."""
        for number in set(rows["file"].tolist()) - self.checked:
            self._check(number)
        near = near_rows(rows, REMOTE_GAP, MOST_AT_ONCE)
        runs = list(pieces_of(rows, near))
        extents = [extent_of(rows[first:last]) for first, last in runs]
        paths = [self._path(int(rows["file"][first])) for first, _ in runs]
        starts, ends = [start for start, _ in extents], [end for _, end in extents]
        with remote_errors(self.index.root):
            pieces = self.system.cat_ranges(paths, starts, ends, on_error="raise")
        out: list[bytes] = []
        for (first, last), piece, path, extent in zip(runs, pieces, paths, extents, strict=True):
            _check_range(path, extent, len(piece))
            out += cut_rows(bytes(piece), rows[first:last], self.verify, first)
        return out

    def reread(self, row: np.void, /) -> bytes:
        """Read one row again."""
        path, (start, end) = self._path(int(row["file"])), extent_of(row.reshape(1))
        with remote_errors(path):
            data = self.system.cat_file(path, start=start, end=end)
        _check_range(path, (start, end), len(data))
        return bytes(data)

    def _path(self, number: int) -> str:
        """Return a file's URL."""
        return join(self.index.root, self.index.files[number])

    def _check(self, number: int) -> None:
        """Compare a shard's size with the index, once."""
        if self.index.container != "files":
            path, expected = self._path(number), int(self.index.shards["bytes"][number])
            with remote_errors(path):
                size = self.system.size(path)
            if size not in (None, expected):  # None: the server does not tell
                raise stale_file(path, expected, size)
        self.checked.add(number)


def _check_range(path: str, extent: tuple[int, int], found: int) -> None:
    """Raise LoaderError where more came than was asked for.

    A server that knows no ranges sends the file from its first byte on.
    """
    expected = extent[1] - extent[0]
    if found > expected:
        raise LoaderError(
            "the server does not serve ranges of a file: it sends the whole file",
            path=path,
            offset=extent[0],
            expected=f"{expected} bytes",
            found=f"{found} bytes",
            advice="copy the shards here, or to a server that supports HTTP range requests",
        )
