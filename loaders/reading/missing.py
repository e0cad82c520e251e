"""Missing values: the fields that a record lacks, and the values that a user gives for them.

A reader returns None for a field that a record lacks. `check_missing` checks the user's values, and
`StoredFields` puts them in place of None.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.formats.example import decode_lists
from twinfeed.loaders.index import Index
from twinfeed.loaders.reading.source import FieldReader, Source
from twinfeed.loaders.support.array_types import Int64s, keeps_numbers
from twinfeed.samplers import validate

MissingValues = Literal["error", "late"] | Mapping[str, Any]

_NUMBERS: dict[str, np.dtype[Any]] = {
    "float_list": np.dtype(np.float32),
    "int64_list": np.dtype(np.int64),
}
_EXPECTED = {"bytes": "bytes or a str", "bytes_list": "a list of bytes"}

is_none = partial(operator.is_, None)
"""Whether a value is None: a test without a frame of Python."""


@dataclass(frozen=True)
class StoredFields:
    """The fields that are read of each record, and the values in place of those that are missing.

    A value in `missing` that is one number says that each record of an index has one: then all
    values of the field are numbers, as those of a column are, whether or not a record lacks it.

    Attributes:
        source: the source of the records.
        names: the names of the fields.
        missing: by field, the value for the records that lack it.

    Raises:
        LoaderError: by `read`: a record lacks a field without a value in `missing`; or has several
            numbers where `missing` has one.
    """

    source: Source
    names: tuple[str, ...]
    missing: Mapping[str, Any] = field(default_factory=dict)

    def read(self, reader: FieldReader, ids: Int64s, /) -> Mapping[str, Sequence[Any]]:
        """Return the values of records by field, in the order of `ids`."""
        values = reader.read_values(ids, self.names)
        if self._are_complete:
            return values
        return {name: self._filled(name, values[name], ids) for name in self.names}

    @cached_property
    def _are_complete(self) -> bool:
        """Whether it is known that each record has all fields, and that no value is converted."""
        source = self.source
        if not isinstance(source, Index) or self.missing:
            return False
        return not any(source.fields[name].missing for name in self.names if name in source.fields)

    def _filled(self, name: str, values: Sequence[Any], ids: Int64s) -> Sequence[Any]:
        """Return the values of a field for records, with the user's in place of None."""
        source, default = self.source, self.missing.get(name)
        if isinstance(source, Index) and isinstance(default, (int, float, np.number)):
            values = _single_numbers(source, ids, name, values)
        is_array = isinstance(values, np.ndarray) and values.dtype != object
        if is_array or not any(map(is_none, values)):
            return values
        if default is None:
            default = _empty_value(source, name)
        if default is None:
            record = int(ids[[value is None for value in values].index(True)])
            raise LoaderError(
                f"{source.describe(record)} lacks the field {name!r}",
                advice=f"give Feed a value for it, missing={{{name!r}: …}}, read other fields, or "
                "leave the record out (records= of the sampler)",
            )
        return [default if value is None else value for value in values]


def _empty_value(source: Any, name: str) -> Any:
    """Return the value that a field of an index made with missing="empty" has where it lacks; or
    None.
    """
    if isinstance(source, Index) and source.options.missing == "empty" and name in source.fields:
        kind = source.fields[name].kind
        return b"" if kind == "bytes" else decode_lists(kind, [b""])[0]
    return None


def _single_numbers(index: Index, ids: Int64s, name: str, arrays: Sequence[Any]) -> list[Any]:
    """Return the number in each array of one number; a None stays None."""
    for record, array in zip(ids, arrays, strict=True):
        if array is not None and len(array) != 1:
            raise LoaderError(
                f"{index.describe(int(record))} has {len(array)} values in the field {name!r}, "
                "which missing= gives one number",
                advice=f"give a list, missing={{{name!r}: [-1]}}",
            )
    return [None if array is None else array[0] for array in arrays]


def check_missing(index: Any, fields: Sequence[str], missing: MissingValues, /) -> dict[str, Any]:
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
    stored: dict[str, Any] = {}
    if isinstance(missing, Mapping):
        unknown = missing.keys() - {*index.fields, *index.columns}
        if unknown:
            found, expected = sorted(unknown), list(index.fields)
            raise ValueError(f"missing has the fields {found}, but the index has {expected}")
        for name in missing.keys() - index.columns.keys():  # no record lacks a column
            stored[name] = _stored_value(index, name, missing[name])
    elif validate.choice("missing, if not a dict,", missing, ("error", "late")) == "late":
        return stored
    values = {name: stored[name] for name in fields if name in stored}
    _check_no_missing(index, fields, values)
    return values


def _check_no_missing(index: Any, fields: Sequence[str], values: Mapping[str, Any]) -> None:
    """Raise ValueError, with three ways out, if records lack a field that has no value."""
    stored = set(fields).intersection(index.fields).difference(index.columns)
    counts = _missing_counts(index)  # how many records lack each field
    incomplete = [name for name in sorted(stored.difference(values)) if counts.get(name)]
    if incomplete:
        names = ", ".join(f"{name!r} ({counts[name]:,} of {len(index):,})" for name in incomplete)
        complete = [name for name in fields if name not in incomplete]
        # A record of an index lacks the field. A record of a table has the field, with a null.
        problem, empty = "have a null, or a null in a list, in", dict.fromkeys(incomplete, "…")
        if isinstance(index, Index):
            problem, kinds = "lack", {name: index.fields[name].kind for name in incomplete}
            empty = {name: "b''" if kind == "bytes" else "[]" for name, kind in kinds.items()}
        example = ", ".join(f"{name!r}: {value}" for name, value in empty.items())
        raise ValueError(
            f"records {problem} the field {names}: read only fields={complete}; or give a value, "
            f"missing={{{example}}}; or, if the sampler draws no such record, missing='late'"
        )


def _missing_counts(index: Any) -> Mapping[str, int]:
    """Return, for each field, the number of records that are known to lack it."""
    if not isinstance(index, Index):  # a `DatasetSource` knows it
        return getattr(index, "num_missing", {})
    # With missing="empty", a feed reads an empty value of a field that a record lacks.
    is_empty = index.options.missing == "empty"
    return {name: 0 if is_empty else field.missing for name, field in index.fields.items()}


def _stored_value(index: Any, name: str, value: Any) -> Any:
    """Convert the user's value for a missing field to the type that the reader returns: of an
    index, bytes, a list of bytes or an array. A `DatasetSource` converts its values itself.
    """
    if value is None:
        raise TypeError(f"missing must have a value for the field {name!r}, got None")
    if not isinstance(index, Index):
        return index.as_stored(name, value) if hasattr(index, "as_stored") else value
    kind = index.fields[name].kind if name in index.fields else "bytes"
    if kind in _NUMBERS:
        array, dtype = validate.unmasked(f"missing of {name!r}", value), _NUMBERS[kind]
        castable = np.can_cast(array.dtype, dtype, "same_kind") or not array.size
        # 2**63 is negative as int64, and 2**24 + 1 is another float32. Floats are rounded.
        if array.ndim <= 1 and castable and keeps_numbers(array, dtype):
            return array.astype(dtype)[()]  # a number of no dimension stays a number
    elif kind == "bytes" and isinstance(value, (bytes, str)):
        return value.encode() if isinstance(value, str) else value
    elif kind == "bytes_list" and isinstance(value, (list, tuple)):
        return list(value)
    expected = _EXPECTED.get(kind, "a number or a list of numbers")
    raise TypeError(f"missing must have {expected} for the field {name!r}, got {value!r}")
