"""Any dataset that gives its records by number, as a source of a feed."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.index import Index
from twinfeed.loaders.reading.source import Source, check_source
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.array_types import Array, Int64s, as_array
from twinfeed.loaders.support.fork import PerProcess
from twinfeed.loaders.support.progress import progress_bar
from twinfeed.samplers import validate
from twinfeed.samplers.mapped import as_mapped, is_mapped
from twinfeed.samplers.validate import counted

Values = Mapping[str, Any]

_PICKLED = 16 << 20  # bytes of arrays that another process may be sent
_MANY = 10_000  # records, from which on reading their labels one by one shows a bar


class DatasetSource:
    """Make a source of any dataset that gives its records by number.

    A `Feed` takes the source in place of an index, and every sampler and loader serves it. Of a
    dict of arrays, and of a dataset whose records are dicts, a `Feed` makes the source by itself.

    - A dict of arrays, or one array, is indexed by all ids of a batch at once. An array that is
      mapped from a file stays there: other processes map the file.
    - A pyarrow table, and a dataset of Hugging Face, are read by columns, as their format says. A
      null, or a list with a null within it, is a missing value: see `missing` of `Feed`.
    - Anything else with a length gives items, by `__getitems__` or `__getitem__`: a list of dicts,
      a dataset of torch, ArrayRecord, Grain. An item is a dict, a tuple or a single value.

    There are no checksums, and nothing is known of where records lie: `plan` and `shuffled`
    need an index. The first item of a stream is read several times,
    since an item must always be the same: random numbers belong in `transform`.

    Args:
        data: the dataset. Of a dataframe give `frame.to_arrow()`, or `Dataset.from_pandas(frame)`.
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
        TypeError: a dataframe; what has no length or gives no items; a label that is no integer.
        ValueError: arrays of different lengths; a tuple without `fields`; a masked value.
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
    _lock = PerProcess(threading.RLock)

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
        dataset = _kind(data)(data, None if fields is None else checks.names("fields", fields))
        self._data, self._kind = dataset, type(data).__name__
        self._locked = not (validate.flag("threads", threads) or dataset.pure)
        self.fresh, self.in_memory = dataset.fresh, dataset.in_memory
        self.unnamed = dataset.unnamed
        self.fork_safe = bool(getattr(data, "fork_safe", True))
        arrays = columns if isinstance(columns, Mapping) else {}
        self.columns = {name: _numbers(name, column) for name, column in arrays.items()}
        read = () if columns is None or arrays else checks.names("columns", columns)
        for name in read if label is None else (*read, label):
            if name not in self.columns:
                self.columns[name] = _numbers(name, _read_column(dataset, name))
        if label is not None and self.columns[label].dtype.kind not in "iu":
            raise TypeError(f"label {label!r} must hold integers, got {self.columns[label].dtype}")
        self.fields = [name for name in dataset.names if name not in self.columns]
        names = [*self.fields, *self.columns]
        self.digests = {} if digest is None else dict.fromkeys(names, digest)
        self.num_missing = {
            name: int(is_null.sum()) for name, is_null in dataset.null_masks.items()
        }
        self.filled = dataset.filled

    def __repr__(self) -> str:
        names = f"fields {self.fields}, columns {[*self.columns]}"
        return f"<DatasetSource of a {self._kind}: {counted(len(self), 'record')}, {names}>"

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._data)

    def describe(self, record: int, /) -> str:
        """Return in one line which record this is, for messages."""
        return f"record {record} of a {self._kind}"

    def reader(self, *, checksums: bool) -> DatasetSource:
        """Return this source: there are no checksums to compare."""
        return self

    def read(self, ids: Int64s, fields: Sequence[str], /) -> Values:
        """Return the values of each field for each id."""
        with self._lock() if self._locked else nullcontext():
            return self._data.take(ids, fields)

    def close(self) -> None:
        """Do nothing: what is open belongs to the dataset."""


