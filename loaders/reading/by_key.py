"""`ByKey`: a side table whose rows are joined to the records by a key."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np

from twinfeed.loaders.index import Index
from twinfeed.loaders.reading._map_datasets import to_numpy
from twinfeed.loaders.reading.dataset_source import as_source
from twinfeed.loaders.reading.missing import is_none
from twinfeed.loaders.reading.side_table import ByRecord, ViewRows
from twinfeed.loaders.reading.source import Source
from twinfeed.loaders.support.array_types import Int64s, as_list
from twinfeed.loaders.support.csv_columns import csv_columns
from twinfeed.samplers import validate


class ByKey:
    """Join a side table by key: each record gets the rows that have its key.

    - The rows may have any order, and rows of other keys are not used. Each record needs a row.
    - Keys are compared as text: 7, 7.0 and "7" are one key.
    - With several rows of a key, each is a view of the record, in the order of the table:
      `ViewSampler(sampler, table.counts(index), …)` draws them.

    Args:
        table: the path of a CSV or TSV file with a line of names, a dataframe of pandas or polars,
            an Arrow table, or a dict of columns. Or, without `key` and `value`, a dict from each
            key to its value, or to a list of its values.
        key: the name of the column of keys.
        value: the name of the column of values: numbers, or texts. In a file, all are texts.
        column: the column of the index that has the key of each record, such as a number of the
            image. Default: the records' own keys, `index.keys()`.

    Raises:
        KeyError: the table has no such column.
        TypeError: `table` is something else; or, by a feed, a number is null.
        ValueError: a file is not a table; or, by a feed, a value is masked, or a record has no row,
            or several rows where the sampler draws another number of views.

    >>> from twinfeed import BatchSampler, DatasetSource, Feed, SequentialSampler, ViewSampler
    >>> import numpy as np
    >>> images = {"x": np.arange(2), "photo": np.array([31, 7])}
    >>> table = {"photo": [7, 31, 7], "caption": ["a dog", "a cat", "one dog"]}
    >>> captions = ByKey(table, key="photo", value="caption", column="photo")
    >>> source = DatasetSource(images, columns=["photo"])
    >>> captions.counts(source)
    array([1, 2])
    >>> order = ViewSampler(SequentialSampler(3), captions.counts(source), per_epoch="all", seed=0)
    >>> feed = Feed(source, BatchSampler(order, batch_size=3), side={"caption": captions})
    >>> feed[0, 0]["photo"], feed[0, 0]["caption"]
    (array([31,  7,  7]), ['a cat', 'a dog', 'one dog'])
    """

    def __init__(
        self,
        table: Any,
        /,
        *,
        key: str | None = None,
        value: str | None = None,
        column: str | None = None,
    ) -> None:
        origin = "the table"
        if key is None and value is None and isinstance(table, Mapping):
            pairs = [*_pairs(table)]
            table = {"key": [key for key, _ in pairs], "value": [value for _, value in pairs]}
            key, value = "key", "value"
        elif isinstance(table, (str, os.PathLike)):
            origin = os.fspath(table)
            table = csv_columns(origin)
        elif not hasattr(table, "columns") and not isinstance(table, Mapping):
            raise TypeError(
                f"table must be a path, a dataframe, an Arrow table or a dict of columns, got "
                f"{validate.a_type(table)}"
            )
        keys = list(as_list(_column(table, f"key={key!r}", key, origin)))
        self._values = _column(table, f"value={value!r}", value, origin)
        self.column = column
        self._rows_of_key = defaultdict[str, list[int]](list)
        for row, row_key in enumerate(keys):
            self._rows_of_key[_key_text(row_key)].append(row)
        if len(keys) != len(self._values):
            raise ValueError(f"the table has {len(keys)} keys and {len(self._values)} values")

    def __repr__(self) -> str:
        column = "" if self.column is None else f", column={self.column!r}"
        return f"<ByKey of {len(self._values):,} rows, {len(self._rows_of_key):,} keys{column}>"

    def counts(self, index: Source | Any, /) -> Int64s:
        """Return how many rows each record has, int64[N], for `ViewSampler(sampler, counts, …)`.

        Raises:
            ValueError: a record has no row.
            KeyError: the index has no such column.
            TypeError: the records have no keys.
        """
        return np.array([len(rows) for rows in self._rows(as_source(index))], np.int64)

    def _rows(self, index: Source) -> list[list[int]]:
        """Return the rows of each record; raise ValueError for the first record without any."""
        if self.column is not None:
            if self.column not in index.columns:
                raise KeyError(f"no column {self.column!r}: the columns are {[*index.columns]}")
            keys = index.columns[self.column].tolist()
        elif isinstance(index, Index):
            keys = index.keys()
        else:
            raise TypeError("the records of a dataset have no keys: give ByKey(…, column='id')")
        rows = []
        for record, key in enumerate(keys):
            if (text := _key_text(key)) not in self._rows_of_key:
                raise ValueError(
                    f"{index.describe(record)}: the table has no row of its key {key!r}, but of "
                    f"{[*self._rows_of_key][:3]} and others: convert the keys, or name a column="
                )
            rows.append(self._rows_of_key[text])
        return rows


def joined(table: ByKey, index: Source, /) -> ByRecord:
    """Return a table with its rows in the order of the records of an index."""
    rows, column = table._rows(index), table._values
    order, starts = [*chain.from_iterable(rows)], np.cumsum([0, *map(len, rows)])
    stored = column if isinstance(column, np.ndarray) else as_list(column)
    values: Any
    if any(isinstance(value, str) for value in stored):
        values = [stored[row] for row in order]
    else:
        values = to_numpy("value", column)[order]
        lists = (row for row in stored if isinstance(row, list))
        if values.dtype == object and any(map(is_none, chain.from_iterable(lists))):
            raise TypeError("a list of the value has a null: fill it first")
    return ByRecord(values) if len(order) == len(rows) else ViewRows(values, starts)


def _pairs(table: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the key and the value of each row of a dict from a key to its value or values."""
    for key, values in table.items():
        for value in values if isinstance(values, (list, tuple)) else [values]:
            yield key, value


def _column(table: Any, argument: str, name: str | None, origin: str) -> Any:
    """Return a column of a table; raise KeyError if there is none of this name."""
    names = [*getattr(table, "column_names", getattr(table, "columns", table))]
    if name not in names:
        raise KeyError(f"{argument} is no column of {origin}: it has {names[:8]}")
    return table[name]


def _key_text(key: object) -> str:
    """Return a key as text, which is what keys are compared as."""
    if isinstance(key, bytes):
        return key.decode("utf-8", "surrogateescape")
    return str(int(key) if isinstance(key, float) and key.is_integer() else key)
