"""Datasets whose columns are stored by pyarrow: its tables, and datasets of Hugging Face."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.reading._map_datasets import Columns, Values
from twinfeed.loaders.support.array_types import Int64s


class HuggingFace(Columns):
    """A dataset of Hugging Face, from which only the requested columns are read."""

    def __init__(self, data: Any, fields: Sequence[str]) -> None:
        super().__init__(data, fields)
        self._selected: dict[tuple[str, ...], Any] = {}
        # `data.data.table` has the column as stored: all records, also those that the dataset, a
        # selection, does not have. Only if it has a null, the column of the dataset is read.
        inside_lists, arrow = data.format["type"] is not None, data.with_format("arrow")
        nullable = [
            name for name in self.names if _is_null(data.data.table[name], inside_lists).any()
        ]
        self.null_masks = {name: _is_null(arrow[name][:], inside_lists) for name in nullable}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_selected": {}}

    def as_stored(self, name: str, value: Any, /) -> Any:
        """Convert the user's value for records without a field to the form in which this dataset
        returns values of this field.

        The library converts values when a record is read. So make a dataset that has the value as
        its only record, with the same type and format as this dataset, and read the record.
        """
        # Only to check: it raises TypeError for a value that the type of the field cannot hold.
        _to_arrow_column(value, self.data.data.table[name].type)
        features, read_format = self.data.features, self.data.format
        dataset = type(self.data).from_dict({name: [value]}, type(features)({name: features[name]}))
        dataset = dataset.with_format(read_format["type"], **read_format["format_kwargs"])
        values = dataset[[0]][name]  # of the records with the ids [0]: a list or array of one value
        return values[0]

    def _values(self, ids: Int64s, names: Sequence[str]) -> Values:
        """Return a dict from each field to the values of these records.

        The selection of columns, which takes a millisecond, is kept for the next call.
        """
        key = tuple(names)
        if key not in self._selected:
            self._selected[key] = self.data.select_columns(names)
        return self._selected[key][ids]  # type: ignore[no-any-return]


class Table(Columns):
    """A table of pyarrow."""

    thread_safe = True

    def __init__(self, data: Any, fields: Sequence[str]) -> None:
        self.data, self.names = data, fields or data.column_names
        self.copied_bytes = data.nbytes
        self.null_masks = {
            name: is_null for name in self.names if (is_null := _is_null(data[name])).any()
        }

    def as_stored(self, name: str, value: Any, /) -> Any:
        return _to_numpy_or_list(_to_arrow_column(value, self.data[name].type))[0]

    def _values(self, ids: Int64s, names: Sequence[str]) -> Values:
        taken = self.data.select(names).take(ids)
        return {name: _to_numpy_or_list(taken[name]) for name in names}


def _is_null(column: Any, inside_lists: bool = True) -> npt.NDArray[np.bool_]:
    """Return for each value of a pyarrow column whether it is null.

    With `inside_lists`, a list with a null in it is one too, as numpy has no null; lists of dicts
    keep None.
    """
    if hasattr(column, "chunks"):
        parts = [_is_null(chunk, inside_lists) for chunk in column.chunks]
        return np.concatenate([np.zeros(0, bool), *parts])
    is_null = np.array(column.is_null())
    column = getattr(column, "storage", column)  # the plain column within an extension type
    # Only a column of lists has `value_parent_indices`.
    if inside_lists and hasattr(column, "value_parent_indices") and not _has_dicts(column):
        list_of_item = column.value_parent_indices().to_numpy()  # the list of each item, in order
        is_null[list_of_item[_is_null(column.flatten())]] = True
    return is_null


def _has_dicts(column: Any) -> bool:
    """Return whether the values of a pyarrow column are, or contain, dicts (structs or maps)."""
    return "struct<" in str(column.type) or "map<" in str(column.type)


def _to_numpy_or_list(column: Any) -> Any:
    """Return the values of a pyarrow column as a numpy array, or as a list if they are dicts."""
    return column.to_pylist() if _has_dicts(column) else column.to_numpy()


def _to_arrow_column(value: Any, arrow_type: Any) -> Any:
    """Return a pyarrow column with one value, the user's for records without the field."""
    pyarrow, arrow_type = sys.modules["pyarrow"], getattr(arrow_type, "storage_type", arrow_type)
    try:
        # Only to check: the cast raises an error for 1.5 in a column of integers, which
        # `chunked_array` would truncate. Some types, such as lists, have no cast.
        with suppress(pyarrow.ArrowNotImplementedError):
            pyarrow.array([value]).cast(arrow_type)
        column = pyarrow.chunked_array([[value]], arrow_type)
        if isinstance(value, float) and np.isinf(column[0].as_py()) and not np.isinf(value):
            raise OverflowError("too large")
        return column
    except (pyarrow.ArrowException, OverflowError) as error:
        got = f"got {value!r} ({error})"
        raise TypeError(f"missing must have a value of {arrow_type}, {got}") from None
