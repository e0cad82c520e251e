"""A feed's source made of any map-style dataset: one with `len(dataset)` and `dataset[i]`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.formats.sniff import has_image_extension
from twinfeed.loaders.reading.source import Source, require_source
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.array_types import Array, Int64s, as_array
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.lock import Lock
from twinfeed.loaders.support.progress import progress_bar
from twinfeed.loaders.support.regular import read_file
from twinfeed.samplers import validate
from twinfeed.samplers.mapped import as_mapped, is_mapped
from twinfeed.samplers.validate import a_type, counted

Values = Mapping[str, Any]

_MAX_PICKLED_BYTES = 16 << 20  # of arrays that are sent to another process
_MIN_FOR_BAR = 10_000  # records, from which on reading their labels one by one shows a bar


class DatasetSource:
    """Make a source of any map-style dataset: one that has `len(dataset)` and `dataset[i]`.

    A `Feed` takes the source in place of an index, and every sampler and loader serves it. Of a
    dict of arrays, and of a dataset whose records are dicts, a `Feed` makes the source by itself.

    - A dict of arrays, or one array, is indexed by all ids of a batch at once. An array that is
      mapped from a file stays there: other processes map the file.
    - A pyarrow table, and a dataset of Hugging Face, are read by columns, as their format says. A
      null, or a list with a null within it, is a missing value: see `missing` of `Feed`.
    - Anything else with a length gives items, by `__getitems__` or `__getitem__`: a list of dicts,
      a dataset of torch, ArrayRecord, Grain. An item is a dict, a tuple or a single value.

    There are no checksums, and the byte ranges of records are not known: `plan` and `shuffled` need
    an index. The first item of a stream is read several times, since an item must always be the
    same: random numbers belong in `transform`.

    Args:
        data: the dataset. Of a dataframe give `frame.to_arrow()` (polars), or
            `frame.to_dict("list")` (pandas).
        label: the name of the field that holds each record's label, an integer. It becomes
            `columns[label]`, for samplers and in every batch.
        columns: the names of more fields with a number for each record, or a dict of arrays. They
            are read once: by column, or else from every item. Give an array if that takes long.
        fields: names for the parts of a tuple, or for a single value, which is called "row"
            otherwise. Of a dict, the keys to read. Default: all.
        digest: a string for the content, in the states of loaders. A state of records with
            another digest is refused. Without a digest, a state that is loaded warns.
        threads: whether several threads may read items at once. Otherwise one thread reads at a
            time. Arrays and tables are read by all threads.

    Raises:
        TypeError: a dataframe; data without a length or items; a label that is not an integer.
        ValueError: arrays of different lengths; `fields` that do not name each part of a tuple; a
            masked value.
        KeyError: record 0 does not have one of `fields`, or a record lacks a column.
        LoaderError: pickling would copy more than 16 MiB of arrays to a new process.

    >>> import numpy as np
    >>> from twinfeed.loaders import Feed
    >>> from twinfeed.samplers import PKBatchSampler
    >>> data = {"x": np.arange(8.0).reshape(4, 2), "label": np.array([0, 1, 0, 1])}
    >>> rows = DatasetSource(data, label="label")
    >>> feed = Feed(rows, PKBatchSampler(rows.columns["label"], p=2, k=1, seed=0))
    >>> feed[0, 0]["label"], feed[0, 0]["x"].shape
    (array([1, 0]), (2, 2))
    """

    # One lock for all: two sources may share a dataset, or nest.
    _lock = Lock()

    @validate.show_call("DatasetSource(data, label='y')")
    def __init__(
        self,
        data: Any,
        /,
        *,
        label: str | None = None,
        columns: Iterable[str] | Mapping[str, Any] | None = None,
        fields: Iterable[str] | None = None,
        digest: str | None = None,
        threads: bool = False,
    ) -> None:
        wanted = checks.names("fields", () if fields is None else fields, ordered=True)  # (): all
        if len({*wanted}) < len(wanted):
            raise ValueError(f"fields must be different names, got {wanted}")
        dataset = _dataset_class(data)(data, wanted)
        if len(dataset) and not dataset.names:
            raise ValueError(f"record 0 of {a_type(data)} must have a field, got none")
        self._data, self._type = dataset, a_type(data)
        self._one_thread_at_a_time = not (validate.flag("threads", threads) or dataset.thread_safe)
        self.fresh, self.in_memory = dataset.fresh, dataset.in_memory
        self.unnamed_type = dataset.unnamed_type
        self.fork_safe = bool(getattr(data, "fork_safe", True))
        arrays = columns if isinstance(columns, Mapping) else {}
        self.columns = {name: _as_number_column(name, column) for name, column in arrays.items()}
        names_to_read = () if columns is None or arrays else checks.names("columns", columns)
        for name in names_to_read if label is None else (*names_to_read, label):
            if name not in self.columns:
                self.columns[name] = _as_number_column(name, _read_column(dataset, name))
        if label is not None and self.columns[label].dtype.kind not in "iu":
            raise TypeError(f"label {label!r} must hold integers, got {self.columns[label].dtype}")
        self.labels = None if label is None else self.columns[label]  # for samplers
        self.fields = [name for name in dataset.names if name not in self.columns]
        names = [*self.fields, *self.columns]
        if not isinstance(digest, (str, NoneType)):
            raise TypeError(f"digest must be a string, got {digest!r}")
        self.digests = {} if digest is None else dict.fromkeys(names, digest)
        self.num_missing = {
            name: int(is_null.sum()) for name, is_null in dataset.null_masks.items()
        }
        self.as_stored = dataset.as_stored

    def __repr__(self) -> str:
        names = f"fields {self.fields}, columns {[*self.columns]}"
        return f"<DatasetSource of {self._type}: {counted(len(self), 'record')}, {names}>"

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._data)

    def describe(self, record: int, /) -> str:
        """Return in one line which record this is, for messages."""
        return f"record {record} of {self._type}"

    def reader(self) -> DatasetSource:
        """Return this source."""
        return self

    def read(self, ids: Int64s, fields: Sequence[str], /) -> Values:
        """Return a dict from each field to the values of these records, in the order of `ids`."""
        if not self._one_thread_at_a_time:
            return self._data.take(ids, fields)
        with self._lock:
            return self._data.take(ids, fields)

    def close(self) -> None:
        """Do nothing: what is open belongs to the dataset."""


class _Items:
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


class _Columns(_Items):
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


class _HuggingFace(_Columns):
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


class _Table(_Columns):
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


class _Arrays(_Items):
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


class ImageFiles(DatasetSource):
    """A list of paths of images, whose records are the bytes of the files in a field "image"."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        super().__init__(paths, fields=["image"], threads=True)
        self.in_memory = False

    def describe(self, record: int, /) -> str:
        """Return in one line which record this is, for messages."""
        return f"record {record}, {self._data.data[record]}"

    def read(self, ids: Int64s, fields: Sequence[str], /) -> Values:
        """Return the bytes of the files of these records."""
        paths = super().read(ids, fields)
        return {
            name: [read_file(path, LIMITS.record_bytes) for path in column]
            for name, column in paths.items()
        }