class _Items:
    """A dataset that gives single items; the other kinds derive from it.

    `pure`: any thread may read. `fresh`: nobody else holds the arrays that `take` returns. A format
    of columns makes NaN of a null, and floats of the integers beside it, so records that have no
    value are left out before.
    """

    pure = fresh = in_memory = False
    names: Sequence[str]
    unnamed = ""  # the type of record 0, if that is a value without a name
    copied = 0  # bytes of arrays that are pickled, as far as is known
    null_masks: Mapping[str, npt.NDArray[np.bool_]] = {}  # which records have no value, where known

    def __init__(self, data: Any, fields: Sequence[str] | None) -> None:
        self.data = data
        self.pure = self.in_memory = isinstance(data, list)
        try:
            first = self._items([0])[0] if len(data) else {}
        except Exception as error:
            error.add_note(f"in record 0 of a {type(data).__name__}, which is read for its fields")
            raise
        if fields is None and isinstance(first, tuple):
            raise ValueError(
                f"fields must name the {counted(len(first), 'part')} of each tuple, as in "
                'DatasetSource(dataset, fields=("image", "label"))'
            )
        self.unnamed = "" if isinstance(first, Mapping) else type(first).__name__
        self.names = fields or (["row"] if self.unnamed else [*first])

    def __len__(self) -> int:
        return len(self.data)

    def __getstate__(self) -> dict[str, Any]:
        if self.copied > _PICKLED:
            raise LoaderError(
                f"each new process would get a copy of {self.copied / 1e6:,.0f} MB of rows",
                advice="save arrays with numpy.save, and give numpy.load(path, mmap_mode='r'), "
                "which processes share",
            )
        return vars(self)

    def take(self, ids: Int64s, names: Sequence[str], /) -> Values:
        """Return the values of some fields, for each id; None for a record that has none."""
        complete = [name for name in names if name not in self.null_masks]
        found = dict(self._values(ids, complete)) if complete else {}
        for name in self.null_masks.keys() & names:
            is_null = self.null_masks[name][ids]
            values = iter(self._values(ids[~is_null], [name])[name])
            found[name] = [None if null else next(values) for null in is_null]
        return found

    def _values(self, ids: Int64s, names: Sequence[str]) -> Values:
        """Return the values of some fields, for ids whose records have them."""
        rows = [self._row(item) for item in self._items(ids.tolist())]
        return {name: [row[name] for row in rows] for name in names}

    def column(self, name: str, /) -> Any:
        """Return a field of all records."""
        records = progress_bar(range(len(self)), f"reading {name}", "record", len(self) >= _MANY)
        return [as_array(self.take(np.array([n]), [name])[name][0]).copy() for n in records]

    def filled(self, name: str, value: Any, /) -> Any:
        """Return a value for the records that have none, as `take` would return it."""
        return value

    def _items(self, numbers: list[int]) -> Any:
        get_items = getattr(self.data, "__getitems__", None)
        if get_items is None or not numbers:  # padding alone: ArrayRecord refuses []
            return [self.data[number] for number in numbers]
        return get_items(numbers)

    def _row(self, item: Any) -> Mapping[str, Any]:
        if isinstance(item, Mapping):
            return item
        parts = item if isinstance(item, tuple) else (item,)
        return dict(zip(self.names, parts, strict=True))


class _Columns(_Items):
    """A dataset that gives a dict of columns for several ids."""

    def __init__(self, data: Any, fields: Sequence[str] | None) -> None:
        self.data = data
        self.names = fields or ([*data[[0]]] if len(data) else data.column_names)

    def column(self, name: str, /) -> Any:
        records = np.arange(len(self))
        return self.take(records, [name])[name] if name in self.null_masks else self.data[name][:]

    def _values(self, ids: Int64s, names: Sequence[str]) -> Values:
        found = self.data[ids]
        return {name: found[name] for name in names}


