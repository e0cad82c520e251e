"""Merge the parts of all shards into the arrays of one index."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.errors import ShardWarning
from twinfeed.loaders.index.collect import encode_labels
from twinfeed.loaders.index.labels import FromTable, Label
from twinfeed.loaders.index.parts import ShardPart
from twinfeed.loaders.index.store import write_store
from twinfeed.loaders.index.strings import StringColumn
from twinfeed.loaders.index.table import ROW, SHARD

Array = npt.NDArray[Any]


def write_index(
    path: Path,
    parts: Sequence[ShardPart],
    *,
    table: FromTable | None,
    classes: Sequence[str] | None,
) -> None:
    """Write the index of `parts`, in their order, to the folder `path`."""
    options = parts[0].options
    background, skip = options["background"], options["missing"] == "skip"
    if table is not None and skip and background is None:
        parts = [_labelled(part, table) for part in parts]
    _check_empty(parts)
    columns, tables = _features(parts)
    keys = _keys(parts)
    names = list(classes or ())
    options = options | {"classes_given": bool(names)}
    if table is not None:
        options = options | {"label_from": "table"}
        labels = table.match(_all_keys(keys), background=background)
        encoded = encode_labels(labels, "the table")
        columns["label"], names = _classes(*encoded, classes, from_text=True)
    elif any(part.labels is not None for part in parts):
        from_text = options["label_from"] == "field"
        columns["label"], names = _classes(*_labels(parts), classes, from_text=from_text)
    elif names:
        columns["label"] = _numbered(columns.get("label"), names)
    arrays = {"shards": _shards(parts)}
    arrays |= StringColumn.of(part.path for part in parts).arrays("shardpaths")
    if any(part.files for part in parts):
        arrays |= StringColumn.of(file for part in parts for file in part.files).arrays("files")
    if keys is not None:
        arrays |= keys.arrays("keys")
    arrays |= {f"field-{n}": array for n, array in enumerate(tables.values())}
    arrays |= {f"column-{n}": array for n, array in enumerate(columns.values())}
    facts = {
        "container": options["container"],
        "records": sum(part.records for part in parts),
        "classes": names,
        "columns": list(columns),
        "fields": [
            {"name": name, "kind": _kind(name, parts), "missing": int((array["length"] < 0).sum())}
            for name, array in tables.items()
        ],
    }
    left_out = sum(part.excluded + part.lacking for part in parts)
    broken = sum(part.broken for part in parts)
    write_store(path, arrays, facts, options | {"left_out": left_out, "broken": broken})


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


def _features(parts: Sequence[ShardPart]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the columns and the tables of all fields, sorted by name."""
    columns, tables = {}, {}
    for name in sorted({name for part in parts for name in part.kinds}):
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


def _labels(parts: Sequence[ShardPart]) -> tuple[Array, list[str] | None]:
    """Return the labels of all parts, and the sorted list of names they number, if any."""
    parts = [part for part in parts if part.records]
    named = [part for part in parts if part.classes is not None]
    if named and len(named) < len(parts):
        other = next(part.path for part in parts if part.classes is None)
        raise ValueError(f"labels are names in {named[0].path} and integers in {other}")
    names = sorted({name for part in named for name in part.classes or ()})
    number = {name: n for n, name in enumerate(names)}
    labels = []
    for part in parts:
        assert part.labels is not None
        if part.classes is None:
            labels.append(part.labels)
        else:
            labels.append(np.array([number[name] for name in part.classes], np.int64)[part.labels])
    return np.concatenate(labels), names if named else None


def _classes(
    labels: Array, found: list[str] | None, wanted: Sequence[str] | None, *, from_text: bool
) -> tuple[Array, list[str]]:
    """Return the labels as numbers, and the names of the classes.

    Text that is a plain decimal integer in every record is a number, unless `wanted` lists it as a
    name.
    """
    if found is not None and wanted is not None and set(found) <= set(wanted):
        place = {name: n for n, name in enumerate(wanted)}
        return np.array([place[name] for name in found], np.int64)[labels], list(wanted)
    if found is not None and from_text and all(_is_integer(name) for name in found):
        labels, found = np.array([int(name) for name in found], np.int64)[labels], None
    if found is None:
        return _numbered(labels, wanted or ()), list(wanted or ())
    if wanted is not None:
        unknown = sorted(set(found) - set(wanted))
        raise ValueError(f"{len(unknown)} labels are not among classes= (first: {unknown[:5]})")
    return labels, found


def _is_integer(name: str) -> bool:
    """Tell whether text is an integer as Python writes it."""
    try:
        return str(int(name)) == name and abs(int(name)) < 2**63
    except ValueError:
        return False


def _numbered(labels: Array | None, names: Sequence[Label]) -> Array:
    """Return labels that are numbers of `names`, checked."""
    if labels is None or labels.ndim != 1 or labels.dtype.kind != "i":
        raise ValueError(
            "classes= names integer labels, and there are none: say where they are with label="
        )
    if names and len(labels):
        outside = labels[(labels < 0) | (labels >= len(names))]
        if len(outside):
            raise ValueError(
                f"{len(outside)} labels lie outside the {len(names)} classes= "
                f"(first: {outside[:5].tolist()})"
            )
    return labels