def as_source(records: Any, /) -> Source:
    """Return `records` if it is an `Index` or another `Source`, or else wrap it in a source.

    A dict of arrays, or a dataset whose records are dicts, becomes a `DatasetSource`. So does a
    list of paths of images, whose records are the files.

    Raises:
        TypeError: `records` is a path or a sampler, or cannot be indexed by record id, or its
            records are not dicts, so that their values have no names.
    """
    if validate.is_stream(records):
        raise TypeError(f"index must be the data, got {a_type(records)}: write Feed(data, sampler)")
    # A dataset may have one of these attributes, as a dataframe has `describe`. An object with two
    # is meant as a source. If it lacks an attribute of a source, `require_source` says which.
    if sum(hasattr(records, name) for name in ("describe", "digests", "reader")) >= 2:
        require_source(records)
        return records  # type: ignore[no-any-return]
    if isinstance(records, (list, tuple)) and records and all(map(has_image_extension, records)):
        return ImageFiles(records)
    source = DatasetSource(records)
    if source.unnamed_type:  # the type of record 0, if this is not a dict
        raise TypeError(
            f"record 0 of {a_type(records)} is of type {source.unnamed_type}, not a dict: name its "
            'values, as in DatasetSource(dataset, fields=("image",))'
        )
    return source


