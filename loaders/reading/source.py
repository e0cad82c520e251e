"""Sources of records for a feed: an index over shards, or a user-defined source (`OwnSource`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.index.index import Index
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.samplers.validate import a_type, counted, unmasked


class Source(Protocol):
    """A source of records, whose ids are 0 to len - 1.

    An `Index` is a source. Any other source has a method `reader` too: see `OwnSource`.

    >>> import numpy as np
    >>> from twinfeed import DatasetSource
    >>> source = DatasetSource({"x": np.arange(8), "label": np.arange(8) % 2}, label="label")
    >>> len(source), list(source.fields), list(source.columns), source.describe(3)
    (8, ['x'], ['label'], 'record 3 of a dict')
    """

    def __len__(self) -> int: ...
    @property
    def fields(self) -> Iterable[str]:
        """The names of the fields that `Reads.read` reads."""

    @property
    def columns(self) -> Mapping[str, Array]:
        """By name, numpy arrays with one row per record."""

    @property
    def digests(self) -> Mapping[str, str]:
        """By name, a digest of the content of a field or column, for states; may be empty."""

    def describe(self, record: int, /) -> str:
        """Return a description of a record in one line, for messages, as its shard and number."""


class Reads(Protocol):
    """A reader of the records of a source, which several threads may use at once.

    >>> import numpy as np
    >>> from twinfeed import DatasetSource
    >>> reader = DatasetSource({"x": np.arange(8)}).reader()
    >>> reader.read(np.array([5, 2]), ["x"])
    {'x': array([5, 2])}
    """

    def read(self, ids: Int64s, fields: Sequence[str], /) -> Mapping[str, Sequence[Any]]:
        """Return the values of each field for each id, in the order of `ids`; None for a record
        that lacks the field. No later call may write to the arrays.
        """

    def close(self) -> None:
        """Close open files. A later call of `read` opens them again."""


class FieldReader(Protocol):
    """A reader for feeds: a `Reader`, a `CheckedReader`, or the reader of a worker process."""

    def read_values(self, ids: Int64s, names: Sequence[str], /) -> Mapping[str, Sequence[Any]]:
        """Return the values of each field for each id; None if a record lacks the field."""

    def close(self) -> None:
        """Close open files. A later call opens them again."""


@runtime_checkable
class OwnSource(Source, Protocol):
    """A user-defined source of records: a list, an array, a dataset of another library.

    A `Feed` takes such a source in place of an index, and all loaders work with it. Only what needs
    byte ranges does not work: reading ahead, `plan` and `shuffled`. For worker processes that are
    started by "spawn" the source must pickle.

    A source may have three more attributes:

    - `in_memory = True`: loaders make the batches in the loop's thread, unless `prefetch=` says
      otherwise. To hand a batch over to another thread takes longer.
    - `fork_safe = False`: workers of `TorchLoader` start by "spawn", and "fork" is refused.
    - `fresh = True`, of what `reader` returns: nobody else holds the arrays that `read` returns, so
      a batch takes an array without a copy.

    >>> import numpy as np
    >>> from twinfeed.loaders import Feed, NumpyLoader
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> class Words:
    ...     fields, columns, digests = ["word"], {"length": np.array([2, 2, 3])}, {}
    ...     def __len__(self):
    ...         return 3
    ...     def describe(self, record):
    ...         return f"word {record}"
    ...     def reader(self):
    ...         return self
    ...     def read(self, ids, fields):
    ...         return {"word": [["to", "be", "not"][record] for record in ids]}
    ...     def close(self):
    ...         pass
    >>> feed = Feed(Words(), ExactOnceBatchSampler(3, batch_size=2))
    >>> [batch["word"] for batch in NumpyLoader(feed)]
    [['to', 'be'], ['not']]
    """

    def reader(self) -> Reads:
        """Return a reader of the records."""


_SOURCE_MEMBERS = ("__len__", "fields", "columns", "digests", "describe", "reader")


def require_source(source: object, /) -> None:
    """Check that an object is an index or a user-defined source of records.

    Raises:
        TypeError: the object is neither: it lacks a method or an attribute of the protocol
            `OwnSource`. Or a column is not an array.
        ValueError: a column does not have a row for each record, or has masked entries.
    """
    if isinstance(source, Index):
        return
    if not isinstance(source, OwnSource):
        required = [name for name in _SOURCE_MEMBERS if not hasattr(source, name)]
        raise TypeError(
            f"index must be an Index, got {a_type(source)}: open_index(path) gives one. "
            f"A user-defined source (docs/own-records.md) also needs {', '.join(required)}"
        )
    for name, column in source.columns.items():
        if not isinstance(column, np.ndarray):
            raise TypeError(
                f"column {name!r} of {a_type(source)} must be a numpy array, "
                f"got {a_type(column)}: np.asarray(…) makes one"
            )
        unmasked(f"column {name!r} of {a_type(source)}", column)  # raises ValueError
        if column.shape[:1] != (len(source),):
            raise ValueError(
                f"column {name!r} of {a_type(source)} must have a row for each of its "
                f"{counted(len(source), 'record')}, got the shape {column.shape}"
            )


def read_only(array: Array, /) -> Array:
    """Return a read-only view of an array."""
    view = array.view()
    view.flags.writeable = False
    return view


class CheckedReader:
    """Read from a user-defined source, and check what its `read` returns.

    Arrays become read-only views, since the source may keep their memory. If the reader has the
    attribute `fresh = True`, nobody else has its arrays, and they are returned as they are.
    """

    def __init__(self, reader: Reads, source: Source) -> None:
        self._reader = reader
        self._source = source
        self._type = a_type(source)
        self._fresh = getattr(reader, "fresh", False)

    def read_values(self, ids: Int64s, fields: Sequence[str], /) -> dict[str, Sequence[Any]]:
        """Call the user's `read`, and check what it returns.

        Returns:
            A dict from each field to its values, in the order of `ids`. A value is None if the
            record lacks the field. Arrays are read-only, since the source may keep their memory.

        Raises:
            LoaderError: `read` failed, or did not return a dict from each field to a list with a
                value for each id.
        """
        try:
            columns = self._reader.read(ids, fields)
        except (LoaderError, ImportError):
            raise
        except Exception as error:
            raise self._read_error(ids, fields, error) from error
        is_dict = isinstance(columns, (dict, Mapping))  # dict first: the check of an ABC is slow
        checked = {}
        for name in fields:
            values: Any = columns.get(name) if is_dict else None
            is_list = hasattr(values, "__getitem__") and not isinstance(values, (str, bytes))
            if not is_list or len(values) != len(ids):
                raise LoaderError(
                    f"read of {self._type} returned no list of {counted(len(ids), 'value')} for "
                    f"the field {name!r}",
                    expected=f"a dict with such a list for each of {list(fields)}",
                    found=f"{columns!r:.200}",
                    advice="correct read: see docs/own-records.md",
                )
            checked[name] = self._protected(values)
        return checked

    def _protected(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return values with read-only views of arrays, unless the user's reader is `fresh`."""
        if isinstance(values, np.ndarray) and values.dtype != object:
            return values if self._fresh else read_only(values)
        return [read_only(value) if isinstance(value, np.ndarray) else value for value in values]

    def _read_error(self, ids: Int64s, fields: Sequence[str], error: Exception) -> LoaderError:
        """Return the error for an exception of the user's `read` of several records, with the first
        that fails alone.
        """
        where = f"{counted(len(ids), 'record')} at once"
        for record in ids:
            try:
                self._reader.read(np.array([record]), fields)
            except Exception:
                where = self._source.describe(int(record))
                break
        return LoaderError(
            f"{where}: read of {self._type} failed: {error!r}",
            advice="correct read, or leave the record out (records= of the sampler)",
        )

    def close(self) -> None:
        """Close the user's reader."""
        self._reader.close()


def reader_of(source: Source, /) -> FieldReader:
    """Return a reader of the records of a source.

    A source is an `Index`, or the user's own data, such as a dataset of PyTorch (`OwnSource`).
    """
    if isinstance(source, Index):
        return Reader(source)
    assert isinstance(source, OwnSource)
    # The user's reader may return anything, so each result is checked.
    return CheckedReader(source.reader(), source)
