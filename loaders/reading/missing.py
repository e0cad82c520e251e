"""Fill in the values that the user gives for fields that a record lacks, which a reader marks."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.formats.example import decode_lists
from twinfeed.loaders.index import Index
from twinfeed.loaders.support.array_types import Int64s

is_none = partial(operator.is_, None)
"""Whether a value is None: a test without a frame of Python."""


def fill_missing(
    source: Any, ids: Int64s, values: Mapping[str, Sequence[Any]], missing: Mapping[str, Any], /
) -> dict[str, Sequence[Any]]:
    """Return the values of records by field, with those of `missing` in place of None.

    A value in `missing` that is one number says that each record has one: then all values of the
    field are numbers, as those of a column are, whether or not a record lacks the field.

    Args:
        source: the `Source` of the records, for messages.
        ids: the record ids.
        values: for each field a value for each record, None if the record lacks the field.
        missing: the values that the user gives for fields.

    Raises:
        LoaderError: a record lacks a field, and `missing` has no value for it; or has several
            numbers where `missing` has one.
    """
    filled = dict(values)
    for name, column in values.items():
        default = missing.get(name)
        if isinstance(source, Index) and isinstance(default, (int, float, np.number)):
            column = filled[name] = _single_numbers(source, ids, name, column)
        is_array = isinstance(column, np.ndarray) and column.dtype != object
        if is_array or not any(map(is_none, column)):
            continue
        if default is None:
            default = _empty_value(source, name)
        if default is None:
            record = int(ids[[value is None for value in column].index(True)])
            raise LoaderError(
                f"{source.describe(record)} lacks the field {name!r}",
                advice=f"give Feed or Reader.read a value for it, missing={{{name!r}: …}}, read "
                "other fields, or leave the record out (records= of the sampler)",
            )
        filled[name] = [default if value is None else value for value in column]
    return filled


def _empty_value(source: Any, name: str) -> Any:
    """Return the value for records that lack a field, if the index says that it is empty; or None.

    An index says so if it was made with missing="empty".
    """
    if isinstance(source, Index) and source.options.missing == "empty" and name in source.fields:
        kind = source.fields[name].kind
        return b"" if kind == "bytes" else decode_lists(kind, [b""])[0]
    return None


def _single_numbers(index: Index, ids: Int64s, name: str, arrays: Sequence[Any]) -> list[Any]:
    """Return the number in each array of one number; a None stays None.

    Raises:
        LoaderError: an array has another length.
    """
    for record, array in zip(ids, arrays, strict=True):
        if array is not None and len(array) != 1:
            raise LoaderError(
                f"{index.describe(int(record))} has {len(array)} values in the field {name!r}, "
                "which missing= gives one number",
                advice=f"give a list, missing={{{name!r}: [-1]}}",
            )
    return [None if array is None else array[0] for array in arrays]
