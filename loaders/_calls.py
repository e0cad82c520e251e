"""Call a user's decode or transform for every sample of a batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from twinfeed.loaders._checks import Int64s
from twinfeed.loaders.errors import DecodeError, LoaderError
from twinfeed.loaders.index import Index

Made = Mapping[str, Any]


class Calls:
    """Share the samples of a batch out among `threads`; whatever goes wrong names the record.

    The calls pickle without their threads, and a forked child starts its own.
    """

    def __init__(self, index: Index, *, threads: int) -> None:
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

        The first argument is the sample. Raises DecodeError, which says that `name` failed.
        """
        rows = list(zip(*arguments, strict=True))

        def part(places: Iterable[int]) -> list[Made]:
            return [self._one(name, function, records[place], rows[place]) for place in places]

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

    def _one(
        self, name: str, function: Callable[..., Made], record: int, row: tuple[Any, ...]
    ) -> Made:
        """Call the function for one record."""
        try:
            made = function(*row)
            if not isinstance(made, (dict, Mapping)):
                raise TypeError(f"it must return a dict of fields, got a {type(made).__name__}")
            return made
        except LoaderError as error:
            problem = f"{self.index.describe(record)}: {error.problem}"
            raise type(error)(problem, advice=error.advice) from error
        except Exception as error:
            told = f"{self.index.describe(record)}: {name} failed: {error!r}"
            raise DecodeError(told + self._given(error, row[0])) from error

    def _given(self, error: Exception, sample: Mapping[str, Any]) -> str:
        """Say what there was, where a field was looked for and not found."""
        if not isinstance(error, KeyError):
            return ""
        given = f"; it was given {sorted(sample)}"
        wanted = error.args[0] if error.args else None
        if isinstance(wanted, str) and wanted in self.index.columns:
            given += (
                f", and {wanted!r} is a column of the index: it is in every batch, and a transform "
                f"gets it; decode does where fields= names it"
            )
        return given

    def by_field(
        self, name: str, records: Sequence[int] | Int64s, samples: Sequence[Made], /
    ) -> dict[str, Sequence[Any]]:
        """Turn the samples that `name` gave, all of the same fields, into the values of each."""
        names = samples[0].keys() if samples else ()
        for sample, record in zip(samples, records, strict=True):
            nothing = [field for field, value in sample.items() if value is None]
            if sample.keys() == names and not nothing:
                continue
            gave = f"{self.index.describe(record)}: {name} gave"
            if nothing:
                raise DecodeError(
                    f"{gave} None for field {nothing[0]!r}: "
                    f"give an empty array or byte string where there is nothing"
                )
            raise DecodeError(
                f"{gave} the fields {sorted(sample)}, for another record of the batch "
                f"{sorted(names)}; give every record the same"
            )
        return {field: [sample[field] for sample in samples] for field in names}

    def close(self) -> None:
        """End the threads; a later call starts them anew."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
