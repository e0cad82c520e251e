"""The kinds of map-style datasets: values of each are taken by record number."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.support.array_types import Array, Int64s, as_array
from twinfeed.loaders.support.progress import progress_bar
from twinfeed.samplers import validate
from twinfeed.samplers.mapped import as_mapped, is_mapped
from twinfeed.samplers.validate import a_type, counted

Values = Mapping[str, Any]

_MAX_PICKLED_BYTES = 16 << 20  # of arrays that are sent to another process
_MIN_FOR_BAR = 10_000  # records, from which on reading their labels one by one shows a bar


class Items:
    """A map-style dataset that is read item by item; the other dataset classes derive from it.

    `thread_safe`: several threads may read at once. `fresh`: nobody else has the arrays that `take`
    returns. `in_memory`: reading an item needs no file.
    """

    thread_safe = fresh = in_memory = False
    names: Sequence[str]
    unnamed_type = ""  # the type of record 0, unless that is a dict, which names its values
    copied_bytes = 0  # of the arrays that are copied when this is pickled, as far as is known
    null_masks: Mapping[str, npt.NDArray[np.bool_]] = {}  # by field: True where a value is null

    def __init__(self, data: Any, fields: Sequence[str]) -> None:
        self.data = data
        self.thread_safe = self.in_memory = isinstance(data, list)
        try:
            first = self._items([0])[0] if len(data) else dict.fromkeys(fields)
        except Exception as error:
            error.add_note(f"in record 0 of {a_type(data)}, read to find the field names")
            raise
        self.unnamed_type = "" if isinstance(first, Mapping) else type(first).__name__
        self.names = _field_names(first, fields)

    def __len__(self) -> int:
        return len(self.data)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickle; raise LoaderError if that would copy large arrays."""
        if self.copied_bytes > _MAX_PICKLED_BYTES:
            raise LoaderError(
                f"each new process would get a copy of {self.copied_bytes / 1e6:,.0f} MB of rows",
                advice="save the arrays with numpy.save, and give numpy.load(path, mmap_mode='r'): "
                "all processes share such arrays",
            )
        return vars(self)

    def take(self, ids: Int64s, names: Sequence[str], /) -> Values:
        """Return a dict from each field to the values of these records; a null becomes None.

        Values that are null are not requested from the dataset. A columnar format would return them
        as NaN, and would convert all integers of the column to floats.
        """
        # `null_masks` has for each field with nulls an array: True for the records with a null.
        if not self.null_masks:
            return self._values(ids, names) if names else {}
        without_nulls = [name for name in names if name not in self.null_masks]
        columns = dict(self._values(ids, without_nulls)) if without_nulls else {}
        for name in self.null_masks.keys() & names:
            is_null = self.null_masks[name][ids]
            values = iter(self._values(ids[~is_null], [name])[name])  # in order, without the nulls
            columns[name] = [None if null else next(values) for null in is_null]
        return columns

    def _values(self, ids: Int64s, names: Sequence[str]) -> Values:
        """Return a dict from each field to the values of these records, none of which is null."""
        rows = [self._as_dict(item) for item in self._items(ids.tolist())]
        return {name: [row[name] for row in rows] for name in names}

    def column(self, name: str, /) -> Any:
        """Return the values of a field for all records, read one by one with a progress bar."""
        show_bar = len(self) >= _MIN_FOR_BAR
        ids = progress_bar(range(len(self)), f"reading {name}", "record", show_bar)
        return [as_array(self.take(np.array([id_]), [name])[name][0]).copy() for id_ in ids]

    def as_stored(self, name: str, value: Any, /) -> Any:
        """Convert the user's value for records without a field to the form in which `take` returns
        values of this field. Here nothing is converted.
        """
        return value

    def _items(self, ids: list[int]) -> Any:
        """Return the items of the dataset with these ids, by one call if it has `__getitems__`."""
        get_items = getattr(self.data, "__getitems__", None)
        if get_items is None or not ids:  # ArrayRecord refuses [], the ids of a batch of padding
            return [self.data[id_] for id_ in ids]
        return get_items(ids)

    def _as_dict(self, item: Any) -> Mapping[str, Any]:
        """Return an item of the dataset (a dict, a tuple or a single value) as a dict of fields."""
        if isinstance(item, (dict, Mapping)):  # dict comes first: the check of an ABC is slow
            return item
        parts = item if isinstance(item, tuple) else (item,)
        return dict(zip(self.names, parts, strict=True))


