"""Call a user's decode or transform for every sample of a batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from twinfeed.loaders.errors import DecodeError
from twinfeed.loaders.feed.calling import Made, call, check_values
from twinfeed.loaders.reading.source import Source
from twinfeed.loaders.support.array_types import Int64s


class Calls:
    """Share the samples of a batch out among `threads`; whatever goes wrong names the record.

    The calls pickle without their threads, and a forked child starts its own.
    """

    def __init__(self, index: Source, *, threads: int) -> None:
        self.index = index
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pool": None}

    def each(
        self,
        name: str,
        function: Callable[..., Made],
        records: Sequence[int] | Int64s,
        /,
        *arguments: Sequence[Any],
    ) -> list[Made]:
        """Return `[function(*row) for row in zip(*arguments)]`, a dict of fields for each record.

        The first argument is the sample.

        Raises:
            DecodeError: `name` failed.
        """
        rows = list(zip(*arguments, strict=True))

        def part(places: Iterable[int]) -> list[Made]:
            return [call(self.index, name, function, records[p], *rows[p]) for p in places]

        if self.threads < 2 or len(rows) < 2:
            return part(range(len(rows)))
        if self._pool is None or self._pid != os.getpid():  # a forked child has no threads
            self._pid = os.getpid()
            self._pool = ThreadPoolExecutor(self.threads, "twinfeed-decode")
        parts = [range(first, len(rows), self.threads) for first in range(self.threads)]
        made: list[Any] = [None] * len(rows)
        for places, results in zip(parts, self._pool.map(part, parts), strict=True):
            made[places.start :: self.threads] = results
        return made

    def by_field(
        self, name: str, records: Sequence[int] | Int64s, samples: Sequence[Made], /
    ) -> dict[str, Sequence[Any]]:
        """Turn samples from `name`, all of the same fields, into the values of each field."""
        names = samples[0].keys() if samples else ()
        for sample, record in zip(samples, records, strict=True):
            check_values(self.index, name, record, sample)
            if sample.keys() != names:
                raise DecodeError(
                    f"{self.index.describe(record)}: {name} gave the fields {sorted(sample)}, for "
                    f"another record {sorted(names)}"
                )
        return {field: [sample[field] for sample in samples] for field in names}

    def close(self) -> None:
        """End the threads; a later call starts them anew."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
