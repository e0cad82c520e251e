"""The checked arguments of a `Feed`, as an immutable dataclass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from twinfeed.loaders.feed.collate import Collate, FieldSpec, mode_of
from twinfeed.loaders.formats.records import Sample
from twinfeed.loaders.index import Index
from twinfeed.loaders.reading.side_table import ByRecord, ViewRows
from twinfeed.loaders.reading.source import Source
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.samplers import BatchStream
from twinfeed.samplers.validate import counted

Batch = dict[str, Any]
"""The fields of a batch by name, as a loop receives them."""

Decode = Callable[[Sample], Mapping[str, Any]]
"""A function from a sample to a sample: `decode=` and `transform=`."""

BatchTransform = Callable[[Batch, int], Mapping[str, Any]]
"""A function from a batch and its seed to a batch: `batch_transform=`."""

TRANSFORM_EXTRAS = ("id", "record", "view", "seed", "seed32")
"""Keys that the loader adds to the sample that a transform gets. They are not in the batch."""


@dataclass(frozen=True, eq=False, repr=False)
class FeedConfig:
    """The arguments of a `Feed` without its methods, for the code that makes batches."""

    index: Source
    sampler: BatchStream
    fields: tuple[str, ...]
    decode: Decode | None
    transform: Decode | None
    batch_transform: BatchTransform | None
    _collate: Collate
    _side: dict[str, Any]
    _missing: dict[str, Any]
    declared_spec: dict[str, FieldSpec] | None
    declared_batch_spec: dict[str, FieldSpec]

    def __post_init__(self) -> None:
        """Check that the arguments fit together; raise TypeError or ValueError if not."""
        for name in ("decode", "transform", "batch_transform"):
            function = getattr(self, name)
            if function is not None and (not callable(function) or _is_class(function)):
                what = "a batch and its seed" if name == "batch_transform" else "a sample"
                advice = ": call it" if _is_class(function) else ""
                raise TypeError(f"{name} must be a function of {what}, got {function!r}{advice}")
        if self.declared_batch_spec and self.batch_transform is None:
            raise ValueError(
                "batch_spec describes the result of batch_transform: give spec= instead"
            )
        columns = self.index.columns
        check_names(self, "column", columns, "build the index with fields= that leave it out")
        check_names(self, "side table", self.side, "give it another name")
        use, advice = "the name of a column of the index", "give the table another name in side="
        check_unreserved("side table", self.side, columns, use, advice)
        for name, rows in self.side.items():
            self._check_side_table(name, rows)
        if self.decode is None and self.transform is None:
            self._check_stored_fields()
        if self.decode is None:
            advice = "leave it out with fields=, or give it another name in decode"
            check_names(self, "field", self.fields, advice, side=self.side)

    @property
    def collate(self) -> Collate:
        """The collation of samples into a batch: a mode, or the mode of each field by name."""
        how = self._collate
        return MappingProxyType(how) if isinstance(how, dict) else how

    @property
    def missing(self) -> Mapping[str, Any]:
        """The values of fields for the records that lack them."""
        return MappingProxyType(self._missing)

    @property
    def side(self) -> Mapping[str, Any]:
        """The side tables by name: numbers as they were given, strings packed."""
        return MappingProxyType(self._side)

    @property
    def shares_arrays(self) -> bool:
        """Whether several samples may use one decoded array, which is then read-only."""
        has_views = self.sampler.num_ids != self.sampler.num_records
        traits = self.sampler.traits
        return traits.max_cached is not None or has_views or traits.repeats

    @property
    def has_functions(self) -> bool:
        """Whether the feed has a decode, transform or batch_transform, worth running on threads."""
        return (self.decode, self.transform, self.batch_transform) != (None, None, None)

    @property
    def seeded(self) -> bool:
        """Whether the samples' seeds are needed: only a transform uses seeds."""
        return self.transform is not None

    @property
    def sets_global_state(self) -> bool:
        """Whether the transform sets global random states, so that no other thread may run then."""
        return bool(getattr(self.transform, "sets_global_state", False))

    def _check_stored_fields(self) -> None:
        """Raise ValueError if the stored fields cannot be collated, or `spec` has others.

        This is for feeds without decode and transform, whose batches have the stored fields.
        """
        stored = self.index.fields if isinstance(self.index, Index) else {}
        for name in sorted(stored.keys() & stored_fields(self)):
            if stored[name].kind == "bytes_list" and mode_of(self._collate, name) != "ragged":
                advice = "collate it with 'ragged', or leave it out with fields="
                raise ValueError(f"field {name!r} holds lists of byte strings: {advice}")
        check_collated(self, self.fields)
        if self.declared_spec is not None and self.declared_spec.keys() != set(self.fields):
            found, expected = list(self.declared_spec), list(self.fields)
            raise ValueError(f"spec has the fields {found}, but the feed reads {expected}")

    def _check_side_table(self, name: str, rows: Any) -> None:
        """Raise ValueError unless a side table has a row for each sample id, or for each record."""
        if isinstance(rows, ViewRows):
            self._check_views(name, np.diff(rows.starts))
            return
        expected, unit = self.sampler.num_ids, "sample id"
        if isinstance(rows, ByRecord):
            rows, expected, unit = rows.table, self.sampler.num_records, "record"
        if len(rows) != expected:
            raise ValueError(
                f"side table {name!r} has {counted(len(rows), 'row')}, the sampler "
                f"{counted(expected, unit)}: give it a row for each of these; a table with a row "
                f"for each record is ByRecord(table)"
            )

    def _check_views(self, name: str, counts: Int64s) -> None:
        """Raise ValueError unless each row that a record has in a side table is a view of it."""
        ids = np.arange(self.sampler.num_ids)
        views = np.bincount(self.sampler.records(ids), minlength=len(counts))
        for record in np.flatnonzero(views != counts)[:1].tolist():
            raise ValueError(
                f"{self.index.describe(record)} has {counted(int(counts[record]), 'row')} in side "
                f"table {name!r}, and the sampler draws {counted(int(views[record]), 'view')}: "
                "ViewSampler(sampler, table.counts(index), …) draws each row"
            )


