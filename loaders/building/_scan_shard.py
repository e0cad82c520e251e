"""Scan one shard, in one pass, into its part of the index."""

from __future__ import annotations

import os
import warnings
import zipfile
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from twinfeed.loaders.building._field_buffer import FieldBuffer
from twinfeed.loaders.building._parts import (
    PartFile,
    ShardPart,
    check_field_count,
)
from twinfeed.loaders.building.labels import (
    FromExample,
    FromJson,
    key_of,
    label_field_error,
    label_of,
    label_source_text,
    missing_error,
)
from twinfeed.loaders.building.plan import BuildPlan, add_headers
from twinfeed.loaders.building.sources import Job, local_copy
from twinfeed.loaders.errors import DataCorruptionError, LoaderError, ShardWarning
from twinfeed.loaders.formats.records import Range, Record, RecordChunk, one_by_one
from twinfeed.loaders.index.arrays import StringColumn
from twinfeed.loaders.index.manifest import file_digest
from twinfeed.loaders.index.options import Label
from twinfeed.loaders.index.paths import join, resolve_below
from twinfeed.loaders.support import system
from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.support.atomic import new_file
from twinfeed.loaders.support.regular import open_file
from twinfeed.samplers.validate import counted

BATCH_FIELDS = 1 << 16
"""The approximate size of a record batch: the number of fields of its records together."""

_CACHE_ITEMS = 1 << 16  # of a cache of labels
_MAX_CACHED_BYTES = 64  # of the text of a cached label
_TAR_ADVICE = (
    "; in a tar, a sample's key ends at the first dot of its members' names, and members of one "
    "sample that are not consecutive are joined with --join (join=True)"
)
_SKIP_ADVICE = "or leave such records out with --missing skip (missing='skip')"
_FIELD_ADVICE = (
    "name another field (or a key of a JSON field with FromJson, --label-json), let fields be "
    f"empty with --missing empty, {_SKIP_ADVICE}"
)
_LABEL_ADVICE = (
    "put a file into a folder for its class, name it after the class, add its key to the table "
    f"(key= names that of a TFRecord), have a function return a label, {_SKIP_ADVICE}"
)
"""The advice for a record with a missing field or label."""
_LIST_ADVICE = "make the list again with twinfeed verify"


def build_part(plan: BuildPlan, job: Job, file: str) -> None:
    """Scan the shard (or the loose files) of a job with every checksum, and write its part to
    `file`.
    """
    is_shard = not job.entries
    source = join(plan.root, job.shard) if is_shard else plan.root
    if isinstance(plan.root, str) and is_shard:
        resolve_below(plan.root, job.shard)  # an error for a shard outside the root
    system.keep_freed_memory()  # each chunk of the shard reuses the memory of the chunk before
    with local_copy(source) as (path, etag):
        size = os.stat(path).st_size if is_shard else 0
        part = ShardPart(plan.options, job.shard, size, etag)
        try:
            with new_file(Path(file), sync=False) as out, zipfile.ZipFile(out, "w") as archive:
                scanner = ShardScanner(plan, part, str(source), path, PartFile(archive))
                _scan(plan, job, path, scanner)
                part.sha256 = file_digest(Path(path)) if plan.options.digest else ""
                scanner.finish()
        except LoaderError as error:
            if is_shard:
                error.path = str(source)  # the local file may be a temporary copy
            raise


