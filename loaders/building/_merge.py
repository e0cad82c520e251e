"""Merge the parts of all shards into one index: first their totals, then their arrays, by batches.

Memory grows with the number of shards, fields, classes and records that are left out, not with the
number of records.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from twinfeed.loaders.building._part_stats import IndexStats
from twinfeed.loaders.building._parts import RecordBatch, ShardPart, load_part
from twinfeed.loaders.building.classes import (
    Classes,
    assign_classes,
    write_class_order,
)
from twinfeed.loaders.building.labels import FromTable
from twinfeed.loaders.building.writer import ArrayFile, IndexWriter, index_writer
from twinfeed.loaders.index.arrays import MISSING_ROW, StringColumn, integer_type, row_type
from twinfeed.loaders.index.options import Label
from twinfeed.loaders.support.array_types import Array


def write_index(
    path: Path, work: Path, stats: IndexStats, classes: Classes, table: FromTable | None = None, /
) -> None:
    """Merge the parts that `stats` lists into the index `path`, through the folder `work`."""
    stats.check()
    with index_writer(path, work) as store:
        merger = _IndexMerger(store, stats, classes)
        store.add(stats.arrays())
        for part in stats.parts:
            merger.add(load_part(part.file))
        content = merger.finish(table)
        # `left_out` and `broken` are keys of the manifest, the JSON file of an index.
        options = replace(
            stats.options,
            classes_given=bool(classes),
            left_out=sum(part.num_excluded + part.num_skipped for part in stats.parts),
            broken=sum(part.is_incomplete for part in stats.parts),
        )
        store.finish(content, vars(options))


class _ColumnWriter:
    """Write the rows of a field, or the values of a column, and compute a digest of the content.

    The digest is the same for equal records in another container, but for lists, which containers
    encode differently. `digest_input` says what it is of: "crc32c", the CRC of each field; "<i8" or
    "<f8", the values.
    """

    def __init__(self, file: ArrayFile, digest_input: str) -> None:
        self.file, self.digest_input = file, digest_input
        self.digest = hashlib.sha256(f"{digest_input} {list(file.shape)}\n".encode())
        self.num_missing = 0

    def write(self, items: Array) -> None:
        """Append values, or locations, to the file, and update the digest.

        It must be the same in a TFRecord and a tar, so of a location only the CRC is added, or -1.
        """
        self.file.add(items)
        if self.digest_input == "crc32c":  # locations
            is_missing = items["length"] < 0  # the length of a missing field is -1
            crcs = np.where(is_missing, -1, items["crc"].astype(np.int64))  # [71, 72]
            self.digest.update(crcs.astype("<i8").tobytes())
        else:  # values, converted to this dtype
            self.digest.update(items.astype(self.digest_input).tobytes())


class _StringWriter:
    """Write strings to two arrays: all bytes, and the end of each string in these."""

    def __init__(self, store: IndexWriter, name: str, num_strings: int, num_bytes: int) -> None:
        self.name, self.num_written = name, 0
        self.text = store.new(f"{name}-text", "u1", (num_bytes,))
        self.ends = store.new(f"{name}-ends", integer_type(num_bytes), (num_strings,))

    def write(self, batch: RecordBatch) -> None:
        """Write the strings of a record batch, whose ends count from the beginning of the batch."""
        text, ends = batch[f"{self.name}-text"], batch[f"{self.name}-ends"]
        self.text.add(text)
        self.ends.add(ends.astype(np.int64) + self.num_written)
        self.num_written += len(text)


class _IndexMerger:
    """Write the merged arrays of an index, part by part.

    A field with equally many numbers in each record is a column of values. For any other field, an
    array of rows says where the field lies in each record.
    """

    def __init__(self, store: IndexWriter, stats: IndexStats, classes: Classes) -> None:
        self.store, self.stats = store, stats
        self.field_writers: dict[str, _ColumnWriter] = {}
        self.column_writers: dict[str, _ColumnWriter] = {}
        for name, totals in sorted(stats.fields.items()):
            width = stats.column_width(name)
            if width:
                self.new_column(name, "<f4" if totals.kind == "float_list" else "<i8", width)
            else:
                # A row locates the field by the number of a loose file, or else by its offset.
                max_location = stats.num_files or totals.max_offset
                dtype = row_type(max_location, totals.max_length, whole_files=stats.num_files > 0)
                file = store.new(f"field-{len(self.field_writers)}", dtype, (stats.num_records,))
                self.field_writers[name] = _ColumnWriter(file, "crc32c")
        sizes = stats.string_sizes.items()
        self.string_writers = [_StringWriter(store, name, *size) for name, size in sizes]
        self.num_earlier_files = 0  # loose files of the parts that were added so far
        self.num_parts = 0
        self.left_out: list[Array] = []  # pairs of the number of a part, and that of a record
        self.class_names = list(() if classes in (None, "names") else classes)
        self.class_of: dict[Label | None, int] = {}
        if stats.options.label_from:
            self.new_column("label", "<i8", 1)
            self.class_of, self.class_names = assign_classes(
                stats.first_records, classes=classes, background=stats.options.background
            )

    def new_column(self, name: str, dtype: str, width: int) -> None:
        """Create a column of `width` values per record, whose digest is over values of 8 bytes."""
        num_records = self.stats.num_records
        shape = (num_records,) if width == 1 else (num_records, width)
        file = self.store.new(f"column-{len(self.column_writers)}", dtype, shape)
        self.column_writers[name] = _ColumnWriter(file, "<i8" if dtype == "<i8" else "<f8")

    def add(self, part: ShardPart) -> None:
        """Append the arrays of a part to the index, a record batch at a time; see `RecordBatch`."""
        field_numbers = {name: number for number, name in enumerate(part.fields)}
        # For a part with the labels ["dog", "cat"], and the classes ["cat", "cow", "dog"]: [2, 0].
        classes = np.array([self.class_of[label] for label in part.labels], np.int64)
        for batch in part.batches():
            if "leftout" in batch:
                numbers = batch["leftout"]
                self.left_out.append(np.stack([np.full_like(numbers, self.num_parts), numbers], 1))
            for strings in self.string_writers:  # of keys, and of paths of loose files
                if f"{strings.name}-ends" in batch:
                    strings.write(batch)
            if "labels" in batch:  # indices into `part.labels`
                self.column_writers["label"].write(classes[batch["labels"]])
            for name, writer in self.column_writers.items():
                if name in field_numbers:
                    values = batch[f"values-{field_numbers[name]}"]
                    writer.write(values.reshape(-1, *writer.file.shape[1:]))
            for name, writer in self.field_writers.items():
                # None if no record of the batch has the field, or of the whole part, which then has
                # no number for it: there is no array "rows-None".
                rows = batch.get(f"rows-{field_numbers.get(name)}")
                self.add_rows(writer, rows, int(batch["count"]))
        self.num_parts += 1
        self.num_earlier_files += part.num_files

    def add_rows(self, writer: _ColumnWriter, rows: Array | None, num_records: int) -> None:
        """Append where a field is in each record; `rows` is None if no record has it.

        The files of each part are numbered from 0: after 5 files of earlier parts, 0 and 1 become 5
        and 6.
        """
        if rows is None:
            rows = np.array([MISSING_ROW] * num_records, writer.file.dtype)
        rows = rows.astype(writer.file.dtype)
        is_missing = rows["length"] < 0  # -1 in `MISSING_ROW`
        if self.stats.num_files:
            rows["file"][~is_missing] += self.num_earlier_files
        writer.num_missing += int(is_missing.sum())
        writer.write(rows)

    def finish(self, table: FromTable | None) -> dict[str, Any]:
        """Write what needs all parts, and return the manifest's content."""
        stats, store = self.stats, self.store
        if table is not None:
            if "keys" not in stats.string_sizes:
                raise ValueError(
                    "a label table is joined by key, and these records have no keys: name a "
                    "feature with key="
                )
            text, ends = map(store.finish_array, ("keys-text", "keys-ends"))
            table.check(StringColumn(text, ends).tolist())
        label = self.column_writers.get("label")
        order_digest = None
        # There is a class order if the column "label" has one integer per record.
        if label is not None and label.file.dtype.kind == "i" and len(label.file.shape) == 1:
            # An array is called like its file: "column-0" for column-0.npy.
            labels = store.finish_array(label.file.path.stem)
            order_digest = write_class_order(store, labels, self.class_names)
        elif self.class_names:
            raise ValueError(
                "classes= are names of integer labels, and the index has no labels: say with "
                "label= where the labels are"
            )
        if self.left_out:
            pairs = np.concatenate(self.left_out)
            store.add({"leftout": pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]})
        if self.class_names:
            store.add(StringColumn.of(self.class_names).arrays("classes"))
        writers = self.field_writers | self.column_writers
        return {
            "container": stats.options.container,
            "records": stats.num_records,
            "columns": list(self.column_writers),
            "fields": [
                {"name": name, "kind": stats.fields[name].kind, "missing": writer.num_missing}
                for name, writer in self.field_writers.items()
            ],
            "digests": {name: writer.digest.hexdigest() for name, writer in writers.items()},
            "class_order": order_digest,
        }
