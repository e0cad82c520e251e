"""Scan one shard in one pass and make its part of the index."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from twinfeed.loaders._checks import Array
from twinfeed.loaders.errors import DataCorruptionError, LoaderError
from twinfeed.loaders.formats._checksum import crc32c
from twinfeed.loaders.formats._records import Range, Record
from twinfeed.loaders.formats.example import decode_list
from twinfeed.loaders.index._columns import StringColumn, missing_rows, row_type
from twinfeed.loaders.index._numbering import Numbering
from twinfeed.loaders.index._parts import FieldFacts, PartFile, ShardPart, new_part
from twinfeed.loaders.index._paths import below, is_url, join
from twinfeed.loaders.index._plan import Plan, add_header, scan_job
from twinfeed.loaders.index._sources import Job, local
from twinfeed.loaders.index._store import file_digest
from twinfeed.loaders.index.labels import Label, at, label_clash, label_of, refuse_mixed
from twinfeed.loaders.limits import LIMITS

WIDEST_COLUMN = 16
"""A numeric feature of at most so many values, the same number in every record, becomes a column.
"""

CELLS = 1 << 16
"""A block of a part has about so many fields of records."""

_MEMO = 1 << 16
_SHOWN = 8
_DOTS = "; a sample's key ends at the first dot of its members' names"


def build_part(plan: Plan, job: Job, file: str) -> None:
    """Scan one shard, in full and with every checksum, and leave its part at `file`."""
    if job.entries:
        _build(plan, job, plan.root, file)
        return
    if not is_url(plan.root):
        below(plan.root, job.shard)
    with local(join(plan.root, job.shard)) as here:
        try:
            _build(plan, job, here.path, file, here.tag)
        except LoaderError as error:
            error.path = join(plan.root, job.shard)
            raise


def _build(plan: Plan, job: Job, path: str, file: str, tag: str | None = None) -> None:
    """Write the part, once more if a feature turns out to need reading as a list."""
    digest, size = plan.digest(), 0 if job.entries else os.stat(path).st_size
    mixed: set[str] | None = None
    while mixed is None or mixed:
        plan = plan.with_lists(mixed or ())
        part = ShardPart(digest, plan.options(), job.shard, size, tag=tag)
        with new_part(Path(file)) as out:
            collector = _Collector(plan, part, path, out)
            _scan(plan, job, path, collector)
            mixed = collector.mixed
            if not mixed:
                part.sha256 = file_digest(Path(path)) if plan.reading.digest else ""
                collector.finish()


def _scan(plan: Plan, job: Job, path: str, collector: _Collector) -> None:
    """Give every record of a shard to the collector, but those that are left out."""
    part = collector.part
    bad: set[int | None] = set()

    def on_bad(error: DataCorruptionError) -> None:
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


class _Column:
    """Collect the rows of one field over the records of a shard, block by block."""

    def __init__(self, kind: str, first: int) -> None:
        self.kind = kind
        self.first = first
        self.offset = self.length = self.width = self.count = 0
        self.numeric = kind not in ("bytes", "bytes_list")
        self.memo: dict[bytes, Array] = {}
        self.clear()

    def clear(self) -> None:
        """Begin a block."""
        self.places: list[int] = []
        self.rows: list[tuple[int, int, int]] = []
        self.values: list[Array] = []

    def add(self, place: int, piece: Range, base: int, *, whole_files: bool) -> None:
        """Note where the field of record number `place` of the block lies, and its value if it may
        become a column.
        """
        where = base + piece.path_no if whole_files else piece.offset
        self.places.append(place)
        self.rows.append((where, piece.length, crc32c(piece.data)))
        self.offset = max(self.offset, where)
        self.length = max(self.length, piece.length)
        if self.numeric:
            self.add_value(piece)

    def add_value(self, piece: Range) -> None:
        """Keep the numbers as long as all records have the same few."""
        value = self.memo.get(piece.data)
        if value is None:
            value = np.asarray(decode_list(piece.kind, piece.data))
            if len(self.memo) < _MEMO:
                self.memo[piece.data] = value
        if self.count == 0:
            self.width = len(value)
        self.count += 1
        self.values.append(value)
        self.numeric = len(value) == self.width <= WIDEST_COLUMN

    def arrays(self, number: int, records: int, *, whole_files: bool) -> dict[str, Array]:
        """Return the table of the field for a block, and its values if all records have some."""
        table = missing_rows(records, row_type(self.offset, self.length, whole_files=whole_files))
        table[np.array(self.places, np.int64)] = np.array(self.rows, table.dtype)
        held = {f"rows-{number}": table}
        if self.numeric and len(self.values) == records:
            held[f"values-{number}"] = np.array(self.values).reshape(records, self.width)
        return held

    def facts(self, records: int) -> FieldFacts:
        """Return the facts of the field, given the number of records of the shard."""
        width = self.width if self.numeric and self.count == records else 0
        return FieldFacts(self.kind, self.offset, self.length, width)


def _fields_of(record: Record) -> str:
    """Say which fields a record has, the first of many."""
    names = sorted(record.fields)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"the fields {names[:_SHOWN]}{more}"


class _Collector:
    """Sort the records of a shard into columns."""

    def __init__(self, plan: Plan, part: ShardPart, path: str, out: PartFile) -> None:
        self.plan = plan
        self.part = part
        self.path = path
        self.out = out
        self.whole_files = plan.reading.container == "files"
        self.columns: dict[str, _Column] = {}
        self.mixed: set[str] = set()
        self.first: dict[type, str] = {}
        self.numbering = Numbering()
        self.memo: dict[bytes, Label] = {}
        self.dropped = {name for name in (plan.reading.key, plan.label) if isinstance(name, str)}
        self.clear()

    def clear(self) -> None:
        """Begin a block."""
        self.records = self.cells = 0
        self.keys: list[str] = []
        self.files: list[str] = []
        self.labels: list[Label | None] = []

    def add(self, record: Record) -> None:
        """Take in one record, or leave it out for want of a field or label."""
        if self.plan.reading.key is not None:
            record = record._replace(key=self.key_of(record))
        pieces = self.select(record)
        if pieces is None or not self.add_label(record):
            return
        if record.key is not None:
            self.keys.append(record.key)
        base = self.part.strings.get("files", (0, 0))[0] + len(self.files)
        self.files += record.paths
        for name, piece in pieces:
            self.add_field(name, piece, base, record.number)
        self.records += 1
        self.cells += 1 + len(pieces)
        if self.cells >= CELLS:
            self.write()

    def add_label(self, record: Record) -> bool:
        """Note the label of a record; False to leave the record out. The labels of a field are
        remembered by its bytes.
        """
        source = self.plan.label
        if source is None:
            return True
        piece = record.fields.get(source) if isinstance(source, str) else None
        label = None if piece is None else self.memo.get(piece.data)
        if label is None:
            label = label_of(source, record, self.part.path)
            if label is None and self.plan.reading.background is None:
                self.lacks("a label", record)
                return False
            if piece is not None and label is not None and len(self.memo) < _MEMO:
                self.memo[piece.data] = label
        kind = str if isinstance(label, str) else int
        if label is not None and kind not in self.first:
            self.first[kind] = f"record {record.number}, key {record.key!r}: {label!r}"
            refuse_mixed(self.first, self.part.path)
        self.labels.append(label)
        return True

    def key_of(self, record: Record) -> str:
        """Return the key that a feature holds."""
        piece = record.fields.get(self.plan.reading.key or "")
        if piece is None or piece.kind != "bytes":
            raise DataCorruptionError(
                f"no key: the record has no bytes feature {self.plan.reading.key!r}",
                **at(record, self.part.path),
                found=_fields_of(record),
                advice="name another feature with key=",
            )
        return piece.data.decode("utf-8", "surrogateescape")

    def select(self, record: Record) -> list[tuple[str, Range]] | None:
        """Return the record's fields by the names the index gives them; None to leave it out."""
        if self.plan.fields is None:
            return [item for item in record.fields.items() if item[0] not in self.dropped]
        chosen = []
        for name, aliases in self.plan.fields:
            for alias in aliases:
                if alias in record.fields:
                    if (name, alias) != ("label", self.plan.label):  # that is the label's column
                        chosen.append((name, record.fields[alias]))
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

    def add_field(self, name: str, piece: Range, base: int, number: int) -> None:
        """Add one field, as a list where some record has several values."""
        if piece.kind == "bytes" and name in self.plan.reading.lists:
            piece = self.as_list(piece)
        column = self.columns.get(name)
        if column is None:
            if name == "label" and self.plan.label is not None:
                raise label_clash(self.part.path)
            column = self.columns[name] = _Column(piece.kind, number)
            if len(self.columns) > LIMITS.fields:
                raise ValueError(
                    f"{self.part.path} has more than {LIMITS.fields} different fields "
                    f"({', '.join(list(self.columns)[:5])}, ...): name those you want with fields="
                    f"{_DOTS if self.plan.reading.container == 'tar' else ''}"
                )
        elif column.kind != piece.kind:
            if {column.kind, piece.kind} != {"bytes", "bytes_list"}:
                raise ValueError(
                    f"feature {name!r} of {self.part.path} is {column.kind} in record "
                    f"{column.first} and {piece.kind} in record {number}"
                )
            self.mixed.add(name)
            return
        column.add(self.records, piece, base, whole_files=self.whole_files)

    def as_list(self, piece: Range) -> Range:
        """Return one bytes value as the list it is in; files and tar members are no lists."""
        with open(self.path, "rb", buffering=0) as file:
            head = os.pread(file.fileno(), piece.head, piece.offset - piece.head)
        start, length = piece.offset - piece.head, piece.length + piece.head
        return Range("bytes_list", piece.path_no, start, length, head + piece.data, 0)

    def write(self) -> None:
        """Write the records since the last block, and forget them."""
        part, arrays = self.part, dict[str, Array]()
        for number, field in enumerate(self.columns.values()):
            if field.places:
                arrays |= field.arrays(number, self.records, whole_files=self.whole_files)
                field.clear()
        for name, strings in (("keys", self.keys), ("files", self.files)):
            if strings:
                column = StringColumn.of(strings)
                arrays |= column.arrays(name)
                count, size = part.strings.get(name, (0, 0))
                part.strings[name] = (count + len(column), size + len(column.text))
        if self.plan.label is not None:
            arrays |= self.numbered()
        self.out.add(self.records, arrays)
        part.records += self.records
        self.clear()

    def numbered(self) -> dict[str, Array]:
        """Return the labels of the block: integers, or the numbers of names."""
        without = [place for place, label in enumerate(self.labels) if label is None]
        if without:
            self.numbering.of([None])
        if str in self.first:
            numbers = self.numbering.of(self.labels)
        else:
            numbers = np.array([label or 0 for label in self.labels], np.int64)
        return {"labels": numbers, "unlabelled": np.array(without, np.int64)}

    def finish(self) -> None:
        """Write what is left, and the facts of the part."""
        self.write()
        part = self.part
        part.labels = "integers" if int in self.first else "names" if self.first else ""
        part.names = self.numbering.names
        part.fields = {name: column.facts(part.records) for name, column in self.columns.items()}
        self.out.finish(part)
