"""Sources of labels: a field, a JSON key, a folder, a file, an Example, a table, or a function."""

from __future__ import annotations

import json
import os
import re
import reprlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import PurePosixPath
from typing import Any, ClassVar

from twinfeed.loaders.errors import DataCorruptionError, DecodeError
from twinfeed.loaders.formats.example import decode_list, locate, sample_of
from twinfeed.loaders.formats.records import Range, Record, Sample
from twinfeed.loaders.index.options import Label, LabelFrom, as_label
from twinfeed.loaders.support.csv_columns import csv_columns
from twinfeed.samplers import validate

LabelFunction = Callable[[Sample], Label | None]

_FIX_RECORD_ADVICE = (
    "repair the record, name another field or a function, such as "
    "label=lambda sample: sample['labels'][0], or leave the record out with exclude="
)
_FIX_FUNCTION_ADVICE = "correct the function, or let it return None for a record without a label"


@dataclass(frozen=True)
class _Source(ABC):
    """The base of sources that are no field and no function, whose `_value` may be a label."""

    _kind: ClassVar[LabelFrom]

    @property
    def _name(self) -> str | None:
        """The values that are not the default ones, joined by a colon."""
        values = [
            (getattr(self, member.name), member.default) for member in fields(self) if member.repr
        ]
        return ":".join(str(value) for value, default in values if value != default) or None

    @abstractmethod
    def _value(self, record: Record, shard: str, below: str) -> Any:
        """Return what may be the label of a record of a shard, with a path below the root."""


@dataclass(frozen=True)
class FromJson(_Source):
    """Take the label from a key of a JSON field; dots lead into nested objects.

    Without a key, the whole field is the label.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import build_index, pack
    >>> out = mkdtemp()
    >>> _ = pack([{"json": b'{"object": {"class": "cat"}}'}], out)
    >>> label = FromJson("json", "object.class")
    >>> build_index(f"{out}/*.tfrecord", f"{out}/cats.index", label=label).classes
    ('cat',)
    """

    _kind = "json"
    field: str
    key: str = ""

    def _value(self, record: Record, shard: str, below: str) -> Any:
        """Return the value at the path in the field; None if it is missing."""
        value = _parsed(self.field, json.loads, "JSON", record, shard)
        for key in self.key.split(".") if self.key else ():
            value = value.get(key) if isinstance(value, dict) else None
        return value


@dataclass(frozen=True)
class FromExample(_Source):
    """Take the label from a feature of a `tf.train.Example` that is read as raw bytes, whole.

    This is for `example=False` (`--raw`), where an index has one field "data", which a parse
    function of your own gets. The feature holds an integer, or a text. `field` names another field
    of bytes, such as a member of a tar.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import build_index, pack
    >>> out = mkdtemp()
    >>> _ = pack([{"image": b"...", "target": 7}], out)
    >>> label = FromExample("target")
    >>> index = build_index(f"{out}/*.tfrecord", f"{out}/x.index", label=label, example=False)
    >>> index.labels, list(index.fields)
    (array([7]), ['data'])
    """

    _kind = "example"
    feature: str
    field: str = "data"

    def _value(self, record: Record, shard: str, below: str) -> Any:
        """Return the value of the feature; None if it is missing."""
        features = _parsed(self.field, locate, "an Example", record, shard) or {}
        return _field_value(features.get(self.feature))


@dataclass(frozen=True)
class FromFolder(_Source):
    """Take the label from a folder of the path below the root: the first, or that at `level`.

    The path is a tar sample's key, a loose file's path or a TFRecord shard's. `level` counts the
    folders of the path from 0; -1 is the innermost. The root is `root=`, by default the folder that
    holds the index; of a folder of images this folder. In a tar every key begins at the root.
    Of cats/kittens/1.png, `FromFolder()` gives cats, and `FromFolder(level=-1)` kittens. A path
    with no such folder has no label.

    Raises:
        TypeError: `level` is not an integer.

    >>> from pathlib import Path
    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import build_index, pack
    >>> out = Path(mkdtemp())
    >>> _ = pack([{"word": b"meow"}], out / "cat")
    >>> build_index(out / "cat/*.tfrecord", out / "cats.index", label=FromFolder()).classes
    ('cat',)
    """

    _kind = "folder"
    level: int = 0

    def __post_init__(self) -> None:
        validate.as_int("level", self.level)

    def _value(self, record: Record, shard: str, below: str) -> str | None:
        """Return the name of the folder, or an `Entry`'s own label; None if there is none."""
        # A TFRecord usually has no key, but a shard.
        folders = [n for n in PurePosixPath(record.key or below).parent.parts if n != "/"]
        found = folders[self.level] if -len(folders) <= self.level < len(folders) else None
        return (record.label if self.level == 0 else None) or found


