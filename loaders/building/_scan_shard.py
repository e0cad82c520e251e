"""Scan one shard, in one pass, into its part of the index."""

from __future__ import annotations

import os
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from twinfeed.loaders.building._classes import Vocabulary, integer_background
from twinfeed.loaders.building._parts import (
    FieldStats,
    PartFile,
    ShardPart,
    check_field_count,
    new_part,
)
from twinfeed.loaders.building.labels import (
    FromFile,
    FromJson,
    check_one_kind,
    key_of,
    label_field_error,
    label_kind,
    label_of,
    label_source_text,
    missing_error,
)
from twinfeed.loaders.building.plan import BuildPlan, add_headers
from twinfeed.loaders.building.sources import Job, local_copy
from twinfeed.loaders.errors import DataCorruptionError, LoaderError
from twinfeed.loaders.formats.example import decode_list
from twinfeed.loaders.formats.records import Range, Record, RecordChunk, one_by_one, slices
from twinfeed.loaders.index.arrays import MISSING_ROW, StringColumn, row_type
from twinfeed.loaders.index.manifest import file_digest
from twinfeed.loaders.index.options import Label
from twinfeed.loaders.index.paths import join, resolve_below
from twinfeed.loaders.support import system
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.loaders.support.checksum import crc32c, crc32c_of_each
from twinfeed.loaders.support.regular import open_file

WIDEST_COLUMN = 16
"""The maximum number of values per record of a column."""

BLOCK_FIELDS = 1 << 16
"""The approximate number of fields, over all records, of one block of a part."""

_CACHED, _CACHED_BYTES = 1 << 16, 64  # labels and decoded lists in a cache, and bytes of a label
_DOTS_ADVICE = (
    "; a sample's key ends at the first dot of its members' names, and parts that lie apart are "
    "put together with --join (join=True)"
)
_SKIP_ADVICE = "or leave such records out with --missing skip (missing='skip')"
_FIELD_ADVICE = (
    "name another (a key of a JSON field with FromJson, --label-json), let fields be empty with "
    f"--missing empty, {_SKIP_ADVICE}"
)
_LABEL_ADVICE = (
    f"put a file into a folder for its class, name it after the class, have a function return a "
    f"label, {_SKIP_ADVICE}"
)
"""The advice for a record with a missing field or label."""


def build_part(plan: BuildPlan, job: Job, file: str) -> None:
    """Scan the shard of a job, check every checksum, and write its part to `file`."""
    source = plan.root if job.entries else join(plan.root, job.shard)
    if isinstance(plan.root, str) and not job.entries:
        resolve_below(plan.root, job.shard)
    system.keep_freed_memory()  # of a chunk, for the next chunk
    with local_copy(source) as local_file:
        size = 0 if job.entries else os.stat(local_file.path).st_size
        part = ShardPart(plan.options, job.shard, size, local_file.tag, file=Path(file))
        try:
            with new_part(part.file) as part_file:
                scanner = ShardScanner(plan, part, str(source), local_file.path, part_file)
                _scan(plan, job, local_file.path, scanner)
                part.sha256 = file_digest(Path(local_file.path)) if plan.options.digest else ""
                scanner.finish()
        except LoaderError as error:
            if not job.entries:
                error.path = str(source)  # the local file may be a temporary copy
            raise


def _scan(plan: BuildPlan, job: Job, path: str, scanner: ShardScanner) -> None:
    """Add every record of a shard to the scanner, except those that are excluded."""
    part = scanner.part
    bad: set[int | None] = set()

    def on_bad(error: DataCorruptionError) -> None:
        if not job.excludes(error.record):
            raise error
        bad.add(error.record)

    looks_at_each = job.exclude or job.rest is not None or plan.keys is not None
    items = plan.scan(job, path, on_bad)
    try:
        for item in one_by_one(items) if looks_at_each or callable(plan.label) else items:
            if isinstance(item, RecordChunk):
                part.headers_crc = add_headers(part.headers_crc, item.headers)
                scanner.add_chunk(item)
                continue
            part.headers_crc = add_headers(part.headers_crc, [item.header])
            if job.excludes(item.number):
                bad.add(item.number)
            else:
                scanner.add(item)
    except DataCorruptionError as error:
        if job.rest is None or error.record is None or error.record < job.rest:
            raise
        bad.add(error.record)
        part.is_cut = True
    part.num_excluded = len(bad)


