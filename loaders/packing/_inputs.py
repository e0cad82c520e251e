"""The sources of `pack`: an index, and iterables of dicts.

A sample is a dict of values by field name: bytes, str, numbers, arrays of one dimension. `__key__`
(str) is its key, and `label` (int or str) its class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from twinfeed.loaders.index import Index
from twinfeed.loaders.index.sizes import field_bytes
from twinfeed.loaders.reading.reader import Reader, verified_reader
from twinfeed.loaders.support.array_types import Int64s

UserSample = Mapping[str, Any]

_BATCH_SIZE = 64  # records of an index that are read at a time


RandomAccess = Index | Sequence[UserSample]


def read_samples(source: RandomAccess, numbers: Int64s, /) -> Iterator[UserSample]:
    """Yield the samples of a source with these `numbers`, in this order; of an index in batches."""
    if not isinstance(source, Index):
        yield from map(source.__getitem__, numbers.tolist())
        return
    with verified_reader(source) as reader:
        for start in range(0, len(numbers), _BATCH_SIZE):
            yield from _read_batch(source, reader, numbers[start : start + _BATCH_SIZE])


def source_bytes(source: object, /) -> int | None:
    """Return the approximate size of all samples of a source in bytes; None if it is not known."""
    return field_bytes(source) if isinstance(source, Index) else None


def _read_batch(index: Index, reader: Reader, ids: Int64s) -> list[dict[str, Any]]:
    """Read records of an index as samples, without the fields that they lack."""
    values: dict[str, Sequence[Any]] = {"__key__": index.keys(ids)} if index.has_keys else {}
    values |= reader.read(ids, [*index.fields, *index.columns])
    if "label" in index.columns and index.classes:
        values["label"] = [index.classes[label] for label in values["label"]]
    return [
        {
            name: value_to_pack(value)
            for name, value in zip(values, row, strict=True)
            if value is not None
        }
        for row in zip(*values.values(), strict=True)
    ]


def value_to_pack(value: Any) -> Any:
    """Return a stored value for `pack`: an empty list, refused from the user, becomes an array."""
    return np.array([], bytes) if isinstance(value, list) and not value else value


def tar_key(key: str, /) -> str:
    """Replace the dots in the base name of a key by "_", since in a tar a key ends at a dot."""
    folder, slash, name = key.rpartition("/")
    return f"{folder}{slash}{name.replace('.', '_')}"