def _dataset_class(data: Any) -> type[_Items]:
    """Return the class that reads a dataset, by its attributes: an `isinstance` would have to
    import pyarrow or datasets.
    """
    if isinstance(data, (str, bytes, os.PathLike)):
        raise TypeError(
            f"data must not be a path, got {data!r:.80}: open_index(path) opens an index"
        )
    if hasattr(data, "iloc") or hasattr(data, "to_arrow"):  # of pandas; of polars
        raise TypeError(
            "a dataframe is not indexed by record number: give frame.to_arrow() (polars), or "
            "frame.to_dict('list') (pandas)"
        )
    if isinstance(data, Mapping) or _is_array_or_tensor(data):
        return _Arrays
    has_items = hasattr(data, "__getitem__") or hasattr(data, "__getitems__")
    if not (hasattr(data, "__len__") and has_items):
        raise TypeError(
            f"data must be a map-style dataset, with len(data) and data[i], got {a_type(data)}: "
            f"of a DataLoader pass its .dataset; pack(data, folder) writes an index of an iterable"
        )
    if not hasattr(data, "column_names"):
        return _Items
    # Three kinds of dataset with columns are left:
    # - A pyarrow table has a `schema`, but no `with_format`.
    # - A dataset of Hugging Face has `with_format`. Its `format["type"]` says what it returns, such
    #   as "numpy"; "custom" means that a user's function makes the items (`set_transform`). Such a
    #   dataset may not return its stored columns, on which `_HuggingFace` relies.
    # - Any other dataset is read as a custom one: only by `data[ids]`, with `_Columns`.
    style = data.format["type"] if hasattr(data, "with_format") else "custom"
    if style in ("arrow", "polars"):
        raise TypeError(f"format {style!r} returns tables: give dataset.with_format('numpy')")
    if hasattr(data, "schema"):  # of pyarrow
        return _Table
    return _Columns if style == "custom" else _HuggingFace


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


def _is_array_or_tensor(values: Any) -> bool:
    """Return whether a value is a numpy array or a tensor of torch, without masked entries."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", np.ndarray)
    return isinstance(values, (np.ndarray, tensor)) and not np.ma.isMaskedArray(values)


def _as_records(name: str, values: Any) -> Array:
    """Return the values of a field, an array or a list, as an array with a row per record; a list
    becomes an array of objects.
    """
    if isinstance(values, list):
        return np.fromiter(values, object, len(values))
    if not _is_array_or_tensor(values):
        raise TypeError(
            f"{name!r} must be an array or a list, got {a_type(values)}: of several datasets, give "
            f"one, as in DatasetSource(data[{name!r}])"
        )
    if values.ndim == 0:
        raise ValueError(f"{name!r} must have a row for each record, got a single number")
    return as_mapped(_to_numpy(name, values))  # an array mapped from a file pickles as its path


def _to_numpy(name: str, values: Any) -> Array:
    """Return an array or a tensor as a numpy array; `name` is the field, for messages."""
    if isinstance(values, np.ndarray):
        return validate.unmasked(repr(name), values)
    try:
        return as_array(values)
    except (RuntimeError, TypeError) as error:
        raise TypeError(f"{name!r} must be an array: {error}") from None


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
        return pyarrow.chunked_array([[value]], arrow_type)
    except (pyarrow.ArrowException, OverflowError) as error:
        got = f"got {value!r} ({error})"
        raise TypeError(f"missing must have a value of {arrow_type}, {got}") from None


def _read_column(dataset: _Items, name: str) -> Any:
    """Return the values of one field for all records; raise KeyError if a record lacks it."""
    try:
        return dataset.column(name)
    except KeyError:
        raise KeyError(f"some records lack {name!r}: record 0 has {[*dataset.names]}") from None


def _as_number_column(name: str, values: Any) -> Array:
    """Return the values of a column as an array of numbers; a mapped array stays mapped."""
    array = _to_numpy(name, values)
    if array.dtype == object:
        array = as_array(array.tolist())
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"column {name!r} must hold numbers, got {array.dtype}: number them, and give columns="
            f"{{{name!r}: np.unique(values, return_inverse=True)[1]}}"
        )
    return as_mapped(array)