def _scan(plan: BuildPlan, job: Job, path: str, scanner: ShardScanner) -> None:
    """Add every record of a shard to the scanner, but for those that the user excludes.

    With `exclude={2}` and `stop=5`, the records 0, 1, 3 and 4 of a shard with 7 are added. From
    `stop` on, the shard may be unreadable: the part is then incomplete.
    """
    part = scanner.part
    excluded: set[int | None] = set()  # the numbers of the records that were excluded: {2, 5, 6}
    restored = []  # those that can be read again

    def ignore_if_excluded(error: DataCorruptionError) -> None:
        if not job.excludes(error.record):
            raise error
        excluded.add(error.record)

    items: Iterator[Record | RecordChunk] = plan.scan(job, path, ignore_if_excluded)
    # Chunks of several records are faster. But single records are needed to exclude some of them,
    # or to call a function for the label of each.
    if job.exclude or job.stop is not None or callable(plan.label):
        items = one_by_one(items)
    try:
        for item in items:
            if isinstance(item, RecordChunk):
                part.headers_crc = add_headers(part.headers_crc, item.headers)
                scanner.add_chunk(item)
                continue
            part.headers_crc = add_headers(part.headers_crc, [item.header])
            if job.excludes(item.number):
                key = job.exclude.get(item.number)
                if key != item.key and None not in (key, item.key):
                    raise ValueError(
                        f"exclude= names {key!r}, which is not record {item.number} of "
                        f"{job.shard}: {_LIST_ADVICE}, or name the record as (shard, number)"
                    )
                if item.number in job.unreadable or item.number not in job.exclude:
                    restored.append(item.number)
                excluded.add(item.number)
            else:
                scanner.add(item)
    except DataCorruptionError as error:  # the shard cannot be read from this record on
        if job.stop is None or error.record is None or error.record < job.stop:  # not excluded
            raise
        excluded.add(error.record)
        part.is_incomplete = True
    if restored:
        warnings.warn(
            f"{counted(len(restored), 'record')} of {job.shard} that exclude= leaves out can be "
            f"read again (first: {restored[0]}): {_LIST_ADVICE}",
            ShardWarning,
            stacklevel=2,
        )
    part.num_excluded = len(excluded)
    scanner.left_out.extend(number for number in excluded if number is not None)