class _Column:
    """The rows of a field in the current block, and its values if it can be a column.

    A row is (offset, length, checksum). A column is a field with the same few numbers per record.
    """

    def __init__(self, kind: str, first_record: int) -> None:
        self.kind = kind
        self.first_record = first_record
        self.offset = self.length = self.width = self.count = 0
        self.numeric = kind not in ("bytes", "bytes_list")
        self.decode = lru_cache(_CACHED)(partial(decode_list, kind))
        self.clear()

    def clear(self) -> None:
        """Start the next block."""
        self.rows = array("q")
        self.values: list[Array] = []

    def add(self, row: int, range_: Range, offset: int) -> None:
        """Add the field of record number `row` of the block. Records before it may not have it."""
        self.pad(row)
        self.rows.extend((offset, range_.length, crc32c(range_.data)))
        self.add_values([range_.data])

    def add_chunk(self, row: int, chunk: RecordChunk, starts: Int64s, stops: Int64s) -> None:
        """Add the ranges of a chunk's records, the first of which has number `row` in the block."""
        self.pad(row)
        checksums = np.array(crc32c_of_each(slices(chunk.data, starts, stops)), np.int64)
        rows = np.stack([starts + chunk.offset, stops - starts, checksums], axis=1)
        self.rows.frombytes(rows.tobytes())
        self.add_values(slices(chunk.data, starts, stops))

    def add_values(self, lists: Iterable[bytes]) -> None:
        """Add the values of further records, unless the field cannot be a column."""
        if self.numeric:
            values = [np.asarray(self.decode(data)) for data in lists]
            if self.count == 0:
                self.width = len(values[0])
            self.count += len(values)
            self.values += values
            self.numeric = self.width <= WIDEST_COLUMN and {*map(len, values)} == {self.width}

    def pad(self, records: int) -> None:
        """Add a missing row for each further record of the block, up to this number of records."""
        self.rows.extend(MISSING_ROW * (records - len(self.rows) // len(MISSING_ROW)))

    def arrays(self, number: int, records: int, *, whole_files: bool) -> dict[str, Array]:
        """Return the arrays of field `number` for a block: its rows, and its values if it can be a
        column.
        """
        self.pad(records)
        columns = np.frombuffer(self.rows, np.int64).reshape(records, -1).T
        self.offset = max(self.offset, int(columns[0].max()))
        self.length = max(self.length, int(columns[1].max()))
        rows = np.empty(records, row_type(self.offset, self.length, whole_files=whole_files))
        for name, column in zip(rows.dtype.names or (), columns, strict=True):
            rows[name] = column
        arrays: dict[str, Array] = {f"rows-{number}": rows}
        if self.numeric and len(self.values) == records:
            arrays[f"values-{number}"] = np.concatenate(self.values).reshape(records, self.width)
        return arrays

    def stats(self, records: int) -> FieldStats:
        """Return the statistics of the field; the shard has this number of records."""
        width = self.width if self.numeric and self.count == records else 0
        return FieldStats(self.kind, self.offset, self.length, width)


class ShardScanner:
    """Turn the records of a shard, added one by one, into the blocks of a part."""

    def __init__(
        self, plan: BuildPlan, part: ShardPart, shard: str, path: str, part_file: PartFile
    ) -> None:
        self.options, self.label_source, self.wanted_keys = plan.options, plan.label, plan.keys
        self.part, self.part_file = part, part_file
        self.shard, self.path = shard, path  # its path or URL, and the file with its bytes
        self.whole_files = plan.options.container == "files"
        fields = plan.options.fields or {}
        self.wanted_fields = [(name, names.split(";")) for name, names in fields.items()]
        self.key_and_label_names = {plan.options.key, plan.label if isinstance(plan.label, str) else None}
        self.columns: dict[str, _Column] = {}
        self.vocabulary = Vocabulary()
        self.cached_labels = defaultdict[str, dict[bytes | str, Label | None]](dict)
        self.clear()

    def clear(self) -> None:
        """Start the next block."""
        self.num_records = self.num_fields = 0
        self.keys: list[str] = []
        self.files: list[str] = []
        self.labels: list[Label | None] = []

    def add(self, record: Record) -> None:
        """Add a record, or skip it if a field or the label is missing."""
        if self.options.key is not None:
            record = record._replace(key=key_of(self.options.key, record, self.path))
        if (
            self.wanted_keys is not None
            and record.key is not None
            and record.key not in self.wanted_keys
        ):
            self.part.num_skipped += 1
            return
        selected = self.select(record)
        if selected is None or not self.add_label(record):
            return
        if record.key is not None:
            self.keys.append(record.key)
        first_file = self.part.num_files + len(self.files)  # of the loose files of this record
        self.files += record.paths
        for name, alias in selected:
            self.add_field(name, record.fields[alias], first_file, record.number)
        self.finish_records(1, len(selected))

    def add_chunk(self, chunk: RecordChunk) -> None:
        """Add records that all have the same fields."""
        if self.options.key is not None:
            key_of(self.options.key, chunk.record(0), self.path)  # an error, if there are no keys
            keys = chunk.values(self.options.key)
            chunk = chunk._replace(keys=[key.decode("utf-8", "surrogateescape") for key in keys])
        selected = self.select(chunk.record(0))
        if selected is None:
            self.part.num_skipped += len(chunk.headers) - 1  # the other records lack the same field
            return
        labelled = self.add_labels(chunk)
        first = next(labelled, None)
        if first is None:
            return
        columns = []
        for name, alias in selected:
            kind, starts, stops, heads = chunk.fields[alias]
            if kind == "bytes" and name in self.options.lists:
                kind, starts = "bytes_list", starts - heads
            columns.append((self.column_for(name, kind, chunk.number + first), starts, stops))
        kept = [first, *labelled]
        self.keys += [key for key in map(chunk.keys.__getitem__, kept) if key is not None]
        for column, starts, stops in columns:
            if column is not None:
                column.add_chunk(self.num_records, chunk, starts[kept], stops[kept])
        self.finish_records(len(kept), len(selected))

    def add_labels(self, chunk: RecordChunk) -> Iterator[int]:
        """Add the label of each record of a chunk; yield which of the records are not skipped.

        Equal bytes of the label's field, or else equal keys, give equal labels, which are cached.
        """
        if self.label_source is None:
            yield from range(len(chunk.headers))
            return
        name = self.label_source.field if isinstance(self.label_source, FromJson) else self.label_source
        kind: str = "key"
        values: Iterable[bytes | str] = [key or "" for key in chunk.keys]
        if isinstance(name, str) and name in chunk.fields:
            kind, values = chunk.fields[name].kind, chunk.values(name)
        cache = self.cached_labels[kind]
        for n, value in enumerate(values):
            if value in cache:
                self.labels.append(cache[value])
            elif not self.add_label(chunk.record(n)):
                continue
            elif len(cache) < _CACHED and len(value) <= _CACHED_BYTES:
                cache[value] = self.labels[-1]
            yield n

    def finish_records(self, num_records: int, num_fields: int) -> None:
        """Count records that were added, and write the block if it is full."""
        self.num_records += num_records
        self.num_fields += num_records * (1 + num_fields)
        if self.num_fields >= BLOCK_FIELDS:
            self.write_block()

    def add_label(self, record: Record) -> bool:
        """Add the label of a record; return False if the record is to be skipped."""
        source = self.label_source
        if source is None:
            return True
        label = label_of(source, record, self.shard)
        if label is not None:
            self.check_label_kind(label, record)
        elif self.options.background is None:
            has_name = isinstance(source, str | FromJson | FromFile)
            missing = f"what {label_source_text(source)} names" if has_name else "a label"
            from_field = isinstance(source, str | FromJson)
            self.skip_or_raise(missing, record, _FIELD_ADVICE if from_field else _LABEL_ADVICE)
            return False
        self.labels.append(label)
        return True

    def check_label_kind(self, label: Label, record: Record) -> None:
        """Raise ValueError for labels of two kinds."""
        kind, labels = label_kind(label), self.part.first_labels
        if kind not in labels:
            where = f"{self.part.path}, record {record.number}, key {record.key!r}"
            labels[kind] = f"{where}: {label!r}"
            check_one_kind(labels)

    def select(self, record: Record) -> list[tuple[str, str]] | None:
        """Return (name in the index, name in the record) of each field to index; None to skip the
        record.

        `wanted_fields` has for each name the aliases that the field may have in the record.
        """
        if self.options.fields is None:
            return [(name, name) for name in record.fields if name not in self.key_and_label_names]
        selected = []
        for name, aliases in self.wanted_fields:
            for alias in aliases:
                if alias in record.fields:
                    if (name, alias) != ("label", self.label_source):  # else it becomes the label column
                        selected.append((name, alias))
                    break
            else:
                if self.options.missing != "empty":
                    names = "" if [*aliases] == [name] else f" ({' or '.join(aliases)})"
                    self.skip_or_raise(f"the field {name!r}{names}", record, _FIELD_ADVICE)
                    return None
        return selected

    def skip_or_raise(self, missing: str, record: Record, advice: str) -> None:
        """Count a record with a missing field or label as skipped, if `missing="skip"`.

        Raises:
            DataCorruptionError: otherwise.
        """
        if self.options.missing != "skip":
            tar_advice = _DOTS_ADVICE if self.options.container == "tar" else ""
            raise missing_error(missing, record, self.path, advice + tar_advice)
        self.part.num_skipped += 1

    def add_field(self, name: str, range_: Range, first_file: int, number: int) -> None:
        """Add a field of record `number`, converted to a list if the index has it as a list.

        `first_file` is the number of the record's first loose file.
        """
        if range_.kind == "bytes" and name in self.options.lists:
            range_ = self.as_list(range_)
        column = self.column_for(name, range_.kind, number)
        if column is not None:
            offset = first_file + range_.file_number if self.whole_files else range_.offset
            column.add(self.num_records, range_, offset)

    def column_for(self, name: str, kind: str, number: int) -> _Column | None:
        """Return the column of a field of record `number`; None if the field has two kinds."""
        column = self.columns.get(name)
        if column is None:
            if name == "label" and self.label_source is not None:
                raise label_field_error(self.part.path)
            column = self.columns[name] = _Column(kind, number)
            check_field_count(self.columns)
        elif column.kind != kind:
            if {column.kind, kind} != {"bytes", "bytes_list"}:
                raise ValueError(
                    f"feature {name!r} of {self.part.path} is {column.kind} in record "
                    f"{column.first_record} and {kind} in record {number}"
                )
            if name not in self.part.mixed_features:
                self.part.mixed_features.append(name)
            return None
        return column

    def as_list(self, range_: Range) -> Range:
        """Return the BytesList message around a single bytes value of a TFRecord."""
        start, length = range_.offset - range_.head, range_.length + range_.head
        with open_file(self.path) as file:
            head = os.pread(file.fileno(), range_.head, start)
        return Range("bytes_list", range_.file_number, start, length, head + range_.data, 0)

    def write_block(self) -> None:
        """Write the current block, and start the next."""
        part, arrays = self.part, dict[str, Array]()
        for number, field in enumerate(self.columns.values()):
            if field.rows:
                arrays |= field.arrays(number, self.num_records, whole_files=self.whole_files)
                field.clear()
        for name, strings in (("keys", self.keys), ("files", self.files)):
            if strings:
                column = StringColumn.of(strings)
                arrays |= column.arrays(name)
                count, size = part.string_sizes.get(name, (0, 0))
                part.string_sizes[name] = (count + len(column), size + len(column.text))
        if self.label_source is not None:
            arrays |= self.label_arrays()
        self.part_file.add(self.num_records, arrays)
        part.num_records += self.num_records
        self.clear()

    def label_arrays(self) -> dict[str, Array]:
        """Return the labels of the block: the integers, or the numbers of the names."""
        if "integers" not in self.part.first_labels:
            return {"names": self.vocabulary.add(self.labels)}
        if None in self.labels:
            background = integer_background(self.options.background)
            self.labels = [background if label is None else label for label in self.labels]
        return {"labels": np.array(self.labels, np.int64)}

    def finish(self) -> None:
        """Write the last block, and the statistics of the part."""
        self.write_block()
        part = self.part
        part.label_names = self.vocabulary.names
        part.fields = {name: column.stats(part.num_records) for name, column in self.columns.items()}
        self.part_file.finish(part)
