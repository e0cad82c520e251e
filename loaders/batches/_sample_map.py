"""Call a user's decode or transform for each sample of a batch; errors name the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import starmap
from typing import Any

from twinfeed.loaders.batches._shared_samples import Fields
from twinfeed.loaders.errors import DecodeError, LoaderError
from twinfeed.loaders.feed.arguments import column_advice
from twinfeed.loaders.reading.source import Source
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.support.fork import PerProcess


def call_for_record(
    index: Source, function_name: str, function: Callable[..., Fields], record: int, /, *args: Any
) -> Fields:
    """Return `function(*args)`, the dict that a user's function returns for a sample of a record.

    Args:
        index: the source of the record, which describes it in messages.
        function_name: "decode" or "transform", for messages.
        function: the user's function.
        record: the record id.
        args: the arguments of the function; the first is the sample.

    Raises:
        DecodeError: the function failed, or did not return a dict.
    """
    try:
        result = function(*args)
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
            f"{index.describe(record)}: {function_name} failed: {error!r}"
            f"{_hint(index, error, args[0])}",
            advice=f"correct {function_name}, or exclude the record by records= or SubsetSampler",
        ) from error


def _hint(index: Source, error: Exception, sample: Fields) -> str:
    """Return text to add to the message of an error in a user's function, or "".

    It says that a read-only array must be copied, or, for a KeyError, which fields `sample` has,
    and if the field is a column.
    """
    if isinstance(error, ValueError) and "read-only" in str(error):
        return "; copy the array before writing to it, as in image.copy()"
    if not isinstance(error, KeyError):
        return ""
    return f"; it was given {sorted(sample)}{column_advice(index, error.args)}"


def check_values(index: Source, function_name: str, record: int, sample: Fields, /) -> None:
    """Raise DecodeError if a user's function has returned None for a field of a sample.

    `function_name` ("decode" or "transform") and `record` (the record id) are for the message.
    """
    for field, value in sample.items():
        if value is None:
            raise DecodeError(
                f"{index.describe(record)}: {function_name} returned None for field {field!r}: "
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
        function_name: str,
        function: Callable[..., Fields],
        records: Sequence[int] | Int64s,
        /,
        *arguments: Sequence[Any],
    ) -> list[Fields]:
        """Return `list(map(function, *arguments))`, computed on the threads.

        The user's function returns a dict of fields for each sample. With n threads, each thread
        makes every n-th call.

        Args:
            function_name: "decode" or "transform", for messages.
            function: the user's function.
            records: the record id of each sample, for messages.
            arguments: sequences with an item for each sample; the first is the samples themselves.

        Raises:
            DecodeError: the function failed.
        """
        call = partial(call_for_record, self.index, function_name, function)
        calls = list(zip(records, *arguments, strict=True))  # (record, *arguments) of each call

        def run(calls: Sequence[Any]) -> list[Fields]:
            """Make the calls of one thread, one after another."""
            return list(starmap(call, calls))

        if self.threads < 2 or len(calls) < 2:
            return run(calls)
        results: list[Any] = [None] * len(calls)
        calls_of_threads = [calls[thread :: self.threads] for thread in range(self.threads)]
        for thread, thread_results in enumerate(self._pool().map(run, calls_of_threads)):
            results[thread :: self.threads] = thread_results
        return results

    def values_by_field(
        self, function_name: str, records: Sequence[int] | Int64s, samples: Sequence[Fields], /
    ) -> dict[str, Sequence[Any]]:
        """Turn samples (dicts by field) into a dict that has a list of values for each field.

        For example, [{"x": 1}, {"x": 2}] becomes {"x": [1, 2]}. A user's function has returned the
        samples: `function_name` is "decode" or "transform". It and `records` (the record id of each
        sample) are for messages.

        Raises:
            DecodeError: a value is None, or samples have different fields.
        """
        fields = samples[0].keys() if samples else ()
        for sample, record in zip(samples, records, strict=True):
            check_values(self.index, function_name, record, sample)
            if sample.keys() != fields:
                raise DecodeError(
                    f"{self.index.describe(record)}: {function_name} returned the fields "
                    f"{sorted(sample)}, but {sorted(fields)} for another record"
                )
        return {field: [sample[field] for sample in samples] for field in fields}

    def close(self) -> None:
        """End the threads; a later call starts new ones."""
        if pool := self._pool.pop():
            pool.shutdown()
