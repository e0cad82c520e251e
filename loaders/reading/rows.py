"""Any dataset that gives its records by number, as a source of a feed."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.support.array_types import Array, Int64s, as_array
from twinfeed.loaders.support.progress import bar
from twinfeed.samplers import validate
from twinfeed.samplers.mapped import held, is_mapped
from twinfeed.samplers.validate import counted

Values = Mapping[str, Any]

_PICKLED = 16 << 20  # bytes of arrays that another process may be sent
_MANY = 10_000  # records, from which on reading their labels one by one shows a bar


class Rows:
    """Make a source of any dataset that gives its records by number.

    A `Feed` takes the source in place of an index, and every sampler and loader serves it.

    - A dict of arrays, or one array, is indexed by all ids of a batch at once. An array that is
      mapped from a file stays there: other processes map the file.
    - A pyarrow table, and a dataset of Hugging Face, are read by columns, as their format says.
    - Anything else with a length gives items, by `__getitems__` or `__getitem__`: a list of dicts,
      a dataset of torch, ArrayRecord, Grain. An item is a dict, a tuple or a single value.

    There are no checksums, and nothing is known of where records lie: `plan`, `shuffled` and the
    engine "choose_from_datasets" need an index. The first item of a stream is read several times,
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
        ValueError: arrays of different lengths; a tuple without `fields`.
        LoaderError: pickling would copy more than 16 MiB of arrays to a new process.

    >>> import numpy as np
    >>> from twinfeed.loaders import Feed
    >>> from twinfeed.samplers import PKBatchSampler
    >>> data = {"x": np.arange(8.0).reshape(4, 2), "label": np.array([0, 1, 0, 1])}
    >>> rows = Rows(data, label="label")
    >>> feed = Feed(rows, PKBatchSampler(rows.columns["label"], p=2, k=1, seed=0))
    >>> feed[0, 0]["label"], feed[0, 0]["x"].shape
    (array([1, 0]), (2, 2))
    """

    _turn = threading.RLock()  # one lock for all: two `Rows` may share a dataset, or nest

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
        known = _kind(data)(data, None if fields is None else validate.names("fields", fields))
        self._data, self._kind = known, type(data).__name__
        self._one_at_a_time = not (validate.flag("threads", threads) or known.pure)
        self.fresh, self.in_memory = known.fresh, known.in_memory
        self.fork_safe = bool(getattr(data, "fork_safe", True))
        given = columns if isinstance(columns, Mapping) else {}
        self.columns = {name: _numbers(name, column) for name, column in given.items()}
        read = () if columns is None or given else validate.names("columns", columns)
        for name in read if label is None else (*read, label):
            if name not in self.columns:
                self.columns[name] = _numbers(name, _read_column(known, name))
        if label is not None and self.columns[label].dtype.kind not in "iu":
            raise TypeError(f"label {label!r} must hold integers, got {self.columns[label].dtype}")
        self.fields = [name for name in known.names if name not in self.columns]
        names = [*self.fields, *self.columns]
        self.digests = {} if digest is None else dict.fromkeys(names, digest)

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._data)

    def describe(self, record: int, /) -> str:
        """Say which record this is, for messages."""
        return f"record {record} of a {self._kind}"

    def reader(self, *, checksums: bool) -> Rows:
        """Return this source: there are no checksums to compare."""
        return self

    def read(self, ids: Int64s, fields: Sequence[str], /) -> Values:
        """Return the values of each field for each id."""
        with self._turn if self._one_at_a_time else nullcontext():
            return self._data.take(ids, fields)

    def close(self) -> None:
        """Do nothing: what is open belongs to the dataset."""


def _new_turn() -> None:
    """Replace the lock in a forked child: the parent's lock may be locked for ever."""
    Rows._turn = threading.RLock()


os.register_at_fork(after_in_child=_new_turn)