class _HuggingFace(_Columns):
    """A dataset of Hugging Face, of which the columns that are named are read alone."""

    def __init__(self, data: Any, fields: Sequence[str] | None) -> None:
        super().__init__(data, fields)
        self._selected: dict[tuple[str, ...], Any] = {}
        inside, stored = data.format["type"] is not None, data.with_format("arrow")
        nulls = [name for name in self.names if _is_null(data.data.table[name], inside).any()]
        self.null_masks = {name: _is_null(stored[name][:], inside) for name in nulls}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_selected": {}}

    def filled(self, name: str, value: Any, /) -> Any:
        _typed(value, self.data.data.table[name].type)
        kind, style = type(self.data.features), self.data.format
        row = type(self.data).from_dict({name: [value]}, kind({name: self.data.features[name]}))
        return row.with_format(style["type"], **style["format_kwargs"])[[0]][name][0]

    def _values(self, ids: Int64s, names: Sequence[str]) -> Values:
        chosen = tuple(names)
        if chosen not in self._selected:  # which takes a millisecond
            self._selected[chosen] = self.data.select_columns(names)
        return self._selected[chosen][ids]  # type: ignore[no-any-return]


class _Table(_Columns):
    """A table of pyarrow."""

    pure = True

    def __init__(self, data: Any, fields: Sequence[str] | None) -> None:
        self.data, self.names = data, fields or data.column_names
        self.copied = data.nbytes
        self.null_masks = {
            name: is_null for name in self.names if (is_null := _is_null(data[name])).any()
        }

    def filled(self, name: str, value: Any, /) -> Any:
        return _unpacked(_typed(value, self.data[name].type))[0]

    def _values(self, ids: Int64s, names: Sequence[str]) -> Values:
        taken = self.data.select(names).take(ids)
        return {name: _unpacked(taken[name]) for name in names}


class _Arrays(_Items):
    """A dict of arrays and lists, or one array."""

    pure = fresh = True

    def __init__(self, data: Any, fields: Sequence[str] | None) -> None:
        if not isinstance(data, Mapping):
            self.unnamed = type(data).__name__
            data = dict.fromkeys(fields or ["row"], data)
        self.data = {name: _array(name, values) for name, values in data.items()}
        self.names = fields or [*data]
        copied = [array.nbytes for array in self.data.values() if not is_mapped(array)]
        self.copied, self.in_memory = sum(copied), len(copied) == len(self.data)
        lengths = {name: len(array) for name, array in self.data.items()}
        if len({*lengths.values()}) != 1:
            raise ValueError(f"arrays must have a row for each record, got the lengths {lengths}")

    def __len__(self) -> int:
        return len(next(iter(self.data.values())))

    def column(self, name: str, /) -> Any:
        return self.data[name]

    def _values(self, ids: Int64s, names: Sequence[str]) -> Values:
        return {name: np.asarray(self.data[name]).take(ids, 0) for name in names}


def source_of(records: Any, /) -> Source:
    """Return an index or a source as it is, and a source of a dict of arrays or a dataset of dicts.

    Raises:
        TypeError: a path, what has no records by number, and records without names.
    """
    if isinstance(records, Index) or hasattr(records, "reader") or hasattr(records, "digests"):
        check_source(records)
        return records  # type: ignore[no-any-return]
    kind = type(records).__name__
    if isinstance(records, (str, bytes, os.PathLike)):
        raise TypeError(f"index must be an Index, got a {kind}: open_index(path) gives one")
    source = DatasetSource(records)
    if source.unnamed:
        raise TypeError(
            f"record 0 of a {kind} is of type {source.unnamed}, and no dict: name its values, as "
            'in DatasetSource(dataset, fields=("image",))'
        )
    return source


