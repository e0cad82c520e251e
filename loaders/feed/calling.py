"""Call a user's decode or transform for one record; whatever goes wrong names the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from twinfeed.loaders.errors import DecodeError, LoaderError
from twinfeed.loaders.reading.source import Source

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
        return made
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