class Columns(Items):
    """A dataset that returns a dict of columns when it is indexed by several ids."""

    def __init__(self, data: Any, fields: Sequence[str]) -> None:
        self.data = data
        self.names = fields or ([*data[[0]]] if len(data) else data.column_names)

    def column(self, name: str, /) -> Any:
        records = np.arange(len(self))
        return self.take(records, [name])[name] if name in self.null_masks else self.data[name][:]

    def _values(self, ids: Int64s, names: Sequence[str]) -> Values:
        columns = self.data[ids]
        return {name: columns[name] for name in names}


class Arrays(Items):
    """A dict of arrays and lists, or one array."""

    thread_safe = fresh = True

    def __init__(self, data: Any, fields: Sequence[str]) -> None:
        self.names = _field_names(data, fields)
        if not isinstance(data, Mapping):
            self.unnamed_type = type(data).__name__
            data = dict.fromkeys(self.names, data)
        self.data = {name: _as_records(name, values) for name, values in data.items()}
        in_memory = [array for array in self.data.values() if not is_mapped(array)]
        self.copied_bytes = sum(array.nbytes for array in in_memory)
        self.in_memory = len(in_memory) == len(self.data)
        lengths = {name: len(array) for name, array in self.data.items()}
        if len({*lengths.values()}) != 1:
            raise ValueError(f"data must be arrays of one length, got the lengths {lengths}")

    def __len__(self) -> int:
        return len(next(iter(self.data.values())))

    def column(self, name: str, /) -> Any:
        return self.data[name]

    def _values(self, ids: Int64s, names: Sequence[str]) -> Values:
        return {name: np.asarray(self.data[name]).take(ids, 0) for name in names}


def _field_names(record: Any, fields: Sequence[str]) -> Sequence[str]:
    """Return the names of the fields of a record: a dict, a tuple, or a single value, whose name is
    "row". `fields` are the user's names, if any.
    """
    if isinstance(record, Mapping):
        for name in fields:
            if name not in record:
                raise KeyError(f"no field {name!r}: the fields are {[*record]}")
        return fields or [*record]
    is_tuple = isinstance(record, tuple)
    names = fields or ([] if is_tuple else ["row"])
    if is_tuple and len(names) != len(record):
        raise ValueError(
            f"fields must name the {counted(len(record), 'part')} of each tuple, as in "
            'DatasetSource(dataset, fields=("image", "label"))'
        )
    if not is_tuple and len(names) != 1:
        only = "only tuples have several parts"
        raise ValueError(f"fields must be one name for {a_type(record)}: {only}")
    return names


def is_array_or_tensor(values: Any) -> bool:
    """Return whether a value is a numpy array or a tensor of torch, without masked entries."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", np.ndarray)
    return isinstance(values, (np.ndarray, tensor)) and not np.ma.isMaskedArray(values)


def _as_records(name: str, values: Any) -> Array:
    """Return the values of a field, an array or a list, as an array with a row per record; a list
    becomes an array of objects.
    """
    if isinstance(values, list):
        return np.fromiter(values, object, len(values))
    if not is_array_or_tensor(values):
        raise TypeError(
            f"{name!r} must be an array or a list, got {a_type(values)}: of several datasets, give "
            f"one, as in DatasetSource(data[{name!r}])"
        )
    if values.ndim == 0:
        raise ValueError(f"{name!r} must have a row for each record, got a single number")
    return as_mapped(to_numpy(name, values))  # an array mapped from a file pickles as its path


def to_numpy(name: str, values: Any) -> Array:
    """Return an array or a tensor as a numpy array; `name` is the field, for messages."""
    if isinstance(values, np.ndarray):
        return validate.unmasked(repr(name), values)
    try:
        return as_array(values)
    except (RuntimeError, TypeError) as error:
        raise TypeError(f"{name!r} must be an array: {error}") from None