@dataclass(frozen=True)
class FromFile(_Source):
    r"""Take the label from the name of a loose file, or of a TFRecord or tar shard: a class file.

    `pattern` is a regular expression with one group, which is searched for anywhere in the name.
    What the group matches is the label. A file whose name does not match has no label.

    Raises:
        ValueError: not a regular expression, or one that does not have exactly one group.

    >>> from tempfile import mkdtemp
    >>> from twinfeed import TFRecordWriter, build_index
    >>> out = mkdtemp()
    >>> for number in (4, 17):
    ...     with TFRecordWriter(f"{out}/class_{number}.tfrecord") as writer:
    ...         writer.write(b"a record")
    >>> label = FromFile(r"class_(\d+)")
    >>> build_index(f"{out}/*.tfrecord", f"{out}/all.index", label=label, example=False).labels
    array([17,  4])
    """

    _kind = "file"
    pattern: str

    def __post_init__(self) -> None:
        with suppress(re.error):
            if isinstance(self.pattern, str) and re.compile(self.pattern).groups == 1:
                return
        raise ValueError(
            "pattern must be a regular expression with one group, the label, such as "
            f"r'class_(\\d+)', got {self.pattern!r}: write (?:…) for other groups"
        )

    def _value(self, record: Record, shard: str, below: str) -> str | None:
        """Return what the group matches; None if it matches nothing."""
        file = record.paths[0] if record.paths else shard
        match = re.search(self.pattern, PurePosixPath(file).name)
        return (match[1] or None) if match else None


@dataclass(frozen=True)
class FromTable(_Source):
    """Take the label from a table: a mapping of keys to labels, or a CSV or TSV file.

    - A file begins with a line that names the columns, and each row has as many cells. The columns
      called `key` and `label` are taken. A row without a label, also as "nan", is refused.
    - A record that is not in the table has no label. Rows without a record, and keys that several
      records have, are refused.

    >>> FromTable({"a": "cat", "b": "dog"}).labels["b"]
    'dog'
    """

    _kind = "table"
    table: Mapping[str, Label] | str | os.PathLike[str] = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.table, Mapping | str | os.PathLike):
            raise TypeError(
                "table must be a dict of labels by key or the path of a CSV file, got "
                f"{validate.a_type(self.table)}: a Series becomes a dict by to_dict()"
            )

    @cached_property
    def labels(self) -> Mapping[str, Any]:
        """The labels by key."""
        if isinstance(self.table, Mapping):
            labels: Mapping[str, Any] = self.table
        else:
            stat = os.stat(self.table)
            labels = _read_table(os.fspath(self.table), stat.st_size, stat.st_mtime_ns)
        # None would count as a record that is not in the table.
        self._refuse([key for key, label in labels.items() if label is None], "rows have no label")
        return labels

    def __reduce__(self) -> tuple[Any, ...]:
        return FromTable, (self.table,)  # without the labels of a file

    def _value(self, record: Record, shard: str, below: str) -> Any:
        return None if record.key is None else self.labels.get(record.key)

    def check(self, keys: Sequence[str], /) -> None:
        """Raise ValueError if several records have one key, or a row of the table has no record."""
        known = set(keys)
        self._refuse(_duplicates(keys), "keys occur in several records")
        self._refuse([key for key in self.labels if key not in known], "rows have no record")

    def _refuse(self, bad: Sequence[str], problem: str) -> None:
        """Raise ValueError if there are bad keys."""
        if bad:
            table = "the label table" if isinstance(self.table, Mapping) else self.table
            raise ValueError(f"{table}: {len(bad)} {problem}, as {bad[:5]}")


LabelSource = str | FromJson | FromExample | FromFolder | FromFile | FromTable | LabelFunction


def label_of(source: LabelSource, record: Record, shard: str, below: str) -> Label | None:
    """Return the label of a record, an int or a str, or None; an error for a value that is no
    label.

    `shard` is the path of the shard, and `below` its path below the root.
    """
    if isinstance(source, str):
        value = _field_value(record.fields.get(source))
    elif isinstance(source, _Source):
        value = source._value(record, shard, below)
    else:
        value = _call_function(source, record, shard)
    if value is None:
        return None
    label = as_label(value.strip() if isinstance(value, str) else value)
    if label is None:
        error_class = DecodeError if callable(source) else DataCorruptionError
        advice = _FIX_FUNCTION_ADVICE if callable(source) else _FIX_RECORD_ADVICE
        if isinstance(source, str | FromJson) and isinstance(value, dict):
            advice = "it is a JSON object: name one of its keys with FromJson (--label-json)"
        raise error_class(
            f"{label_source_text(source)} gives a value that is not a label",
            **location_of(record, shard),
            expected="an int64, or UTF-8 text that is not empty",
            found=reprlib.repr(value),
            advice=advice,
        )
    return label


