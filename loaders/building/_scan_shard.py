"""Scan one shard in one pass and make its part of the index."""

from __future__ import annotations

import os
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from twinfeed.loaders.building._classes import Numbering, whole_background
from twinfeed.loaders.building._parts import FieldFacts, PartFile, ShardPart, check_number, new_part
from twinfeed.loaders.building.labels import (
    FromJson,
    key_of,
    kind_of,
    label_clash,
    label_of,
    lacking,
    refuse_mixed,
    spelled,
)
from twinfeed.loaders.building.plan import BuildPlan, add_header
from twinfeed.loaders.building.sources import Job, Local, local
from twinfeed.loaders.errors import DataCorruptionError, LoaderError
from twinfeed.loaders.formats.example import decode_list
from twinfeed.loaders.formats.records import Range, Record
from twinfeed.loaders.index.arrays import StringColumn, row_type
from twinfeed.loaders.index.manifest import file_digest
from twinfeed.loaders.index.options import Label
from twinfeed.loaders.index.paths import below, join
from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.support.checksum import crc32c
from twinfeed.loaders.support.regular import open_file

WIDEST_COLUMN = 16
"""A numeric feature is a column if all records have the same number of values, at most this."""

CELLS = 1 << 16
"""About how many fields of records one block of a part holds."""

_MEMO = 1 << 16
_LACKS = (0, -1, 0)
_DOTS = (
    "; a sample's key ends at the first dot of its members' names, and parts that lie apart are "
    "put together with --join (join=True)"
)
_SKIP = "or leave such records out with --missing skip (missing='skip')"
_FIELD = (
    "name another (a key of a JSON field with FromJson, --label-json), let fields be empty with "
    f"--missing empty, {_SKIP}"
)
_LABEL = f"put a file into a folder for its class, have a function return a label, {_SKIP}"
"""What to do about records that lack a field, or a label of another kind."""


def build_part(plan: BuildPlan, job: Job, file: str) -> None:
    """Scan one whole shard, check every checksum, and write the part to `file`."""
    if job.entries:
        _build(plan, job, Local(str(plan.root)), Path(file))
        return
    full = join(plan.root, job.shard)
    if isinstance(plan.root, str):
        below(plan.root, job.shard)
    with local(full) as here:
        try:
            _build(plan, job, here, Path(file))
        except LoaderError as error:
            error.path = str(full)
            raise


def _build(plan: BuildPlan, job: Job, here: Local, file: Path) -> None:
    """Write the part. Write it again if a feature turns out to be a list."""
    size = 0 if job.entries else os.stat(here.path).st_size
    while True:
        part = ShardPart(plan.options, job.shard, size, here.tag, file=file)
        with new_part(file) as out:
            collector = _Collector(plan, part, here.path, out)
            _scan(plan, job, here.path, collector)
            if not collector.mixed:
                part.sha256 = file_digest(Path(here.path)) if plan.options.digest else ""
                collector.finish()
                return
        plan = plan.with_lists(collector.mixed)


def _scan(plan: BuildPlan, job: Job, path: str, collector: _Collector) -> None:
    """Give the collector every record of a shard that is not left out."""
    part = collector.part
    bad: set[int | None] = set()

    def on_bad(error: DataCorruptionError) -> None:
        if not job.without(error.record):
            raise error
        bad.add(error.record)

    try:
        for record in plan.scan(job, path, on_bad):
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


