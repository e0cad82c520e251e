"""Merge the parts of all shards into one index: first their totals, then their arrays by blocks.

Memory grows with the number of shards, fields and classes, not with the number of records. Only a
table of labels and its keys are loaded as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from twinfeed.loaders.building._classes import (
    class_numbers,
    integer_background,
    write_class_order,
)
from twinfeed.loaders.building._part_stats import IndexStats
from twinfeed.loaders.building._parts import Block, ShardPart, damaged_part, load_part
from twinfeed.loaders.building.labels import FromTable
from twinfeed.loaders.building.writer import ArrayFile, IndexWriter, index_writer
from twinfeed.loaders.index.arrays import MISSING_ROW, StringColumn, integer_type, row_type
from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.support.atomic import explain_full_disk


def write_index(path: Path, stats: IndexStats, /, *, classes: Sequence[str] | None) -> None:
    """Merge the parts of `stats`, one of each shard, in order; write the index to folder `path`."""
    stats.check()
    with index_writer(path) as store:
        merge = _IndexMerger(store, stats, classes)
        store.add(stats.arrays())
        with explain_full_disk(path):
            for file in stats.part_files:
                try:
                    merge.add(load_part(file, check=False))
                except (IndexError, KeyError) as error:
                    raise damaged_part(file) from error
            entries = merge.finish()
            options = replace(
                stats.options,
                classes_given=bool(classes),
                left_out=stats.num_excluded,
                broken=stats.num_cut_shards,
            )
            store.finish(entries, vars(options))


class _ColumnWriter:
    """Write the rows of a field, or the values of a column, with a digest of the content.

    See docs/index-format.md. Lists have no digest and no `kind`, since containers encode lists
    differently. `missing` counts the records in which the field is missing.
    """

    def __init__(self, file: ArrayFile, kind: Literal["crc32c", "<i8", "<f8"] | None) -> None:
        self.file, self.kind = file, kind
        self.digest = hashlib.sha256(f"{kind} {list(file.shape)}\n".encode())
        self.missing = 0

    def write(self, rows: Array) -> None:
        """Write the rows or values of the next records."""
        self.file.add(rows)
        if self.kind == "crc32c":
            rows = np.where(rows["length"] < 0, -1, rows["crc"].astype(np.int64))
        if self.kind is not None:
            self.digest.update(rows.astype("<f8" if self.kind == "<f8" else "<i8").tobytes())


class _StringWriter:
    """Write a column of strings: all of their bytes, and the end of each string in these."""

    def __init__(self, store: IndexWriter, name: str, strings: int, size: int) -> None:
        self.name, self.size = name, 0
        self.text = store.new(f"{name}-text", "u1", (size,))
        self.ends = store.new(f"{name}-ends", integer_type(size), (strings,))

    def write(self, block: Block) -> None:
        """Write the strings of a block."""
        text, ends = block.arrays[f"{self.name}-text"], block.arrays[f"{self.name}-ends"]
        self.text.add(text)
        self.ends.add(ends.astype(np.int64) + self.size)
        self.size += len(text)


class _IndexMerger:
    """Write the merged arrays of an index, part by part."""

    def __init__(
        self, store: IndexWriter, stats: IndexStats, classes: Sequence[str] | None
    ) -> None:
        self.store, self.stats, self.classes = store, stats, classes
        self.field_writers: dict[str, _ColumnWriter] = {}
        self.column_writers: dict[str, _ColumnWriter] = {}
        for name, totals in sorted(stats.fields.items()):
            width = totals.column_width(stats.num_nonempty_shards)
            if width:
                self.new_column(name, "<f4" if totals.kind == "float_list" else "<i8", width)
            else:
                largest = stats.num_files or totals.max_offset  # a row has a file number or an offset
                rows = row_type(largest, totals.max_length, whole_files=stats.num_files > 0)
                file = store.new(f"field-{len(self.field_writers)}", rows, (stats.num_records,))
                self.field_writers[name] = _ColumnWriter(
                    file, "crc32c" if totals.kind == "bytes" else None
                )
        self.string_writers = [_StringWriter(store, name, *sizes) for name, sizes in stats.string_sizes.items()]
        self.num_files_before = 0
        self.class_names = list(classes or ())
        self.class_of_name = np.zeros(0, np.int64)  # the class of each name of `stats.vocabulary`
        if stats.options.label_from:
            self.new_column("label", "<i8", 1)
            if stats.table is None:
                self.number_classes()

    def new_column(self, name: str, dtype: Literal["<i8", "<f4"], width: int) -> None:
        """Create a column with `width` values per record."""
        records = self.stats.num_records
        shape = (records,) if width == 1 else (records, width)
        file = self.store.new(f"column-{len(self.column_writers)}", dtype, shape)
        self.column_writers[name] = _ColumnWriter(file, "<i8" if dtype == "<i8" else "<f8")

    def number_classes(self) -> None:
        """Set the class number of each label name, when the names of all parts are known."""
        stats, background = self.stats, self.stats.options.background
        names = stats.vocabulary.names
        if stats.integer_labels:
            labels = [integer_background(background) if name is None else name for name in names]
            self.class_of_name = np.array(labels, np.int64)
        else:
            self.class_of_name, self.class_names = class_numbers(
                names,
                classes=self.classes,
                background=background,
                from_text=stats.options.label_from in ("field", "file", "table"),
            )

    def add(self, part: ShardPart) -> None:
        """Append the arrays of a part, a block of records at a time."""
        stats = self.stats
        has_labels = stats.options.label_from is not None and stats.table is None
        field_numbers = {name: number for number, name in enumerate(part.fields)}
        if has_labels:
            class_of_name = self.class_of_name[stats.vocabulary.add(part.label_names)]
        for block in part.blocks():
            for strings in self.string_writers:
                if f"{strings.name}-ends" in block.arrays:
                    strings.write(block)
            if not block.num_records:
                continue
            if has_labels:
                labels = block.arrays.get("labels")
                labels = class_of_name[block.arrays["names"]] if labels is None else labels
                self.column_writers["label"].write(labels)
            for name, writer in self.column_writers.items():
                if name in field_numbers:
                    values = block.arrays[f"values-{field_numbers[name]}"]
                    writer.write(values.reshape(block.num_records, *writer.file.shape[1:]))
            for name, writer in self.field_writers.items():
                rows = block.arrays.get(f"rows-{field_numbers.get(name)}")
                self.add_rows(writer, rows, block.num_records)
        self.num_files_before += part.num_files

    def add_rows(self, writer: _ColumnWriter, rows: Array | None, records: int) -> None:
        """Append the rows of a field for a block of records; None if no record has the field."""
        if rows is None:
            rows = np.array([MISSING_ROW] * records, writer.file.dtype)
        rows = rows.astype(writer.file.dtype)
        is_missing = rows["length"] < 0
        if self.stats.num_files:
            rows["file"][~is_missing] += self.num_files_before
        writer.missing += int(is_missing.sum())
        writer.write(rows)

    def join_table(self, table: FromTable) -> None:
        """Write the labels of a table, joined by key, after the keys were written."""
        text, ends = map(self.store.finish_array, ("keys-text", "keys-ends"))
        keys = StringColumn(text, ends)
        partial = self.stats.options.background is not None
        name_numbers = self.stats.vocabulary.add(table.match(keys.tolist(), partial=partial))
        self.number_classes()
        self.column_writers["label"].write(self.class_of_name[name_numbers])

    def finish(self) -> dict[str, Any]:
        """Write the arrays that depend on all records; return the entries of the manifest."""
        stats, store = self.stats, self.store
        if stats.table is not None:
            self.join_table(stats.table)
        label, order = self.column_writers.get("label"), None
        if label is not None and label.kind == "<i8" and len(label.file.shape) == 1:
            values = store.finish_array(label.file.file.stem)
            order = write_class_order(store, values, self.class_names)
        elif self.class_names:
            raise ValueError(
                "classes= names integer labels, and the index has no labels: name the source "
                "of the labels with label="
            )
        if self.class_names:
            store.add(StringColumn.of(self.class_names).arrays("classes"))
        writers = self.field_writers | self.column_writers
        return {
            "container": stats.options.container,
            "records": stats.num_records,
            "columns": list(self.column_writers),
            "fields": [
                {"name": name, "kind": stats.fields[name].kind, "missing": writer.missing}
                for name, writer in self.field_writers.items()
            ],
            "digests": {name: w.digest.hexdigest() for name, w in writers.items() if w.kind},
            "class_order": order,
        }
