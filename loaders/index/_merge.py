"""Merge the parts of all shards into the arrays of one index."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from twinfeed.loaders._checks import Array
from twinfeed.loaders.errors import ShardWarning
from twinfeed.loaders.index._digests import content_digests
from twinfeed.loaders.index._numbering import Labels, check_range, encode, join_labels, label_column
from twinfeed.loaders.index._parts import ShardPart
from twinfeed.loaders.index._store import write_store
from twinfeed.loaders.index._strings import StringColumn
from twinfeed.loaders.index.labels import FromTable, label_clash
from twinfeed.loaders.index.opened import ROW, SHARD
from twinfeed.loaders.limits import LIMITS
from twinfeed.samplers import ClassOrder


def write_index(
    path: Path,
    parts: Sequence[ShardPart],
    *,
    table: FromTable | None,
    classes: Sequence[str] | None,
) -> None:
    """Write the index of `parts`, in their order, to the folder `path`."""
    options = parts[0].options
    background = options.background
    if table is not None and options.missing == "skip" and background is None:
        parts = [_labelled(part, table) for part in parts]
    _check_empty(parts)
    _check_lists(parts)
    columns, tables = _features(parts)
    keys = _keys(parts)
    names = list(classes or ())
    options = replace(
        options,
        label_from="table" if table is not None else options.label_from,
        classes_given=bool(names),
        left_out=sum(part.excluded + part.lacking for part in parts),
        broken=sum(part.broken for part in parts),
    )
    labels = _labels(parts, table, keys, background is not None)
    if labels is not None:
        columns["label"], names = label_column(
            labels,
            classes=classes,
            background=background,
            from_text=options.label_from in ("field", "table"),
        )
    elif names:
        columns["label"] = check_range(columns.get("label"), names)
    arrays = {"shards": _shards(parts)}
    arrays |= StringColumn.of(part.path for part in parts).arrays("shardpaths")
    if any(part.files for part in parts):
        arrays |= StringColumn.of(file for part in parts for file in part.files).arrays("files")
    if keys is not None:
        arrays |= keys.arrays("keys")
    arrays |= {f"field-{n}": array for n, array in enumerate(tables.values())}
    arrays |= {f"column-{n}": array for n, array in enumerate(columns.values())}
    order = _class_order(columns.get("label"))
    if order is not None:
        arrays |= {
            "classorder-records": order.records,
            "classorder-starts": order.starts,
            "classorder-sizes": order.sizes,
        }
    kinds = {name: _kind(name, parts) for name in tables}
    facts = {
        "container": options.container,
        "records": sum(part.records for part in parts),
        "classes": names,
        "columns": list(columns),
        "fields": [
            {"name": name, "kind": kinds[name], "missing": int((array["length"] < 0).sum())}
            for name, array in tables.items()
        ],
        "digests": content_digests(kinds, tables, columns),
        "class_order": order and order.digest,
    }
    write_store(path, arrays, facts, options.facts())


def _class_order(labels: Array | None) -> ClassOrder | None:
    """Return the records sorted by class, where each has one integer for its label."""
    if labels is None or labels.ndim > 1 or labels.dtype.kind != "i":
        return None
    return ClassOrder(labels)


def mixed_fields(parts: Sequence[ShardPart]) -> frozenset[str]:
    """Name the bytes features that have one value a record in some parts and lists in others."""
    kinds: dict[str, set[str]] = {}
    for part in parts:
        for name, kind in part.kinds.items():
            kinds.setdefault(name, set()).add(kind)
    clashes = {name: found for name, found in kinds.items() if len(found) > 1}
    for name, found in clashes.items():
        if found != {"bytes", "bytes_list"}:
            raise ValueError(
                f"feature {name!r} is {' in some shards and '.join(sorted(found))} in others"
            )
    return frozenset(clashes)


def _labelled(part: ShardPart, table: FromTable) -> ShardPart:
    """Return a part without the records that a label table lacks."""
    keys = [] if part.keys is None else part.keys.tolist()
    return part.only(np.flatnonzero([key in table.labels for key in keys]))


def _check_empty(parts: Sequence[ShardPart]) -> None:
    """Refuse a set without a record, and warn of a shard without one."""
    empty = [part.path for part in parts if not part.records]
    if len(empty) == len(parts):
        raise ValueError(
            f"no records: all {len(parts)} shards are empty, or every record is left out"
        )
    if empty:
        warnings.warn(
            f"{len(empty)} of {len(parts)} shards have no records (first: {', '.join(empty[:5])})",
            ShardWarning,
            stacklevel=4,
        )


def _check_lists(parts: Sequence[ShardPart]) -> None:
    """Refuse to read features as lists that are not there."""
    found = {name for part in parts for name in part.kinds}
    unknown = sorted(set(parts[0].options.lists) - found)
    if unknown:
        raise ValueError(f"lists= names {unknown}, which no record has: there are {sorted(found)}")


def _features(parts: Sequence[ShardPart]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the columns and the tables of all fields, sorted by name."""
    columns, tables = {}, {}
    names = sorted({name for part in parts for name in part.kinds})
    if len(names) > LIMITS.fields:
        raise ValueError(
            f"the shards have {len(names)} different fields, more than {LIMITS.fields} "
            f"({', '.join(names[:5])}, ...): name those you want with fields="
        )
    for name in names:
        column = _column(name, parts)
        if column is not None:
            columns[name] = column
        else:
            tables[name] = _table(name, parts)
    return columns, tables