class _Column:
    """Collect the rows of one field over the records of a shard, block by block."""

    def __init__(self, kind: str, first: int) -> None:
        self.kind = kind
        self.first = first
        self.offset = self.length = self.width = self.count = 0
        self.numeric = kind not in ("bytes", "bytes_list")
        self.decode = lru_cache(_MEMO)(partial(decode_list, kind))
        self.clear()

    def clear(self) -> None:
        """Begin a block."""
        self.rows: list[tuple[int, int, int]] = []
        self.values: list[Array] = []

    def add(self, place: int, piece: Range, where: int) -> None:
        """Note the place of the field in record `place` of the block, and a column's numbers."""
        if len(self.rows) < place:
            self.pad(place)
        self.rows.append((where, piece.length, crc32c(piece.data)))
        self.offset = max(self.offset, where)
        self.length = max(self.length, piece.length)
        if self.numeric:
            value = np.asarray(self.decode(piece.data))
            if self.count == 0:
                self.width = len(value)
            self.count += 1
            self.values.append(value)
            self.numeric = len(value) == self.width <= WIDEST_COLUMN

    def pad(self, records: int) -> None:
        """Note that the records up to this number lack the field."""
        self.rows += [_LACKS] * (records - len(self.rows))

    def arrays(self, number: int, records: int, *, whole_files: bool) -> dict[str, Array]:
        """Return the field's table for a block, and its values if every record has values."""
        self.pad(records)
        dtype = row_type(self.offset, self.length, whole_files=whole_files)
        held: dict[str, Array] = {f"rows-{number}": np.array(self.rows, dtype)}
        if self.numeric and len(self.values) == records:
            held[f"values-{number}"] = np.array(self.values).reshape(records, self.width)
        return held

    def facts(self, records: int) -> FieldFacts:
        """Return the facts of the field, given the number of records of the shard."""
        width = self.width if self.numeric and self.count == records else 0
        return FieldFacts(self.kind, self.offset, self.length, width)