def _kind(data: Any) -> type[_Items]:
    """Return how a dataset is read, by what it has: no library is imported for this."""
    if hasattr(data, "iloc") or hasattr(data, "to_arrow"):
        raise TypeError(
            "a dataframe gives no records by number: give frame.to_arrow() of polars, or "
            "datasets.Dataset.from_pandas(frame)"
        )
    if isinstance(data, Mapping) or _is_array(data):
        return _Arrays
    gives = hasattr(data, "__getitem__") or hasattr(data, "__getitems__")
    if not (hasattr(data, "__len__") and gives):
        if hasattr(data, "dataset"):
            advice = ": give its dataset"
        else:
            advice = ": pack(data, folder) writes an index" if hasattr(data, "__iter__") else ""
        raise TypeError(
            f"data must have a length and records by number, got a {type(data).__name__}{advice}"
        )
    if not hasattr(data, "column_names"):
        return _Items
    style = data.format["type"] if hasattr(data, "with_format") else "custom"
    if style in ("arrow", "polars"):
        raise TypeError(f"format {style!r} gives tables: give dataset.with_format('numpy')")
    if hasattr(data, "schema"):
        return _Table
    return _Columns if style == "custom" else _HuggingFace


def _is_array(values: Any) -> bool:
    tensor = getattr(sys.modules.get("torch"), "Tensor", np.ndarray)
    return isinstance(values, (np.ndarray, tensor)) and not np.ma.isMaskedArray(values)


def _array(name: str, values: Any) -> Array:
    """Return an array as it is, and a list as an array of its values."""
    if isinstance(values, list):
        return np.fromiter(values, object, len(values))
    if hasattr(values, "column_names"):
        raise TypeError(
            f"{name!r} is a dataset of its own: give one, as in DatasetSource(data[{name!r}])"
        )
    if not _is_array(values):
        raise TypeError(f"{name!r} must be an array or a list, got a {type(values).__name__}")
    return as_mapped(_numpy(name, values))


def _numpy(name: str, values: Any) -> Array:
    """Return an array; raise ValueError for a masked value, TypeError for a sparse tensor."""
    if isinstance(values, np.ndarray):
        return validate.unmasked(repr(name), values)
    try:
        return as_array(values)
    except (RuntimeError, TypeError) as error:  # a tensor with a gradient, a sparse one
        raise TypeError(f"{name!r} must be an array: {error}") from None


def _is_null(column: Any, inside: bool = True) -> npt.NDArray[np.bool_]:
    """Return which values of pyarrow are null, or lists with a null `inside`."""
    if hasattr(column, "chunks"):
        parts = [_is_null(chunk, inside) for chunk in column.chunks]
        return np.concatenate([np.zeros(0, bool), *parts])
    is_null = np.array(column.is_null())
    column = getattr(column, "storage", column)  # of an extension type
    if inside and hasattr(column, "value_parent_indices") and not _has_dicts(column):
        is_null[column.value_parent_indices().to_numpy()[_is_null(column.flatten())]] = True
    return is_null


def _has_dicts(column: Any) -> bool:
    return "struct<" in str(column.type) or "map<" in str(column.type)


def _unpacked(column: Any) -> Any:
    """Return a column of pyarrow without nulls: of integers beside a null, numpy makes floats."""
    return column.to_pylist() if _has_dicts(column) else column.to_numpy()


def _typed(value: Any, kind: Any) -> Any:
    """Return a value as a column of pyarrow; raise TypeError for a value of another type."""
    pyarrow, kind = sys.modules["pyarrow"], getattr(kind, "storage_type", kind)
    try:
        with suppress(pyarrow.ArrowNotImplementedError):
            pyarrow.array([value]).cast(kind)  # which never rounds
        return pyarrow.chunked_array([[value]], kind)
    except (pyarrow.ArrowException, OverflowError) as error:
        raise TypeError(f"missing must have a value of {kind}, got {value!r} ({error})") from None


def _read_column(data: _Items, name: str) -> Any:
    try:
        return data.column(name)
    except KeyError:
        raise KeyError(f"no {name!r} in every record: the first has {[*data.names]}") from None


def _numbers(name: str, values: Any) -> Array:
    """Return a column as an array of numbers."""
    array = _numpy(name, values)
    if array.dtype == object:
        array = np.asarray(array.tolist())
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"column {name!r} must hold numbers, got {array.dtype}: number them, and give columns="
            f"{{{name!r}: np.unique(values, return_inverse=True)[1]}}"
        )
    return as_mapped(array)