def _column(name: str, parts: Sequence[ShardPart]) -> Array | None:
    """Return a numeric feature as int64[N] or float32[N, n], None unless all records have the same
    few numbers.
    """
    arrays = [part.values.get(name) for part in parts if part.records]
    found = [array for array in arrays if array is not None]
    if len(found) < len(arrays) or len({array.shape[1] for array in found}) > 1:
        return None
    column = np.concatenate(found)
    return column[:, 0].copy() if column.shape[1] == 1 else column


def _table(name: str, parts: Sequence[ShardPart]) -> Array:
    """Return the table of a field over all parts, its files numbered through."""
    tables, files = [], 0
    for number, part in enumerate(parts):
        table = part.tables.get(name)
        if table is None:
            table = np.zeros(part.records, ROW)
            table["length"] = -1
        table["file"] += files if part.files else number
        files += len(part.files)
        tables.append(table)
    return np.concatenate(tables)


def _kind(name: str, parts: Sequence[ShardPart]) -> str:
    """Return the kind of a field."""
    return next(part.kinds[name] for part in parts if name in part.kinds)


def _keys(parts: Sequence[ShardPart]) -> StringColumn | None:
    """Return the keys of all records, None for containers without."""
    found = [part.keys for part in parts if part.keys is not None]
    return StringColumn.join(found) if found else None


def _labels(
    parts: Sequence[ShardPart], table: FromTable | None, keys: StringColumn | None, partial: bool
) -> Labels | None:
    """Return the labels of all records: the table's, or those of the parts, if they have any."""
    if table is not None:
        labels = table.match(_all_keys(keys), partial=partial)
        for part in parts:
            if "label" in part.kinds:
                raise label_clash(part.path)
        return encode(labels)
    found = [(part.path, part.labels) for part in parts if part.labels is not None]
    return join_labels(found) if found else None


def _all_keys(keys: StringColumn | None) -> list[str]:
    """Return the keys that a label table is joined by."""
    if keys is None:
        raise ValueError(
            "a label table is joined by key, and these records have none: name a feature with key="
        )
    return keys.tolist()


def _shards(parts: Sequence[ShardPart]) -> Array:
    """Return the table of shards."""
    shards = np.zeros(len(parts), SHARD)
    shards["bytes"] = [part.bytes for part in parts]
    shards["stop"] = np.cumsum([part.records for part in parts])
    shards["headers"] = [part.headers for part in parts]
    return shards
