"""Call a user's decode or transform for each sample of a batch; errors name the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from twinfeed.loaders.errors import DecodeError, LoaderError
from twinfeed.loaders.making._shared_samples import Fields
from twinfeed.loaders.reading.source import Source
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.support.fork import PerProcess


def call_for_record(
    index: Source, name: str, function: Callable[..., Fields], record: int, /, *arguments: Any
) -> Fields:
    """Call a user's function for a record, and return its dict of fields.

    The first of `arguments` is the sample. `name` is the name of the function in messages.

    Raises:
        DecodeError: the function failed, or did not return a dict.
    """
    try:
        result = function(*arguments)
        if not isinstance(result, (dict, Mapping)):
            raise TypeError(f"it must return a dict of fields, got a {type(result).__name__}")
        return dict(result)  # a copy, as the function may return the same dict for each sample
    except ImportError:  # no fault of the record; the message says what to install
        raise
    except LoaderError as error:
        problem = f"{index.describe(record)}: {error.problem}"
        raise type(error)(problem, advice=error.advice) from error
    except Exception as error:
        raise DecodeError(
            f"{index.describe(record)}: {name} failed: {error!r}{_hint(error, arguments[0])}",
            advice=f"mend {name}, or leave the record out: records= of the sampler, SubsetSampler",
        ) from error


def _hint(error: Exception, sample: Fields) -> str:
    """Return text to add to the message of an error in a user's function, or "".

    It says that a read-only array must be copied, or, for a KeyError, which fields `sample` has.
    """
    if isinstance(error, ValueError) and "read-only" in str(error):
        return "; copy the array before writing to it, as in image.copy()"
    return f"; it was given {sorted(sample)}" if isinstance(error, KeyError) else ""


def check_values(index: Source, name: str, record: int, sample: Fields, /) -> None:
    """Raise DecodeError if a field of a sample is None.

    The user's function `name` (decode or transform) has returned `sample` for this record.
    """
    for field, value in sample.items():
        if value is None:
            raise DecodeError(
                f"{index.describe(record)}: {name} returned None for field {field!r}: "
                f"return an empty array or byte string where there is no value"
            )


class SampleMap:
    """Call a function for each sample of a batch, on a pool of `threads`; errors name the record.

    The pool is not pickled, and a forked child starts its own.
    """

    def __init__(self, index: Source, *, threads: int) -> None:
        self.index = index
        self.threads = threads
        self._pool = PerProcess(partial(ThreadPoolExecutor, threads, "twinfeed-decode"))

    def map(
        self,
        name: str,
        function: Callable[..., Fields],
        records: Sequence[int] | Int64s,
        /,
        *arguments: Sequence[Any],
    ) -> list[Fields]:
        """Call a user's function for each sample, on the threads, and return the results in order.

        The result is `list(map(function, *arguments))`, a dict of fields for each record. The first
        of `arguments` are the samples. With n threads, each makes every n-th call.

        Raises:
            DecodeError: the function failed; `name` is its name in messages.
        """
        calls = list(zip(records, *arguments, strict=True))

        def run(calls: Sequence[Any]) -> list[Fields]:
            """Make a thread's calls one after another."""
            return [call_for_record(self.index, name, function, *arguments) for arguments in calls]

        if self.threads < 2 or len(calls) < 2:
            return run(calls)
        results: list[Any] = [None] * len(calls)
        calls_of_threads = [calls[thread :: self.threads] for thread in range(self.threads)]
        for thread, thread_results in enumerate(self._pool().map(run, calls_of_threads)):
            results[thread :: self.threads] = thread_results
        return results

    def values_by_field(
        self, name: str, records: Sequence[int] | Int64s, samples: Sequence[Fields], /
    ) -> dict[str, Sequence[Any]]:
        """Turn samples (dicts by field) into a dict that has a list of values for each field.

        The user's function `name` (decode or transform) has returned the samples.

        Raises:
            DecodeError: a value is None, or samples have different fields.
        """
        names = samples[0].keys() if samples else ()
        for sample, record in zip(samples, records, strict=True):
            check_values(self.index, name, record, sample)
            if sample.keys() != names:
                raise DecodeError(
                    f"{self.index.describe(record)}: {name} returned the fields {sorted(sample)}, "
                    f"but {sorted(names)} for another record"
                )
        return {field: [sample[field] for sample in samples] for field in names}

    def close(self) -> None:
        """End the threads; a later call starts new ones."""
        if pool := self._pool.pop():
            pool.shutdown()
