"""Side tables: numbers and strings that are joined to the samples by their id, or by record."""

from __future__ import annotations

import os
import re
import reprlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.errors import DataCorruptionError
from twinfeed.loaders.index.arrays import StringColumn
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.array_types import Ids, Int64s
from twinfeed.loaders.support.regular import open_regular
from twinfeed.samplers.mapped import as_mapped
from twinfeed.samplers.validate import a_type, unmasked

# Half of a surrogate pair: UTF-8 cannot encode a string with one, and TensorFlow needs UTF-8.
_SURROGATE = re.compile("[\ud800-\udfff]")


class SideTable:
    """Map a `.npy` file with a row for each sample: captions as numbers, another model's features.

    `table[ids]` reads the rows of these sample ids, and nothing else of the file.

    The table pickles as its path. A numpy.memmap would pickle with all its data. Every process maps
    the same pages, and a file that was replaced in the meantime is an OSError.

    Args:
        path: the `.npy` file.
        rows: the row of each sample, int64[N], if samples and rows have different orders.

    Raises:
        ValueError: a file that is not a whole `.npy` of numbers or truth values.
        IndexError: `rows` has a number outside the table, or `table[ids]` an id outside [0, N).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/features.npy", np.arange(6.0).reshape(3, 2))
    ...     table = SideTable(f"{folder}/features.npy")
    ...     table[np.array([2, 0])], len(table)
    (array([[4., 5.],
           [0., 1.]]), 3)
    """

    def __init__(self, path: str | os.PathLike[str], /, *, rows: Ids | None = None) -> None:
        self.path = os.path.abspath(path)
        self._data: npt.NDArray[Any] = _map_npy_file(self.path)
        self._rows = None if rows is None else checks.check_ids(rows, len(self._data), "rows")

    def __repr__(self) -> str:
        return f"<SideTable {self.path!r}: {self.dtype}{[*self.shape]}>"

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._data) if self._rows is None else len(self._rows)

    def __getitem__(self, ids: Ids) -> npt.NDArray[Any]:
        """Return a copy of the rows of these sample ids."""
        ids = checks.check_ids(ids, len(self))
        return np.asarray(self._data[ids if self._rows is None else self._rows[ids]])

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of samples, and the shape of a row."""
        return (len(self), *self._data.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the values."""
        return self._data.dtype


@dataclass(frozen=True)
class ByRecord:
    """Join a side table by record, where it has a row for each record and not for each sample id.

    With a `ViewSampler`, a sample is a (record, view) pair, and a side table has a row for each
    pair. `ByRecord(table)` gives all views of a record the same row. Any side table will do.

    >>> import numpy as np
    >>> from twinfeed import BatchSampler, DatasetSource, Feed, SequentialSampler, ViewSampler
    >>> order = ViewSampler(SequentialSampler(3), [2, 1], per_epoch="all", seed=0)
    >>> captions = ["a cat", "one cat", "a dog"]
    >>> side = {"caption": captions, "author": ByRecord(["Ann", "Bob"])}
    >>> source = DatasetSource({"x": np.arange(2)})
    >>> batch = Feed(source, BatchSampler(order, batch_size=3), side=side)[0, 0]
    >>> batch["caption"], batch["author"]
    (['a cat', 'one cat', 'a dog'], ['Ann', 'Ann', 'Bob'])
    """

    table: Any


@dataclass(frozen=True)
class ViewRows(ByRecord):
    """Join a side table by record and view: view v of record r is at row `starts[r] + v`.

    `starts` is int64[N + 1], and ends with the number of rows.
    """

    starts: Int64s


def check_table(name: str, table: Any, /) -> Any:
    """Check a side table of a feed, and return it.

    A side table is an array of numbers, a `SideTable` (a file of numbers), or a list of str, which
    is packed into a `StringColumn`. Any of them may be wrapped in `ByRecord`.

    Raises:
        TypeError: the table is anything else, such as a column of a dataframe, or has a string that
            UTF-8 cannot encode.
        ValueError: a masked value.
    """
    if isinstance(table, ByRecord):
        return replace(table, table=check_table(name, table.table))
    if hasattr(table, "iloc") or hasattr(table, "to_arrow"):  # of pandas; of polars
        raise TypeError(
            f"side table {name!r} is {a_type(table)}, whose rows may have another order "
            "than the records: ByKey(frame, key=…, value=…) joins them by key, and "
            "column.to_list() by position"
        )
    if isinstance(table, np.ndarray):
        unmasked(f"side table {name!r}", table)  # raises ValueError
    dtype = getattr(table, "dtype", None)  # an array and a `SideTable` have one, a list does not
    if getattr(dtype, "kind", "O") in "biufc":  # the kinds of numbers and truth values
        return table
    values = np.asarray(table, dtype=object)
    # The message shows the first value that is not a str; or the whole table, if it is not a list.
    for row, value in enumerate(values if values.ndim == 1 else [values]):
        if not isinstance(value, str) or _SURROGATE.search(value):
            raise TypeError(
                f"side table {name!r} must be an array of numbers or a list of str, got a "
                f"{type(table).__name__} whose row {row} is {reprlib.repr(value)}: "
                f"give each row a str, '' where there is no text"
            )
    return StringColumn.of(values)


def _map_npy_file(path: str) -> npt.NDArray[Any]:
    """Map an `.npy` file into memory, and return its array, a `MappedArray`.

    Raises:
        DataCorruptionError: the file is damaged, or does not have rows of numbers.
        LoaderError: it is not a regular file.
    """
    os.close(open_regular(path))  # only to check: numpy would wait for ever to open a FIFO
    try:
        data = np.lib.format.open_memmap(path, mode="r")
        problem = None if data.ndim else "it holds a single value"
        if data.dtype.kind not in "biufc":
            problem = f"it holds {data.dtype}"
    except OSError:  # such as a missing file: no damage
        raise
    except Exception as error:  # numpy evaluates the header as Python, which may raise any error
        problem = str(error)
    if problem is not None:
        raise DataCorruptionError(
            f"a side table must be an .npy file of numbers, with a row for each sample: {problem}",
            path=path,
            advice="write it again with numpy.save, as a whole",
        )
    return as_mapped(data)