class _Items:
    """A dataset that gives single items; the other kinds derive from it.

    `pure`: any thread may read. `fresh`: nobody else holds the arrays that `take` returns.
    """

    pure = fresh = in_memory = False
    names: Sequence[str]
    copied = 0  # bytes of arrays that are pickled, as far as is known

    def __init__(self, data: Any, fields: Sequence[str] | None) -> None:
        self.data = data
        self.pure = self.in_memory = isinstance(data, list)
        first = self._items([0])[0] if len(data) else {}
        if fields is None and isinstance(first, tuple):
            raise ValueError(f"fields must name the {counted(len(first), 'part')} of each tuple")
        self.names = fields or ([*first] if isinstance(first, Mapping) else ["row"])

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
        """Return the values of some fields, for each id."""
        rows = [self._row(item) for item in self._items(ids.tolist())]
        return {name: [row[name] for row in rows] for name in names}

    def column(self, name: str, /) -> Any:
        """Return a field of all records."""
        every = bar(range(len(self)), f"reading {name}", "record", len(self) >= _MANY)
        return [as_array(self.take(np.array([each]), [name])[name][0]).copy() for each in every]

    def _items(self, numbers: list[int]) -> Any:
        many = getattr(self.data, "__getitems__", None)
        if many is None or not numbers:  # a rank may have padding alone, and ArrayRecord refuses []
            return [self.data[number] for number in numbers]
        return many(numbers)

    def _row(self, item: Any) -> Mapping[str, Any]:
        if isinstance(item, Mapping):
            return item
        parts = item if isinstance(item, tuple) else (item,)
        return dict(zip(self.names, parts, strict=True))


class _Columns(_Items):
    """A dataset that gives a dict of columns for several ids, as those of Hugging Face do."""

    def __init__(self, data: Any, fields: Sequence[str] | None) -> None:
        self.data = data
        self.names = fields or ([*data[[0]]] if len(data) else data.column_names)

    def take(self, ids: Int64s, names: Sequence[str], /) -> Values:
        found = self.data[ids]
        return {name: found[name] for name in names}

    def column(self, name: str, /) -> Any:
        return self.data[name][:]


class _Table(_Items):
    """A table of pyarrow."""

    pure = True

    def __init__(self, data: Any, fields: Sequence[str] | None) -> None:
        self.data, self.names = data, fields or data.column_names
        self.copied = data.nbytes

    def take(self, ids: Int64s, names: Sequence[str], /) -> Values:
        taken = self.data.select(names).take(ids)
        return {name: _unpacked(taken[name]) for name in names}

    def column(self, name: str, /) -> Any:
        return _unpacked(self.data[name])


class _Arrays(_Items):
    """A dict of arrays and lists, or one array."""

    pure = fresh = True

    def __init__(self, data: Any, fields: Sequence[str] | None) -> None:
        if not isinstance(data, Mapping):
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

    def take(self, ids: Int64s, names: Sequence[str], /) -> Values:
        return {name: np.asarray(self.data[name]).take(ids, 0) for name in names}

    def column(self, name: str, /) -> Any:
        return self.data[name]


def _kind(data: Any) -> type[_Items]:
    """Return how a dataset is read, by what it has: no library is imported for this."""
    if hasattr(data, "iloc") or hasattr(data, "to_arrow"):
        raise TypeError(
            "a dataframe gives no records by number: give frame.to_arrow() of polars, or "
            "datasets.Dataset.from_pandas(frame)"
        )
    if isinstance(data, Mapping) or _is_array(data):
        return _Arrays
    if hasattr(data, "column_names"):
        return _Table if hasattr(data, "schema") else _Columns
    gives = hasattr(data, "__getitem__") or hasattr(data, "__getitems__")
    if not (hasattr(data, "__len__") and gives):
        raise TypeError(f"data must have a length and records by number, got {data!r}")
    return _Items


def _is_array(values: Any) -> bool:
    tensor = getattr(sys.modules.get("torch"), "Tensor", np.ndarray)
    return isinstance(values, (np.ndarray, tensor)) and not np.ma.isMaskedArray(values)


def _array(name: str, values: Any) -> Array:
    """Return an array as it is, and a list as an array of its values."""
    if isinstance(values, list):
        return np.fromiter(values, object, len(values))
    if not _is_array(values):
        raise TypeError(f"{name!r} must be an array or a list, got a {type(values).__name__}")
    return held(as_array(values))


def _unpacked(column: Any) -> Any:
    """Return a column of pyarrow; numpy would make NaN of a missing integer."""
    return column.to_pylist() if column.null_count else column.to_numpy()


def _read_column(data: _Items, name: str) -> Any:
    try:
        return data.column(name)
    except KeyError:
        raise KeyError(f"no {name!r} in every record: the first has {[*data.names]}") from None


def _numbers(name: str, values: Any) -> Array:
    """Return a column as an array of numbers."""
    array = as_array(values)
    if array.dtype == object:
        array = np.asarray(array.tolist())
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"column {name!r} must hold numbers, got {array.dtype}: number them, and give columns="
            f"{{{name!r}: np.unique(values, return_inverse=True)[1]}}"
        )
    return held(array)
