"""Scan one shard in one pass and make its part of the index."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from twinfeed.loaders._checks import Array
from twinfeed.loaders.errors import DataCorruptionError, LoaderError
from twinfeed.loaders.formats._checksum import crc32c
from twinfeed.loaders.formats.example import decode_list
from twinfeed.loaders.formats.records import Part, Record
from twinfeed.loaders.index._numbering import encode
from twinfeed.loaders.index._parts import ShardPart
from twinfeed.loaders.index._paths import below, is_url, join
from twinfeed.loaders.index._plan import Plan, add_header, scan_job
from twinfeed.loaders.index._sources import Job, local
from twinfeed.loaders.index._strings import StringColumn
from twinfeed.loaders.index.labels import (
    Label,
    RecordLabel,
    at,
    label_clash,
    label_of,
    refuse_mixed,
)
from twinfeed.loaders.index.opened import ROW
from twinfeed.loaders.limits import LIMITS

WIDEST_COLUMN = 16
"""A numeric feature of at most so many values, the same number in every record, becomes a column.
"""

KEEP_FROM = 1 << 20
"""The part of a shard of at least so many bytes is kept on disk until the index is whole."""

_MEMO = 1 << 16
_SHOWN = 8
_DOTS = "; a sample's key ends at the first dot of its members' names"


def build_part(plan: Plan, job: Job) -> ShardPart:
    """Scan one shard, in full and with every checksum, and return its part of the index."""
    if job.entries:
        return _build(plan, job, plan.root)
    if not is_url(plan.root):
        below(plan.root, job.shard)
    with local(join(plan.root, job.shard)) as path:
        try:
            return _build(plan, job, path)
        except LoaderError as error:
            error.path = join(plan.root, job.shard)
            raise


def work(plan: Plan, job: Job, file: str) -> ShardPart | None:
    """Do one job and leave its part at `file`, or return it if it is quickly built again."""
    part = build_part(plan, job)
    if part.bytes < KEEP_FROM and not job.entries:
        return part
    part.save(Path(file))
    return None


def _build(plan: Plan, job: Job, path: str) -> ShardPart:
    """Make the part, once more if a feature turns out to need reading as a list."""
    digest = plan.digest()
    while True:
        part = ShardPart(
            digest, plan.options(), job.shard, 0 if job.entries else os.stat(path).st_size
        )
        collector = _Collector(plan, part, path)
        bad: set[int | None] = set()

        def on_bad(error: DataCorruptionError, bad: set[int | None] = bad) -> None:
            if not job.without(error.record):
                raise error
            bad.add(error.record)

        try:
            for record in scan_job(plan, job, path, on_bad):
                part.headers = add_header(part.headers, record)
                if job.without(record.number):
                    bad.add(record.number)
                else:
                    collector.add(record)
        except DataCorruptionError as error:
            if job.rest is None or error.record is None or error.record < job.rest:
                raise
            bad.add(error.record)
            part.broken = True
        part.excluded = len(bad)
        if not collector.mixed:
            return collector.finish()
        plan = plan.with_lists(collector.mixed)


class _Column:
    """Collect the rows of one field over the records of a shard."""

    def __init__(self, kind: str, first: int) -> None:
        self.kind = kind
        self.first = first
        self.places: list[int] = []
        self.rows: list[tuple[int, int, int, int]] = []
        self.values: list[Array] | None = None if kind in ("bytes", "bytes_list") else []
        self.memo: dict[bytes, Array] = {}

    def add(self, place: int, part: Part, base: int) -> None:
        """Note where the field of record number `place` lies, and its value if it may become a
        column.
        """
        self.places.append(place)
        self.rows.append((part.offset, part.length, base + part.path_no, crc32c(part.data)))
        if self.values is not None:
            self.add_value(part)

    def add_value(self, part: Part) -> None:
        """Keep the numbers as long as all records have the same few."""
        assert self.values is not None
        value = self.memo.get(part.data)
        if value is None:
            value = np.asarray(decode_list(part.kind, part.data))
            if len(self.memo) < _MEMO:
                self.memo[part.data] = value
        if len(value) > WIDEST_COLUMN or (self.values and len(value) != len(self.values[0])):
            self.values = None
        else:
            self.values.append(value)

    def table(self, records: int) -> Array:
        """Return the table of the field: a row a record, length -1 where a record lacks it."""
        table = np.zeros(records, ROW)
        table["length"] = -1
        table[np.array(self.places, np.int64)] = np.array(self.rows, ROW)
        return table


def _fields_of(record: Record) -> str:
    """Say which fields a record has, the first of many."""
    names = sorted(record.parts)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"the fields {names[:_SHOWN]}{more}"


class _Collector:
    """Sort the records of a shard into columns."""

    def __init__(self, plan: Plan, part: ShardPart, path: str) -> None:
        self.plan = plan
        self.part = part
        self.path = path
        self.columns: dict[str, _Column] = {}
        self.mixed: set[str] = set()
        self.keys: list[str] = []
        self.labels: list[Label | None] = []
        self.first: dict[type, str] = {}
        self.memo: dict[bytes, Label] = {}
        self.dropped = {name for name in (plan.reading.key, plan.label) if isinstance(name, str)}

    def add(self, record: Record) -> None:
        """Take in one record, or leave it out for want of a field or label."""
        if self.plan.reading.key is not None:
            record = record._replace(key=self.key_of(record))
        parts = self.select(record)
        if parts is None or not self.add_label(record):
            return
        if record.key is not None:
            self.keys.append(record.key)
        base = len(self.part.files)
        self.part.files += record.paths
        for name, part in parts:
            self.add_field(name, part, base, record.number)
        self.part.records += 1

    def add_label(self, record: Record) -> bool:
        """Note the label of a record; False to leave the record out."""
        if self.plan.label is None:
            return True
        label = self.label_of(self.plan.label, record)
        if label is None and self.plan.reading.background is None:
            self.lacks("a label", record)
            return False
        kind = str if isinstance(label, str) else int
        if label is not None and kind not in self.first:
            self.first[kind] = f"record {record.number}, key {record.key!r}: {label!r}"
            refuse_mixed(self.first, self.part.path)
        self.labels.append(label)
        return True

    def label_of(self, source: RecordLabel, record: Record) -> Label | None:
        """Return the label of a record, if it has one; those of a field are remembered by its
        bytes.
        """
        part = record.parts.get(source) if isinstance(source, str) else None
        if part is not None and part.data in self.memo:
            return self.memo[part.data]
        label = label_of(source, record, self.part.path)
        if part is not None and label is not None and len(self.memo) < _MEMO:
            self.memo[part.data] = label
        return label

    def key_of(self, record: Record) -> str:
        """Return the key that a feature holds."""
        part = record.parts.get(self.plan.reading.key or "")
        if part is None or part.kind != "bytes":
            raise DataCorruptionError(
                f"no key: the record has no bytes feature {self.plan.reading.key!r}",
                **at(record, self.part.path),
                found=_fields_of(record),
                advice="name another feature with key=",
            )
        return part.data.decode("utf-8", "surrogateescape")

    def select(self, record: Record) -> list[tuple[str, Part]] | None:
        """Return the record's fields by the names the index gives them; None to leave it out."""
        if self.plan.fields is None:
            return [item for item in record.parts.items() if item[0] not in self.dropped]
        chosen = []
        for name, aliases in self.plan.fields:
            for alias in aliases:
                if alias in record.parts:
                    if (name, alias) != ("label", self.plan.label):  # that is the label's column
                        chosen.append((name, record.parts[alias]))
                    break
            else:
                if self.plan.reading.missing != "empty":
                    what = f"the field {name!r} ({' or '.join(aliases)})"
                    self.lacks(what, record, "let such fields be empty with missing='empty', ")
                    return None
        return chosen

    def lacks(self, what: str, record: Record, choice: str = "") -> None:
        """Refuse a record that lacks something, unless such records are to be left out."""
        if self.plan.reading.missing != "skip":
            advice = f"name another, {choice}or leave such records out with missing='skip'"
            if self.plan.reading.container == "tar":
                advice += _DOTS
                if not self.plan.reading.join:
                    advice += ", and parts that lie apart are put together with join=True"
            raise DataCorruptionError(
                f"a record lacks {what}",
                **at(record, self.part.path),
                found=_fields_of(record),
                advice=advice,
            )
        self.part.lacking += 1

    def add_field(self, name: str, part: Part, base: int, number: int) -> None:
        """Add one field, as a list where some record has several values."""
        if part.kind == "bytes" and name in self.plan.reading.lists:
            part = self.as_list(part)
        column = self.columns.get(name)
        if column is None:
            if name == "label" and self.plan.label is not None:
                raise label_clash(self.part.path)
            column = self.columns[name] = _Column(part.kind, number)
            if len(self.columns) > LIMITS.fields:
                raise ValueError(
                    f"{self.part.path} has more than {LIMITS.fields} different fields "
                    f"({', '.join(list(self.columns)[:5])}, ...): name those you want with fields="
                    f"{_DOTS if self.plan.reading.container == 'tar' else ''}"
                )
        elif column.kind != part.kind:
            if {column.kind, part.kind} != {"bytes", "bytes_list"}:
                raise ValueError(
                    f"feature {name!r} of {self.part.path} is {column.kind} in record "
                    f"{column.first} and {part.kind} in record {number}"
                )
            self.mixed.add(name)
            return
        column.add(self.part.records, part, base)

    def as_list(self, part: Part) -> Part:
        """Return the part of one bytes value as that of the list it is in; files and tar members
        are no lists.
        """
        with open(self.path, "rb", buffering=0) as file:
            head = os.pread(file.fileno(), part.head, part.offset - part.head)
        start, length = part.offset - part.head, part.length + part.head
        return Part("bytes_list", part.path_no, start, length, head + part.data, 0)

    def finish(self) -> ShardPart:
        """Return the part with its arrays."""
        part = self.part
        for name, column in sorted(self.columns.items()):
            part.kinds[name] = column.kind
            part.tables[name] = column.table(part.records)
            if column.values and len(column.values) == part.records:
                part.values[name] = np.array(column.values)
        if self.keys:
            part.keys = StringColumn.of(self.keys)
        if self.plan.label is not None:
            part.labels = encode(self.labels)
        return part
