"""Call a user's decode or transform for every sample of a batch; errors name the record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from twinfeed.loaders.errors import DecodeError, LoaderError
from twinfeed.loaders.reading.source import Source
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.support.fork import PerProcess

Made = Mapping[str, Any]


def call(
    index: Source, name: str, function: Callable[..., Made], record: int, /, *row: Any
) -> Made:
    """Return `function(*row)`, a dict of fields; the first of `row` is the sample.

    Raises:
        DecodeError: `name` failed.
    """
    try:
        made = function(*row)
        if not isinstance(made, (dict, Mapping)):
            raise TypeError(f"it must return a dict of fields, got a {type(made).__name__}")
        return dict(made)  # the function may return one dict, filled again for each sample
    except ImportError:  # it is of no record, and says what to install
        raise
    except LoaderError as error:
        problem = f"{index.describe(record)}: {error.problem}"
        raise type(error)(problem, advice=error.advice) from error
    except Exception as error:
        failed = f"{index.describe(record)}: {name} failed: {error!r}"
        raise DecodeError(
            failed + _given(error, row[0]),
            advice=f"mend {name}, or leave the record out: records= of the sampler, SubsetSampler",
        ) from error


def _given(error: Exception, sample: Made) -> str:
    """Say which fields a missing field is not among, or what to do about a read-only array."""
    if isinstance(error, ValueError) and "read-only" in str(error):
        return "; copy the array before writing to it, as in image.copy()"
    return f"; it was given {sorted(sample)}" if isinstance(error, KeyError) else ""


def check_values(index: Source, name: str, record: int, sample: Made, /) -> None:
    """Raise DecodeError for a value of None."""
    for field, value in sample.items():
        if value is None:
            raise DecodeError(
                f"{index.describe(record)}: {name} gave None for field {field!r}: "
                f"give an empty array or byte string where there is nothing"
            )


class Calls:
    """Share the samples of a batch out among `threads`; whatever goes wrong names the record.

    The calls pickle without their threads, and a forked child starts its own.
    """

    def __init__(self, index: Source, *, threads: int) -> None:
        self.index = index
        self.threads = threads
        self._pool = PerProcess(partial(ThreadPoolExecutor, threads, "twinfeed-decode"))

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
        parts = [range(first, len(rows), self.threads) for first in range(self.threads)]
        made: list[Any] = [None] * len(rows)
        for places, results in zip(parts, self._pool().map(part, parts), strict=True):
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
        if pool := self._pool.pop():
            pool.shutdown()