def key_of(name: str, record: Record, shard: str, /) -> str:
    """Return the key of a record, which is the value of the bytes feature `name`, as text."""
    field = record.fields.get(name)
    if field is None or field.kind != "bytes":
        problem = f"the bytes feature {name!r} of key="
        advice = "name another feature" + (", such as 'key'" if "key" in record.fields else "")
        raise missing_error(problem, record, shard, advice)
    return field.data.decode("utf-8", "surrogateescape")


def missing_error(item: str, record: Record, shard: str, advice: str, /) -> DataCorruptionError:
    """Return the error for a record that lacks an item, such as "the field 'jpg'"."""
    found = f"the fields {reprlib.repr(sorted(record.fields))}"
    where = location_of(record, shard)
    return DataCorruptionError(f"a record lacks {item}", **where, found=found, advice=advice)


def label_source(label: LabelSource | None, /) -> tuple[LabelFrom | None, str | None]:
    """Return the kind and the name of a source of labels, such as ("json", "json:class")."""
    if label is None or isinstance(label, str):
        return (None if label is None else "field"), label
    if isinstance(label, _Source):
        return label._kind, label._name
    if callable(label) and not isinstance(label, type):
        return "function", None
    raise TypeError(
        "label must be a field's name, FromJson(...), FromFolder(), FromFile(...), FromTable(...), "
        f"FromExample(...) or a function, got {label!r}"
    )


def label_source_text(source: LabelSource, /) -> str:
    """Return the name of a source of labels for messages, with the command-line option for it."""
    if isinstance(source, _Source):
        return f"label={source!r} (--label-{source._kind})"
    return f"label={source!r} (--label)" if isinstance(source, str) else "the function of label="


def label_field_error(where: str, /) -> ValueError:
    """Return the error for a field that is called like the column "label", and is not it."""
    return ValueError(
        f"a field of {where} is called 'label' like the column of the labels: list all fields to "
        "index, with another name for this one, as in fields={'text': 'label'} (--field text=label)"
    )


def location_of(record: Record, shard: str, field: Range | None = None) -> dict[str, Any]:
    """Return the path, offset, number and key of a record, or of its field, for an error."""
    path = shard
    offset: int | None = (field or record).offset
    if record.paths:  # loose files
        path, offset = record.paths[field.file_number if field else 0], None
    return {"path": path, "offset": offset, "record": record.number, "key": record.key}


def _field_value(field: Range | None) -> Any:
    """Return the value of a field: text, a number, or else a dict or list, to be refused."""
    if field is None:
        return None
    if field.kind == "bytes":
        text = field.data.decode("utf-8", "surrogateescape").strip()
        if text.startswith("{"):
            with suppress(ValueError, RecursionError):  # not JSON, but a label such as "{cat}"
                return json.loads(text)
        return text
    values = decode_list(field.kind, field.data)
    return values[0] if field.kind != "bytes_list" and len(values) == 1 else values


def _parsed(name: str, parse: Callable[[Any], Any], kind: str, record: Record, shard: str) -> Any:
    """Return the parsed bytes of a field; None if it is missing."""
    field = record.fields.get(name)
    try:
        return None if field is None else parse(field.data)
    except (ValueError, RecursionError) as error:  # a DataCorruptionError has a `problem`
        problem = f"field {name!r} is not {kind}: {getattr(error, 'problem', error)}"
        where = location_of(record, shard, field)
        raise DataCorruptionError(problem, **where, advice=_FIX_RECORD_ADVICE) from None


def _call_function(function: LabelFunction, record: Record, shard: str) -> Any:
    """Return the label that the user's function returns for a record."""
    sample: Sample = {"__key__": record.key, "__shard__": shard, "__number__": record.number}
    try:
        return function(sample | sample_of(record))
    except Exception as error:
        problem = f"the function of label= failed: {type(error).__name__}: {error}"
        where = location_of(record, shard)
        raise DecodeError(problem, **where, advice=_FIX_FUNCTION_ADVICE) from error


def _duplicates(items: Iterable[str]) -> list[str]:
    """Return the items that occur more than once, each once."""
    return [item for item, count in Counter(items).items() if count > 1]


@lru_cache(maxsize=1)
def _read_table(path: str, size: int, time: int) -> dict[str, str | None]:
    """Return the labels of a file by key; a process reads an unchanged file once."""
    stored = csv_columns(path)
    names = [name.strip().lower() for name in stored]
    if names.count("key") != 1 or names.count("label") != 1:
        found = [*stored][:8]
        raise ValueError(f"{path} must begin with names of columns, key and label, got {found}")
    columns = dict(zip(names, stored.values(), strict=True))
    keys, labels = ([cell.strip() for cell in columns[name]] for name in ("key", "label"))
    if twice := _duplicates(keys):
        raise ValueError(f"{path}: {len(twice)} keys occur twice, as {twice[:5]}")
    missing = dict.fromkeys(("", "nan"))
    return {key: missing.get(label, label) for key, label in zip(keys, labels, strict=True)}