class _Collector:
    """Sort the records of a shard into columns."""

    def __init__(self, plan: BuildPlan, part: ShardPart, path: str, out: PartFile) -> None:
        self.options, self.source, self.known = plan.options, plan.label, plan.keys
        self.part, self.path, self.out = part, path, out
        self.whole_files = plan.options.container == "files"
        fields = plan.options.fields or {}
        self.chosen = [(name, names.split(";")) for name, names in fields.items()]
        self.dropped = {plan.options.key, plan.label if isinstance(plan.label, str) else None}
        self.columns: dict[str, _Column] = {}
        self.mixed: set[str] = set()
        self.numbering = Numbering()
        self.memo: dict[bytes, Label] = {}
        self.clear()

    def clear(self) -> None:
        """Begin a block."""
        self.records = self.cells = 0
        self.keys: list[str] = []
        self.files: list[str] = []
        self.labels: list[Label | None] = []

    def add(self, record: Record) -> None:
        """Add one record, or leave it out if it lacks a field or a label."""
        if self.options.key is not None:
            record = record._replace(key=key_of(self.options.key, record, self.path))
        if self.known is not None and record.key is not None and record.key not in self.known:
            self.part.lacking += 1
            return
        pieces = self.select(record)
        if pieces is None or not self.add_label(record):
            return
        if record.key is not None:
            self.keys.append(record.key)
        base = self.part.files + len(self.files)
        self.files += record.paths
        for name, piece in pieces:
            self.add_field(name, piece, base, record.number)
        self.records += 1
        self.cells += 1 + len(pieces)
        if self.cells >= CELLS:
            self.write()

    def add_label(self, record: Record) -> bool:
        """Note the label of a record. Return False to leave the record out."""
        source = self.source
        if source is None:
            return True
        piece = record.fields.get(source) if isinstance(source, str) else None
        label = None if piece is None else self.memo.get(piece.data)
        if label is None:
            label = label_of(source, record, self.path)
            if label is not None:
                self.note_kind(label, record)
                if piece is not None and len(self.memo) < _MEMO:
                    self.memo[piece.data] = label
            elif self.options.background is None:
                named = isinstance(source, str | FromJson)
                what = f"what {spelled(source)} names" if named else "a label"
                self.lacks(what, record, _FIELD if named else _LABEL)
                return False
        self.labels.append(label)
        return True

    def note_kind(self, label: Label, record: Record) -> None:
        """Refuse labels of two kinds."""
        kind, labels = kind_of(label), self.part.labels
        if kind not in labels:
            where = f"{self.part.path}, record {record.number}, key {record.key!r}"
            labels[kind] = f"{where}: {label!r}"
            refuse_mixed(labels)

    def select(self, record: Record) -> list[tuple[str, Range]] | None:
        """Return the record's fields by their names in the index; None to leave the record out."""
        if self.options.fields is None:
            return [item for item in record.fields.items() if item[0] not in self.dropped]
        chosen = []
        for name, aliases in self.chosen:
            for alias in aliases:
                if alias in record.fields:
                    if (name, alias) != ("label", self.source):  # that is the label's column
                        chosen.append((name, record.fields[alias]))
                    break
            else:
                if self.options.missing != "empty":
                    called = "" if [*aliases] == [name] else f" ({' or '.join(aliases)})"
                    self.lacks(f"the field {name!r}{called}", record, _FIELD)
                    return None
        return chosen

    def lacks(self, what: str, record: Record, advice: str) -> None:
        """Refuse a record that lacks something, or count the record as left out."""
        if self.options.missing != "skip":
            tar = _DOTS if self.options.container == "tar" else ""
            raise lacking(what, record, self.path, advice + tar)
        self.part.lacking += 1

    def add_field(self, name: str, piece: Range, base: int, number: int) -> None:
        """Add one field, as a list where some record has several values."""
        if piece.kind == "bytes" and name in self.options.lists:
            piece = self.as_list(piece)
        column = self.columns.get(name)
        if column is None:
            if name == "label" and self.source is not None:
                raise label_clash(self.part.path)
            column = self.columns[name] = _Column(piece.kind, number)
            check_number(self.columns)
        elif column.kind != piece.kind:
            if {column.kind, piece.kind} != {"bytes", "bytes_list"}:
                raise ValueError(
                    f"feature {name!r} of {self.part.path} is {column.kind} in record "
                    f"{column.first} and {piece.kind} in record {number}"
                )
            self.mixed.add(name)
            return
        where = base + piece.path_no if self.whole_files else piece.offset
        column.add(self.records, piece, where)

    def as_list(self, piece: Range) -> Range:
        """Return the list message around a single bytes value of a TFRecord."""
        with open_file(self.path) as file:
            head = os.pread(file.fileno(), piece.head, piece.offset - piece.head)
        start, length = piece.offset - piece.head, piece.length + piece.head
        return Range("bytes_list", piece.path_no, start, length, head + piece.data, 0)

    def write(self) -> None:
        """Write the records since the last block, and forget them."""
        part, arrays = self.part, dict[str, Array]()
        for number, field in enumerate(self.columns.values()):
            if field.rows:
                arrays |= field.arrays(number, self.records, whole_files=self.whole_files)
                field.clear()
        for name, strings in (("keys", self.keys), ("files", self.files)):
            if strings:
                column = StringColumn.of(strings)
                arrays |= column.arrays(name)
                count, size = part.strings.get(name, (0, 0))
                part.strings[name] = (count + len(column), size + len(column.text))
        if self.source is not None:
            arrays |= self.numbered()
        self.out.add(self.records, arrays)
        part.records += self.records
        self.clear()

    def numbered(self) -> dict[str, Array]:
        """Return the labels of the block: integers, or the numbers of names."""
        if "integers" not in self.part.labels:
            return {"names": self.numbering.of(self.labels)}
        if None in self.labels:
            background = whole_background(self.options.background)
            self.labels = [background if label is None else label for label in self.labels]
        return {"labels": np.array(self.labels, np.int64)}

    def finish(self) -> None:
        """Write what is left, and the facts of the part."""
        self.write()
        part = self.part
        part.names = self.numbering.names
        part.fields = {name: column.facts(part.records) for name, column in self.columns.items()}
        self.out.finish(part)