class ShardScanner:
    """Write the records of a shard to the record batches of its part.

    Records are added to a batch in memory, which is written when it has about `BATCH_FIELDS`
    fields. `wanted_fields` has each field's name in the index, and the names that it may have in a
    record.
    """

    def __init__(
        self, plan: BuildPlan, part: ShardPart, shard: str, path: str, part_file: PartFile
    ) -> None:
        self.options, self.label_source = plan.options, plan.label
        self.part, self.part_file = part, part_file
        self.shard, self.path = shard, path  # the path or URL of the shard, and a local copy
        self.whole_files = plan.options.container == "files"
        fields = plan.options.fields or {}
        self.wanted_fields = [(name, names.split(";")) for name, names in fields.items()]
        label_field = plan.label if isinstance(plan.label, str) else None
        self.key_and_label_names = {plan.options.key, label_field}
        self.buffers: dict[str, FieldBuffer] = {}
        self.label_numbers: dict[Label | None, int] = {}  # the index of each in `part.labels`
        self.has_integer = False  # whether a label is one
        self.cached_labels = defaultdict[str, dict[bytes | str, int]](dict)
        self.start_batch()

    def start_batch(self) -> None:
        """Start the next batch, without records."""
        self.num_records = self.num_fields = 0
        self.keys: list[str] = []
        self.files: list[str] = []
        self.labels = array("q")  # indices into `part.labels`
        self.left_out = array("q")  # numbers of records, in any order

    def add(self, record: Record) -> None:
        """Add a record to the batch, unless it lacks something and is skipped."""
        if self.options.key is not None:
            record = record._replace(key=key_of(self.options.key, record, self.path))
        key = record.key
        fields = self.select_fields(record)
        if fields is None or not self.add_label(record):
            return
        if key is not None:
            self.keys.append(key)
        first_file_number = self.part.num_files + len(self.files)  # of the record's loose files
        self.files += record.paths
        for name, stored_name in fields:
            self.add_field(name, record.fields[stored_name], first_file_number, record.number)
        self.finish_records(1, len(fields))

    def add_chunk(self, chunk: RecordChunk) -> None:
        """Add the records of a chunk as arrays, without a Python object for each record.

        The comments show a chunk of 3 records, of which the second has no label and is skipped.
        """
        if self.options.key is not None:  # a field of the record is its key
            # Raises an error if the first record lacks the field. Then all records lack it.
            key_of(self.options.key, chunk.record(0), self.path)
            keys = chunk.values(self.options.key)
            chunk = chunk._replace(keys=[key.decode("utf-8", "surrogateescape") for key in keys])
        fields = self.select_fields(chunk.record(0))
        if fields is None:
            self.part.num_skipped += len(chunk.headers) - 1  # the other records lack the same field
            number = chunk.first_number
            self.left_out.extend(range(number + 1, number + len(chunk.headers)))
            return
        # A generator, which adds a label at each `next` and yields the index of its record: 0, 2.
        # Errors must come in the order of the records. So add the first label, then check the
        # fields, which are the same in all records, and then add the other labels.
        labelled = self.add_labels(chunk)
        first = next(labelled, None)  # 0
        if first is None:  # all records were skipped
            return
        first_number = chunk.first_number + first  # of the record in the shard, for errors
        field_ranges = []
        for name, stored_name in fields:
            kind, starts, stops, prefix_lengths = chunk.fields[stored_name]
            if kind == "bytes" and name in self.options.lists:
                # Read the value as a list of one value. This is a protobuf message, which begins
                # before the value, with a prefix of a tag and a length: 0a 03 before the 3 bytes
                # of "cat".
                kind, starts = "bytes_list", starts - prefix_lengths
            buffer = self.buffer_of(name, kind, first_number)
            # None if the field is a list in other records. This scan is then not used: the build
            # scans all shards again, and reads the field as a list everywhere.
            if buffer is not None:
                field_ranges.append((buffer, starts, stops))
        kept = [first, *labelled]  # [0, 2]
        self.keys += [key for key in map(chunk.keys.__getitem__, kept) if key is not None]
        for buffer, starts, stops in field_ranges:
            buffer.add_chunk(self.num_records, chunk, starts[kept], stops[kept])
        self.finish_records(len(kept), len(fields))

    def add_labels(self, chunk: RecordChunk) -> Iterator[int]:
        """Add the label of each record of a chunk, and yield the index of each that is not skipped.

        Labels are cached by the bytes or the key that they are computed from, since most repeat.
        """
        if self.label_source is None:
            yield from range(len(chunk.headers))  # all records; each has a header
            return
        source = self.label_source
        # The name of a field, or an object such as FromFolder, which needs the key.
        field = source.field if isinstance(source, FromJson | FromExample) else source
        # `values` has what the label of each record is computed from, and `kind` is its type.
        kind: str = "key"
        values: Iterable[bytes | str] = [key or "" for key in chunk.keys]
        if isinstance(field, str) and field in chunk.fields:
            kind, values = chunk.fields[field].kind, chunk.values(field)
        # Equal bytes may be different labels as "bytes" and as "int64_list", so each kind of value
        # has a cache.
        cache = self.cached_labels[kind]
        for index, value in enumerate(values):
            if value in cache:
                self.labels.append(cache[value])
                yield index
            elif self.add_label(chunk.record(index)):  # appends the label, unless it is skipped
                if len(cache) < _CACHE_ITEMS and len(value) <= _MAX_CACHED_BYTES:
                    cache[value] = self.labels[-1]
                yield index

    def finish_records(self, num_records: int, num_fields: int) -> None:
        """Count records that were added, with `num_fields` fields each; write the batch if full."""
        self.num_records += num_records
        self.num_fields += num_records * (1 + num_fields)  # the key and label count as one field
        if self.num_fields >= BATCH_FIELDS:
            self.write_batch()

    def add_label(self, record: Record) -> bool:
        """Add the label of a record, or None for the default label; return False to skip the
        record.
        """
        source = self.label_source
        if source is None:
            return True
        label = label_of(source, record, self.shard, self.part.path)
        if label is None and self.options.background is None:
            problem = f"a label: {label_source_text(source)} gives none"
            advice = _FIELD_ADVICE if isinstance(source, str | FromJson) else _LABEL_ADVICE
            if isinstance(source, FromExample):
                advice = f"read Examples whole, with example=False (--raw); {_SKIP_ADVICE}"
            elif isinstance(source, str) and not self.options.example:
                advice = f"FromExample({source!r}) (--label-example) parses the record; {advice}"
            self.skip_or_raise(problem, record, advice)
            return False
        if label not in self.label_numbers:
            self.label_numbers[label] = len(self.label_numbers)
            where = "" if self.whole_files else f"{self.part.path}, record {record.number}"
            if record.key is not None:
                where += f"{', ' if where else ''}key {record.key!r}"
            is_integer = isinstance(label, int)  # an error names the first one alone
            self.part.first_records.append("" if is_integer and self.has_integer else where)
            self.has_integer |= is_integer
        self.labels.append(self.label_numbers[label])
        return True

    def select_fields(self, record: Record) -> list[tuple[str, str]] | None:
        """Return the indexed fields of a record, as (name in the index, name in the record).

        With `fields={"image": "jpg;png"}`, a record of "png" and "txt" has [("image", "png")]. None
        is returned if the record lacks a field and is skipped.
        """
        if self.options.fields is None:
            return [(name, name) for name in record.fields if name not in self.key_and_label_names]
        selected = []
        for name, stored_names in self.wanted_fields:  # "image", ["jpg", "png"]
            present = [stored_name for stored_name in stored_names if stored_name in record.fields]
            if present:
                # If the labels are read from this field, and it shall be called "label": then it
                # is indexed already, as the column "label", and is not selected.
                if (name, present[0]) != ("label", self.label_source):
                    selected.append((name, present[0]))
            elif self.options.missing != "empty":  # with "empty", it is left out
                names = "" if stored_names == [name] else f" ({' or '.join(stored_names)})"
                self.skip_or_raise(f"the field {name!r}{names}", record, _FIELD_ADVICE)
                return None
        return selected

    def skip_or_raise(self, missing_item: str, record: Record, advice: str) -> None:
        """Count a record that lacks an item as skipped, or raise an error that names the item."""
        if self.options.missing != "skip":
            tar_advice = _TAR_ADVICE if self.options.container == "tar" else ""
            raise missing_error(missing_item, record, self.path, advice + tar_advice)
        self.part.num_skipped += 1
        self.left_out.append(record.number)

    def add_field(self, name: str, range_: Range, first_file_number: int, number: int) -> None:
        """Add a field of a record to the batch, by its offset or by the number of its file."""
        if range_.kind == "bytes" and name in self.options.lists:  # the user wants lists
            range_ = self.as_list(range_)
        buffer = self.buffer_of(name, range_.kind, number)
        # None if the field is a list in other records. This scan is then not used: the build scans
        # all shards again, and reads the field as a list everywhere.
        if buffer is not None:
            file_number = first_file_number + range_.file_number
            offset_or_file = file_number if self.whole_files else range_.offset
            buffer.add(self.num_records, range_, offset_or_file)

    def buffer_of(self, name: str, kind: str, number: int) -> FieldBuffer | None:
        """Return the buffer of a field; None if it is a list in other records, and all are scanned
        again.
        """
        buffer = self.buffers.get(name)
        if buffer is None:
            if name == "label" and self.label_source is not None:
                raise label_field_error(self.part.path)
            is_list = name in self.options.lists
            buffer = self.buffers[name] = FieldBuffer(kind, number, is_list=is_list)
            check_field_count(self.buffers)
        elif buffer.kind != kind:
            if {buffer.kind, kind} != {"bytes", "bytes_list"}:
                raise ValueError(
                    f"feature {name!r} of {self.part.path} is {buffer.kind} in record "
                    f"{buffer.first_record} and {kind} in record {number}"
                )
            if name not in self.part.mixed_features:
                self.part.mixed_features.append(name)
            return None
        return buffer

    def as_list(self, range_: Range) -> Range:
        """Widen the range of a bytes value to a list of one value: `0a 03 63 61 74` for b"cat"."""
        prefix_length = range_.prefix_length
        start = range_.offset - prefix_length
        with open_file(self.path) as file:
            data = os.pread(file.fileno(), prefix_length, start) + range_.data
        return Range("bytes_list", start, len(data), data, range_.file_number)

    def write_batch(self) -> None:
        """Write the batch to the part's file, add it to the statistics, and start the next."""
        part, arrays = self.part, dict[str, Array]()
        for number, buffer in enumerate(self.buffers.values()):
            if buffer.rows:
                arrays |= buffer.arrays(number, self.num_records, whole_files=self.whole_files)
                buffer.clear()
        for name, strings in (("keys", self.keys), ("files", self.files)):
            if strings:
                column = StringColumn.of(strings)
                arrays |= column.arrays(name)
                count, size = part.string_sizes.get(name, (0, 0))
                part.string_sizes[name] = (count + len(column), size + len(column.text))
        if self.label_source is not None:
            arrays["labels"] = np.array(self.labels)
        if self.left_out:
            arrays["leftout"] = np.array(self.left_out)
        self.part_file.add(self.num_records, arrays)
        part.num_records += self.num_records
        self.start_batch()

    def finish(self) -> None:
        """Write the last batch, unless it is empty, and the statistics of the part."""
        if self.num_records or self.left_out:
            self.write_batch()
        part = self.part
        part.labels = [*self.label_numbers]
        part.fields = {name: buf.stats(part.num_records) for name, buf in self.buffers.items()}
        self.part_file.finish(part)
