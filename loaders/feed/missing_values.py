"""Fields that some records lack: an error when a feed is made, or a value in their place."""

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


def check_missing(
    index: Source, fields: Sequence[str], missing: MissingValues, /
) -> dict[str, Any]:
    """Return the values that `missing` gives fields, as the source's reader returns values.

    Raises:
        ValueError: fields that records are known to lack and that have no value, and the value of a
            field that the source does not have.
        TypeError: a value of another kind than the field's.
    """
    values: dict[str, Any] = {}
    if isinstance(missing, Mapping):
        unknown = missing.keys() - {*index.fields}
        if unknown:
            raise ValueError(
                f"missing names {sorted(unknown)}, the index has the fields {list(index.fields)}"
            )
        given = {name: _value(index, name, value) for name, value in missing.items()}
        values = {name: value for name, value in given.items() if name in fields}
    elif validate.choice("missing, unless a dict,", missing, ("error", "late")) == "late":
        return values
    stored = set(fields) & {*index.fields} - index.columns.keys() - values.keys()
    counts = _lacking(index)
    lacked = {name: counts[name] for name in sorted(stored) if counts.get(name)}
    if lacked:
        each = ", ".join(f"{name!r} ({n:,} of {len(index):,})" for name, n in lacked.items())
        kept = [name for name in fields if name not in lacked]
        empty = ", ".join(f"{name!r}: {_empty(index, name)}" for name in lacked)
        lack = "lack" if isinstance(index, Index) else "have a null, or a null within a list, in"
        raise ValueError(
            f"records {lack} the field {each}: read the others, fields={kept}; or give it a value, "
            f"missing={{{empty}}}; or, if the sampler draws no such record, missing='late'"
        )
    return values


def _lacking(index: Source) -> Mapping[str, int]:
    """Return how many records lack each field, as far as is known."""
    if not isinstance(index, Index):
        return index.lacking if isinstance(index, DatasetSource) else {}
    empty = index.options.missing == "empty"
    return {} if empty else {name: field.missing for name, field in index.fields.items()}


def _empty(index: Source, name: str) -> str:
    """Write an empty value of a field, if its kind is known."""
    if not isinstance(index, Index):
        return "…"
    return "b''" if index.fields[name].kind == "bytes" else "[]"


def _value(index: Source, name: str, value: Any) -> Any:
    """Return the value of a field as the source's reader would return it."""
    if value is None:
        raise TypeError(f"missing must have a value for the field {name!r}, got None")
    if not isinstance(index, Index):
        return index.filled(name, value) if isinstance(index, DatasetSource) else value
    kind = index.fields[name].kind if name in index.fields else "bytes"
    if kind in _NUMBERS:
        array = np.asarray(value)
        if array.ndim == 1 and (not array.size or array.dtype.kind in "biuf"):
            return array.astype(_NUMBERS[kind])
    elif kind == "bytes" and isinstance(value, (bytes, str)):
        return value.encode() if isinstance(value, str) else value
    elif kind == "bytes_list" and isinstance(value, (list, tuple)):
        return list(value)
    what = {"bytes": "bytes or a str", "bytes_list": "a list of bytes"}.get(
        kind, "a list of numbers"
    )
    raise TypeError(f"missing must have {what} for the field {name!r}, got {value!r}")
