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
    """Check the `missing` argument of a feed; return by field the values that it gives.

    The values are in the form in which the reader returns the field: b"x" for the str "x".

    Raises:
        ValueError: some records lack a field that is read and has no value in `missing`; or
            `missing` names a field that the source does not have.
        TypeError: a value is of another type than the field.
    """
    values: dict[str, Any] = {}
    if isinstance(missing, Mapping):
        unknown = missing.keys() - {*index.fields}
        if unknown:
            known = list(index.fields)
            raise ValueError(f"missing names {sorted(unknown)}, the index has the fields {known}")
        stored = {name: _stored_value(index, name, value) for name, value in missing.items()}
        values = {name: value for name, value in stored.items() if name in fields}
    elif validate.choice("missing, if not a dict,", missing, ("error", "late")) == "late":
        return values  # a record that lacks a field raises an error when it is read
    without_value = set(fields).intersection(index.fields).difference(index.columns, values)
    counts = _missing_counts(index)
    incomplete = {name: n for name in sorted(without_value) if (n := counts.get(name))}
    if incomplete:
        names = ", ".join(f"{name!r} ({n:,} of {len(index):,})" for name, n in incomplete.items())
        complete = [name for name in fields if name not in incomplete]
        example = ", ".join(f"{name!r}: {_empty_value(index, name)}" for name in incomplete)
        problem = "lack" if isinstance(index, Index) else "have a null, or a null in a list, in"
        raise ValueError(
            f"records {problem} the field {names}: read only fields={complete}; or give a value, "
            f"missing={{{example}}}; or, if the sampler draws no such record, missing='late'"
        )
    return values


def _missing_counts(index: Source) -> Mapping[str, int]:
    """Return by field the number of records that are known to lack it."""
    if isinstance(index, DatasetSource):
        return index.num_missing
    # An index may be built so that a field that a record lacks is read as an empty value.
    if not isinstance(index, Index) or index.options.missing == "empty":
        return {}
    return {name: field.missing for name, field in index.fields.items()}


def _empty_value(index: Source, name: str) -> str:
    """Return Python code for an empty value of a field, such as "b''", for a message."""
    if not isinstance(index, Index):
        return "…"
    return "b''" if index.fields[name].kind == "bytes" else "[]"


def _stored_value(index: Source, name: str, value: Any) -> Any:
    """Convert the user's value for a missing field to the form that the reader returns.

    For example, the str "x" becomes b"x", and a list of numbers an array.

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
        if array.ndim == 1 and (castable or not array.size):
            return array.astype(_NUMBERS[kind])
    elif kind == "bytes" and isinstance(value, (bytes, str)):
        return value.encode() if isinstance(value, str) else value
    elif kind == "bytes_list" and isinstance(value, (list, tuple)):
        return list(value)
    expected = _EXPECTED.get(kind, "a list of numbers")
    raise TypeError(f"missing must have {expected} for the field {name!r}, got {value!r}")
