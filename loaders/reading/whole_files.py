"""Loose files to bytes, each opened for one reading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from io import FileIO

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.formats.files import Places
from twinfeed.loaders.index import Index
from twinfeed.loaders.reading.fetcher import Fetcher, WrongBytes
from twinfeed.loaders.reading.local import open_unchanged, path_of
from twinfeed.loaders.reading.prefetch.advice import Advice
from twinfeed.loaders.reading.prefetch.ranges import Extents, Rows
from twinfeed.loaders.reading.prefetch.read_plan import ReadPlan
from twinfeed.loaders.support.checksum import crc32c
from twinfeed.loaders.support.regular import read_at


class WholeFiles(Fetcher):
    """Read files one by one, each opened for one reading."""

    def __init__(self, index: Index, checksums: bool) -> None:
        super().__init__(index, checksums)
        self.places = Places(index.root)
        self._advice = Advice()

    def open(self, number: int, length: int) -> FileIO:
        """Open a file, which must be as long as when it was indexed."""
        path_of(self.index, self.index.files, number)
        place = self.places.find(self.index.files[number])
        return FileIO(open_unchanged(place, length))

    def fetch(self, rows: Rows, /, *, neighbours: bool = True) -> list[bytes]:
        """Return the bytes of each row."""
        out = []
        for place, (_, length, file, crc) in enumerate(rows.tolist()):
            with self.open(file, length) as opened:
                data = read_at(opened.fileno(), length, 0)
            if len(data) != length or (self.checksums and crc32c(data) != crc):
                raise WrongBytes(place, data)
            out.append(data)
        return out

    def before_read(self, plan: ReadPlan, step: int, /) -> None:
        """Advise the kernel of what coming batches read."""
        plan.enter(step, partial(self._advice.apply, self._opened, plan))

    def close(self) -> None:
        """Stop the advice."""
        super().close()
        self._advice.close()

    def _opened(self, extents: Extents) -> Iterator[tuple[int, int, int]]:
        """Yield the descriptor, the start and the stop of each extent whose file can be read."""
        for file, start, stop, *_ in extents.tolist():
            with suppress(LoaderError, OSError), self.open(file, stop - start) as opened:
                yield opened.fileno(), start, stop
