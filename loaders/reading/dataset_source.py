"""A feed's source made of any map-style dataset: one with `len(dataset)` and `dataset[i]`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

from twinfeed.loaders.formats.sniff import has_image_extension
from twinfeed.loaders.reading._arrow_datasets import HuggingFace, Table
from twinfeed.loaders.reading._map_datasets import (
    Arrays,
    Columns,
    Items,
    Values,
    is_array_or_tensor,
    to_numpy,
)
from twinfeed.loaders.reading.source import Source, require_source
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.array_types import Array, Int64s, as_array, as_list
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.lock import Lock
from twinfeed.loaders.support.regular import read_file
from twinfeed.samplers import validate
from twinfeed.samplers.mapped import as_mapped
from twinfeed.samplers.validate import a_type, counted


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
        TypeError: a dataframe; data without a length or items; a label that is not an integer;
            a column with a null.
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


def _dataset_class(data: Any) -> type[Items]:
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
    if isinstance(data, Mapping) or is_array_or_tensor(data):
        return Arrays
    has_items = hasattr(data, "__getitem__") or hasattr(data, "__getitems__")
    if not (hasattr(data, "__len__") and has_items):
        raise TypeError(
            f"data must be a map-style dataset, with len(data) and data[i], got {a_type(data)}: "
            f"of a DataLoader pass its .dataset; pack(data, folder) writes an index of an iterable"
        )
    if not hasattr(data, "column_names"):
        return Items
    # Three kinds of dataset with columns are left:
    # - A pyarrow table has a `schema`, but no `with_format`.
    # - A dataset of Hugging Face has `with_format`. Its `format["type"]` says what it returns, such
    #   as "numpy"; "custom" means that a user's function makes the items (`set_transform`). Such a
    #   dataset may not return its stored columns, on which `HuggingFace` relies.
    # - Any other dataset is read as a custom one: only by `data[ids]`, with `Columns`.
    style = data.format["type"] if hasattr(data, "with_format") else "custom"
    if style in ("arrow", "polars"):
        raise TypeError(f"format {style!r} returns tables: give dataset.with_format('numpy')")
    if hasattr(data, "schema"):  # of pyarrow
        return Table
    return Columns if style == "custom" else HuggingFace


def _read_column(dataset: Items, name: str) -> Any:
    """Return the values of one field for all records; raise KeyError if a record lacks it."""
    try:
        return dataset.column(name)
    except KeyError:
        raise KeyError(f"some records lack {name!r}: record 0 has {[*dataset.names]}") from None


def _as_number_column(name: str, values: Any) -> Array:
    """Return the values of a column as an array of numbers; a mapped array stays mapped."""
    array = to_numpy(name, values)
    if array.dtype == object:
        listed = as_array(as_list(values))  # with None for a null within a list
        array = listed if listed.dtype == object else as_array(array.tolist())
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"column {name!r} must hold numbers, got {array.dtype}: number them, and give columns="
            f"{{{name!r}: np.unique(values, return_inverse=True)[1]}}"
        )
    return as_mapped(array)