def check_collated(feed: FeedConfig, names: Iterable[str], /) -> None:
    """Raise ValueError if the `collate` argument of a feed names a field that is not in `names`."""
    unknown = set(feed.collate).difference(names) if isinstance(feed.collate, Mapping) else ()
    if unknown:
        advice = column_advice(feed.index, unknown)
        raise ValueError(f"collate names {sorted(unknown)}, the fields are {sorted(names)}{advice}")


def check_names(
    feed: FeedConfig, kind: str, names: Iterable[str], advice: str, /, *, side: Iterable[str] = ()
) -> None:
    """Raise ValueError if a user's name is taken already: by a side table, or by the loader.

    The loader adds "id" and, with padding, "mask" to a batch. A transform gets a sample with the
    names in `TRANSFORM_EXTRAS`: "id", "record", "view", "seed" and "seed32".

    Args:
        feed: says whether there are a transform and padding.
        kind: "field", "column" or "side table": what the user calls by these names.
        names: the names to check.
        advice: what the user can do, as the end of the message.
        side: names of side tables, which are taken.
    """
    check_unreserved(kind, names, side, "the name of a side table", advice)
    owner = "batch" if feed.transform is None else "sample"
    # `TRANSFORM_EXTRAS` has "id" too, which the loader adds to a batch in any case.
    reserved = {"id"} if feed.transform is None else {*TRANSFORM_EXTRAS}
    if feed.sampler.traits.padded:
        reserved.add("mask")
    use = f"a name that the loader itself gives to every {owner}"
    check_unreserved(kind, names, reserved, use, advice)


def check_unreserved(
    kind: str, names: Iterable[str], reserved: Iterable[str], use: str, advice: str, /
) -> None:
    """Raise ValueError if one of the names is in `reserved`.

    Args:
        kind: what the names are of, for the message, such as "field".
        names: the names to check.
        reserved: the names that are taken.
        use: what they are taken for, such as "the name of a side table". The message says, for
            example: "field 'x' has the name of a side table: give it another name in decode".
        advice: the end of the message: "give it another name in decode".
    """
    conflicts = set(names).intersection(reserved)
    if conflicts:
        raise ValueError(f"{kind} {min(conflicts)!r} has {use}: {advice}")


def stored_fields(feed: FeedConfig, /) -> list[str]:
    """Return the names of the feed's fields that are read from shards; columns are in memory."""
    return [name for name in feed.fields if name not in feed.index.columns]


def check_fields(index: Source, fields: Iterable[str], decode: Decode | None, /) -> None:
    """Check the names of the fields that a feed reads.

    Raises:
        KeyError: the index does not have a field of this name, or decode needs another field
            (`decode.reads`).
    """
    stored, columns = list(index.fields), list(index.columns)
    for name in fields:
        if name not in stored and name not in columns:
            raise KeyError(f"no field {name!r}: the fields are {stored}, the columns {columns}")
    for name in getattr(decode, "reads", ()):
        if name not in fields:
            example = next(iter(fields), "jpg")
            raise KeyError(
                f"decode reads the field {name!r}, but the feed reads {list(fields)}: give decode "
                f"one of these names, as in DecodeImage({example!r}){column_advice(index, [name])}"
            )


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
        raise TypeError(f"sampler must give batches, got a {type(sampler).__name__}: {advice}")


def check_fit(index: Source, sampler: BatchStream, /) -> None:
    """Check that a sampler can draw the records of an index.

    Raises:
        TypeError: it is not a sampler of batches.
        ValueError: it was made for another number of records.
    """
    check_batches(sampler)
    if sampler.num_records != len(index):
        kind = "index" if isinstance(index, Index) else "dataset"
        raise ValueError(
            f"the sampler was made for {counted(sampler.num_records, 'record')}, "
            f"the {kind} has {len(index):,}: make the sampler with this number or with their "
            f"labels; to draw only some, give records= or SubsetSampler(ids, of={len(index)})"
        )


def check_spec(argument: str, spec: Mapping[str, FieldSpec] | None, /) -> dict[str, FieldSpec]:
    """Return the specs of fields by name; raise TypeError unless each is a (shape, dtype).

    `argument` is the name of the user's argument.
    """
    return {
        name: _field_spec(name, field) for name, field in checks.mapping(argument, spec).items()
    }


def _field_spec(name: str, spec: object) -> FieldSpec:
    """Return the user's spec of a field, (shape, dtype), as a `FieldSpec`.

    Raises:
        TypeError: it is something else, or the dtype is not one of numpy's.
    """
    try:
        shape, dtype = cast(tuple[Any, Any], spec)
        # A `FieldSpec` of byte strings has the dtype None.
        dtype = None if dtype is None or dtype is bytes else np.dtype(dtype)
        return FieldSpec(tuple(shape), dtype)
    except (TypeError, ValueError) as error:
        example = "FieldSpec((224, 224, 3), np.uint8)"
        raise TypeError(f"spec of {name!r} must be like {example}, got {spec!r}") from error


def _is_class(function: object) -> bool:
    """Return whether a "function" is a class with `__call__`: DecodeImage, not DecodeImage()."""
    return isinstance(function, type) and any("__call__" in vars(base) for base in function.__mro__)
