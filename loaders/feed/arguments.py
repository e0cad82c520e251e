"""Check the arguments of a `Feed`, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np

from twinfeed.loaders.feed.collate import Collate, FieldSpec
from twinfeed.loaders.formats.records import Sample
from twinfeed.loaders.index import Index
from twinfeed.loaders.reading.side_table import ByRecord, ViewRows
from twinfeed.loaders.reading.source import Source
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.samplers import BatchStream
from twinfeed.samplers.validate import a_type, counted

Batch = dict[str, Any]
"""The fields of a batch by name, as a loop receives them."""

Decode = Callable[[Sample], Mapping[str, Any]]
"""A function from a sample to a sample: `decode=` and `transform=`."""

BatchTransform = Callable[[Batch, int], Mapping[str, Any]]
"""A function from a batch and its seed to a batch: `batch_transform=`."""

TRANSFORM_EXTRAS = ("id", "record", "view", "seed", "seed32")
"""Keys that the loader adds to the sample that a transform gets. They are not in the batch."""


def check_collated(index: Source, collate: Collate, names: Iterable[str], /) -> None:
    """Raise ValueError if the `collate` argument of a feed names a field that is not in `names`."""
    unknown = set(collate).difference(names) if isinstance(collate, Mapping) else ()
    if unknown:
        advice = column_advice(index, unknown)
        raise ValueError(f"collate names {sorted(unknown)}, the fields are {sorted(names)}{advice}")


def check_side_table(name: str, rows: Any, index: Source, sampler: BatchStream, /) -> None:
    """Raise ValueError unless a side table has a row for each sample id, or for each record."""
    if isinstance(rows, ViewRows):
        _check_views(name, np.diff(rows.starts), index, sampler)
        return
    expected, unit = sampler.num_ids, "sample id"
    if isinstance(rows, ByRecord):
        rows, expected, unit = rows.table, sampler.num_records, "record"
    if len(rows) != expected:
        raise ValueError(
            f"side table {name!r} has {counted(len(rows), 'row')}, the sampler "
            f"{counted(expected, unit)}: give it a row for each of these; a table with a row "
            f"for each record is ByRecord(table)"
        )


def _check_views(name: str, counts: Int64s, index: Source, sampler: BatchStream) -> None:
    """Raise ValueError unless each row that a record has in a side table is a view of it."""
    views = np.bincount(sampler.records(np.arange(sampler.num_ids)), minlength=len(counts))
    for record in np.flatnonzero(views != counts)[:1].tolist():
        raise ValueError(
            f"{index.describe(record)} has {counted(int(counts[record]), 'row')} in side table "
            f"{name!r}, and the sampler draws {counted(int(views[record]), 'view')}: "
            "ViewSampler(sampler, table.counts(index), …) draws each row"
        )


def stored_fields(index: Source, fields: Iterable[str], /) -> list[str]:
    """Return the names of the fields that are read from shards; columns are in memory."""
    return [name for name in fields if name not in index.columns]


def check_fields(index: Source, fields: Iterable[str], /) -> None:
    """Raise KeyError if a source does not have one of the fields that a feed reads."""
    stored, columns = list(index.fields), list(index.columns)
    for name in fields:
        if name not in stored and name not in columns:
            raise KeyError(f"no field {name!r}: the fields are {stored}, the columns {columns}")


def column_advice(index: Source, names: Iterable[Any], /) -> str:
    """Return text to add to a message about fields, if one of them is a column, or ""."""
    for name in names:
        if isinstance(name, str) and name in index.columns:
            lists = f", or build the index with lists=[{name!r}]" * isinstance(index, Index)
            return f"; {name!r} is a column: `transform=` gets it{lists}"
    return ""


def check_batches(sampler: BatchStream, /) -> None:
    """Raise TypeError unless an object is a sampler of batches."""
    if not isinstance(sampler, BatchStream):
        advice = "BatchSampler(sampler, batch_size=…) makes batches of a sampler's ids"
        raise TypeError(f"sampler must give batches, got {a_type(sampler)}: {advice}")


def check_fit(index: Source, sampler: BatchStream, /) -> None:
    """Check that a sampler can draw the records of an index."""
    check_batches(sampler)
    if sampler.num_records != len(index):
        kind = "index" if isinstance(index, Index) else "dataset"
        raise ValueError(
            f"the sampler was made for {counted(sampler.num_records, 'record')}, "
            f"the {kind} has {len(index):,}: make the sampler with this number or with their "
            f"labels; to draw only some, give records= or SubsetSampler(ids, of={len(index)})"
        )


def check_spec(argument: str, spec: Mapping[str, FieldSpec] | None, /) -> dict[str, FieldSpec]:
    """Return the specs of fields by name; raise TypeError unless each is a (shape, dtype)."""
    return {
        name: _field_spec(name, field) for name, field in checks.mapping(argument, spec).items()
    }


def _field_spec(name: str, spec: object) -> FieldSpec:
    """Return the user's spec of a field, (shape, dtype), as a `FieldSpec`; raise TypeError for
    another.
    """
    try:
        shape, dtype = cast(tuple[Any, Any], spec)
        # A `FieldSpec` of byte strings has the dtype None.
        dtype = None if dtype is None or dtype is bytes else np.dtype(dtype)
        return FieldSpec(tuple(shape), dtype)
    except (TypeError, ValueError) as error:
        example = "FieldSpec((224, 224, 3), np.uint8)"
        raise TypeError(f"spec of {name!r} must be like {example}, got {spec!r}") from error
