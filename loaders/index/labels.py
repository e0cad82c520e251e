"""Where labels come from: a field, a JSON key, the folder, a table, or the caller's function."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from twinfeed.loaders.errors import DataCorruptionError
from twinfeed.loaders.formats.example import decode_list
from twinfeed.loaders.formats.records import Record

Label = int | str
Sample = dict[str, Any]
LabelFunction = Callable[[Sample], Label | None]


@dataclass(frozen=True)
class FromJson:
    """Take the label from a key of a JSON field; dots lead into nested objects. Without a key it is
    the whole field: a number then is a number, even where `classes` has a name that looks like it.

    >>> FromJson("json", "object.class")
    FromJson(field='json', key='object.class')
    """

    field: str
    key: str = ""


@dataclass(frozen=True)
class FromFolder:
    """Take the label from the folder: of the file, of a tar sample's key, of a TFRecord shard.

    >>> FromFolder()
    FromFolder()
    """


class FromTable:
    """Take the labels from a table of keys and labels: a mapping, or a CSV or TSV file of two
    columns.

    A file may begin with a line of names; then the columns `key` and `label` are meant, wherever
    they stand. The table must have exactly the records' keys: a key too many, too few or twice is
    refused. Records that it lacks may have a `background`, or be left out with `missing="skip"`.

    >>> FromTable({"a": "cat", "b": "dog"}).labels["b"]
    'dog'
    """

    def __init__(self, table: Mapping[str, Label] | str | os.PathLike[str], /) -> None:
        self.labels: dict[str, Label] = (
            dict(table) if isinstance(table, Mapping) else _read_table(os.fspath(table))
        )

    def match(self, keys: Iterable[str], /, *, background: Label | None = None) -> list[Label]:
        """Return the labels of `keys`, `background` for one that is not in the table; raise
        ValueError with counts and the first five where the two do not match.
        """
        keys = list(keys)
        known = set(keys)
        found = {
            "records have the key of another": _twice(keys),
            "records are not in the table": (
                [key for key in keys if key not in self.labels] if background is None else []
            ),
            "rows of the table have no record": [key for key in self.labels if key not in known],
            "labels are not a name or an integer": [
                key for key, label in self.labels.items() if _bad(label)
            ],
        }
        problems = [
            f"{len(bad)} {what} (first: {', '.join(map(repr, bad[:5]))})"
            for what, bad in found.items()
            if bad
        ]
        if found["records are not in the table"]:
            problems.append("give these a background=, or leave them out with missing='skip'")
        if problems:
            raise ValueError(
                f"the label table does not match the {len(keys)} records: {'; '.join(problems)}"
            )
        labels = [self.labels.get(key, background) for key in keys]
        return [label for label in labels if label is not None]  # none is, by now


RecordLabel = str | FromJson | FromFolder | LabelFunction
LabelSource = RecordLabel | FromTable


def label_of(source: RecordLabel, record: Record, shard: str) -> Label | None:
    """Return the label of one record, None if it has none; a table's are joined later, by key."""
    if isinstance(source, str):
        return _of_field(source, record)
    if isinstance(source, FromJson):
        return _of_json(source, record)
    if isinstance(source, FromFolder):
        return record.label or PurePosixPath(record.key or shard).parent.name or None
    label = source(sample_of(record, shard))
    if label is not None and _bad(label):
        raise TypeError(f"label= must return an int, a str or None, not {label!r}, {_at(record)}")
    return label


def sample_of(record: Record, shard: str) -> Sample:
    """Return a record as the dict that functions are given."""
    sample: Sample = {"__key__": record.key, "__shard__": shard, "__number__": record.number}
    for name, part in record.parts.items():
        sample[name] = part.data if part.kind == "bytes" else decode_list(part.kind, part.data)
    return sample


def _of_field(name: str, record: Record) -> Label | None:
    """Return the value of a field that holds one integer or one name."""
    part = record.parts.get(name)
    if part is None:
        return None
    if part.kind == "bytes":
        return part.data.decode("utf-8", "surrogateescape").strip()
    values = decode_list(part.kind, part.data)
    if part.kind != "int64_list" or len(values) != 1:
        raise ValueError(
            f"label={name!r} must hold one integer or one string, not {values!r}, {_at(record)}"
        )
    return int(values[0])


def _of_json(source: FromJson, record: Record) -> Label | None:
    """Return the value at a key path of a JSON field."""
    part = record.parts.get(source.field)
    if part is None:
        return None
    try:
        value = json.loads(part.data)
    except ValueError as error:
        raise DataCorruptionError(
            f"field {source.field!r} is not JSON: {error}",
            offset=part.offset,
            record=record.number,
            key=record.key,
            advice="repair the record, or leave it out with exclude=",
        ) from None
    for step in source.key.split(".") if source.key else ():
        value = value.get(step) if isinstance(value, dict) else None
    if value is not None and _bad(value):
        raise ValueError(
            f"{source} must lead to an integer or a string, not {value!r}, {_at(record)}"
        )
    label: Label | None = value
    return label


def _at(record: Record) -> str:
    """Say where a record lies."""
    return f"at record {record.number}, byte offset {record.offset}, key {record.key!r}"


def _bad(label: object) -> bool:
    """Tell what is no label: a float (NaN above all), a truth value, an empty name."""
    whole = isinstance(label, (int, np.integer)) and not isinstance(label, bool)
    return not whole and not (isinstance(label, str) and label)


def _twice(items: Iterable[str]) -> list[str]:
    """Return the items that are there a second time."""
    seen: set[str] = set()
    return [item for item in items if item in seen or seen.add(item)]  # type: ignore[func-returns-value]


def _read_table(path: str) -> dict[str, Label]:
    """Read a table of keys and labels."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = [
            row for row in csv.reader(file, delimiter="\t" if path.endswith(".tsv") else ",") if row
        ]
    places = (0, 1)
    if rows and {"key", "label"} <= set(rows[0]):
        places = rows[0].index("key"), rows[0].index("label")
        rows = rows[1:]
    short = [number for number, row in enumerate(rows, 1) if len(row) <= max(places)]
    if short:
        raise ValueError(f"{path}: {len(short)} rows lack a column, the first is row {short[0]}")
    repeated = _twice(row[places[0]] for row in rows)
    if repeated:
        raise ValueError(f"{path}: {len(repeated)} keys are there twice, first: {repeated[:5]}")
    return {row[places[0]]: _cell(row[places[1]]) for row in rows}


def _cell(text: str) -> Label:
    """Return the label in a cell; what is written as a number with a fraction, or nan, is none."""
    text = text.strip()
    try:
        number = float(text)
    except ValueError:
        return text
    return text if math.isfinite(number) and number.is_integer() else ""
