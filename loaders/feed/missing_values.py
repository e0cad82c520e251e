"""The `missing` argument of a feed: an error or a value for fields that some records lack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from twinfeed.loaders.index import Index
from twinfeed.loaders.reading.dataset_source import DatasetSource
from twinfeed.loaders.reading.source import Source
from twinfeed.samplers import validate

MissingValues = Literal["error", "late"] | Mapping[str, Any]

_NUMBERS = {"float_list": np.float32, "int64_list": np.int64}
_EXPECTED = {"bytes": "bytes or a str", "bytes_list": "a list of bytes"}


def check_missing(
    index: Source, fields: Sequence[str], missing: MissingValues, /
) -> dict[str, Any]:
    """Check the `missing` argument of a feed; return the value that it gives for each field.

    `missing` is "error", "late", or a dict of values by field: a field's value is used for the
    records that lack the field. The result has the form in which the reader returns the field, such
    as b"x" for the str "x". It has only fields that are read (`fields`), and is empty for "error"
    and "late".

    Raises:
        ValueError: some records lack a field that is read and has no value, unless `missing` is
            "late": then an error is raised when such a record is read; or the dict has a field
            that the source does not have.
        TypeError: a value is of another type than the field.
    """
    values: dict[str, Any] = {}
    if isinstance(missing, Mapping):
        unknown = missing.keys() - {*index.fields, *index.columns}
        if unknown:
            found, expected = sorted(unknown), list(index.fields)
            raise ValueError(f"missing has the fields {found}, but the index has {expected}")
        stored = {
            name: _stored_value(index, name, value)
            for name, value in missing.items()
            if name not in index.columns  # no record lacks a column
        }
        values = {name: value for name, value in stored.items() if name in fields}
    elif validate.choice("missing, if not a dict,", missing, ("error", "late")) == "late":
        return values
    _check_no_missing(index, fields, values)
    return values


def _check_no_missing(index: Source, fields: Sequence[str], values: Mapping[str, Any]) -> None:
    """Raise ValueError if records lack one of `fields`, and the user gives no value for it.

    `values` has the user's values by field. The message says how many records lack each field, and
    three ways out: fewer fields, a value, or missing="late", with which the error is raised only if
    such a record is drawn.
    """
    stored = set(fields).intersection(index.fields).difference(index.columns)
    counts = _missing_counts(index)  # how many records lack each field
    incomplete = [name for name in sorted(stored.difference(values)) if counts.get(name)]
    if incomplete:
        names = ", ".join(f"{name!r} ({counts[name]:,} of {len(index):,})" for name in incomplete)
        complete = [name for name in fields if name not in incomplete]
        example = ", ".join(f"{name!r}: {_empty_value(index, name)}" for name in incomplete)
        # A record of an index lacks the field. A record of a table has the field, with a null.
        problem = "lack" if isinstance(index, Index) else "have a null, or a null in a list, in"
        raise ValueError(
            f"records {problem} the field {names}: read only fields={complete}; or give a value, "
            f"missing={{{example}}}; or, if the sampler draws no such record, missing='late'"
        )


def _missing_counts(index: Source) -> Mapping[str, int]:
    """Return, for each field, the number of records that are known to lack it."""
    if isinstance(index, DatasetSource):
        return index.num_missing
    # With missing="empty", the index gives an empty value for a field that a record lacks: the
    # field is missing in no record. Of other sources than an index, no numbers are known.
    if not isinstance(index, Index) or index.options.missing == "empty":
        return {}
    return {name: field.missing for name, field in index.fields.items()}


def _empty_value(index: Source, name: str) -> str:
    """Return Python code for an empty value of a field, such as "b''", for a message."""
    if not isinstance(index, Index):
        return "…"
    return "b''" if index.fields[name].kind == "bytes" else "[]"


def _stored_value(index: Source, name: str, value: Any) -> Any:
    """Convert the user's value for a missing field to the type in which the reader returns values.

    The reader of an index returns bytes, a list of bytes or an array. So the str "x" becomes b"x",
    and a list of numbers becomes an array. For a `DatasetSource`, the dataset converts the value,
    and for any other source it stays as it is.

    Raises:
        TypeError: the value is of another kind than the field.
    """
    if value is None:
        raise TypeError(f"missing must have a value for the field {name!r}, got None")
    if not isinstance(index, Index):
        return index.as_stored(name, value) if isinstance(index, DatasetSource) else value
    kind = index.fields[name].kind if name in index.fields else "bytes"
    if kind in _NUMBERS:
        array = np.asarray(value)
        castable = np.can_cast(array.dtype, _NUMBERS[kind], "same_kind")
        if array.ndim <= 1 and (castable or not array.size):
            return array.astype(_NUMBERS[kind])[()]  # a number of no dimension stays a number
    elif kind == "bytes" and isinstance(value, (bytes, str)):
        return value.encode() if isinstance(value, str) else value
    elif kind == "bytes_list" and isinstance(value, (list, tuple)):
        return list(value)
    expected = _EXPECTED.get(kind, "a number or a list of numbers")
    raise TypeError(f"missing must have {expected} for the field {name!r}, got {value!r}")
