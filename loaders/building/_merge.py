"""Merge the parts of all shards into one index, in two passes: totals, then arrays by blocks.

Memory grows with the number of shards, fields and classes, not with the number of records. Only a
table of labels and its keys are held in memory as a whole.
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
from twinfeed.loaders.support.atomic import naming_full_disk


def write_index(path: Path, stats: IndexStats, /, *, classes: Sequence[str] | None) -> None:
    """Write the index of the parts of `stats`, in their order, to the folder `path`."""
    stats.check()
    with index_writer(path) as store:
        merge = _IndexMerger(store, stats, classes)
        store.add(stats.arrays())
        with naming_full_disk(path):
            for file in stats.parts:
                try:
                    merge.add(load_part(file, check=False))
                except (IndexError, KeyError) as error:
                    raise damaged_part(file) from error
            entries = merge.finish()
            options = replace(
                stats.options,
                classes_given=bool(classes),
                left_out=stats.num_excluded,
                broken=stats.broken,
            )
            store.finish(entries, vars(options))


class _ColumnWriter:
    """The writer of a table or column, with its content digest (see docs/index-format.md).

    Lists have no digest and no `kind`, since containers encode lists differently. `missing`
    counts the records without the field.
    """

    def __init__(self, file: ArrayFile, kind: Literal["crc32c", "<i8", "<f8"] | None) -> None:
        self.file, self.kind = file, kind
        self.digest = hashlib.sha256(f"{kind} {list(file.shape)}\n".encode())
        self.missing = 0

    def write(self, rows: Array) -> None:
        """Add the next records."""
        self.file.add(rows)
        if self.kind == "crc32c":
            rows = np.where(rows["length"] < 0, -1, rows["crc"].astype(np.int64))
        if self.kind is not None:
            self.digest.update(rows.astype("<f8" if self.kind == "<f8" else "<i8").tobytes())


class _StringWriter:
    """The writer of a column of strings."""

    def __init__(self, store: IndexWriter, name: str, strings: int, size: int) -> None:
        self.name, self.size = name, 0
        self.text = store.new(f"{name}-text", "u1", (size,))
        self.ends = store.new(f"{name}-ends", integer_type(size), (strings,))

    def write(self, block: Block) -> None:
        """Add the strings of a block."""
        text, ends = block.arrays[f"{self.name}-text"], block.arrays[f"{self.name}-ends"]
        self.text.add(text)
        self.ends.add(ends.astype(np.int64) + self.size)
        self.size += len(text)


class _IndexMerger:
    """The writer of the merged arrays of an index, part by part."""

    def __init__(
        self, store: IndexWriter, stats: IndexStats, classes: Sequence[str] | None
    ) -> None:
        self.store, self.stats, self.classes = store, stats, classes
        self.fields: dict[str, _ColumnWriter] = {}
        self.columns: dict[str, _ColumnWriter] = {}
        for name, totals in sorted(stats.fields.items()):
            width = totals.width(stats.nonempty)
            if width:
                self.new_column(name, "<f4" if totals.kind == "float_list" else "<i8", width)
            else:
                where = stats.files or totals.offset
                rows = row_type(where, totals.length, whole_files=stats.files > 0)
                file = store.new(f"field-{len(self.fields)}", rows, (stats.records,))
                self.fields[name] = _ColumnWriter(
                    file, "crc32c" if totals.kind == "bytes" else None
                )
        self.strings = [_StringWriter(store, name, *sizes) for name, sizes in stats.strings.items()]
        self.files_before = 0
        self.names = list(classes or ())
        self.numbers = np.zeros(0, np.int64)  # the class of each name of `stats.name_numbers`
        if stats.options.label_from:
            self.new_column("label", "<i8", 1)
            if stats.table is None:
                self.number_classes()

    def new_column(self, name: str, dtype: Literal["<i8", "<f4"], width: int) -> None:
        """Create a column with `width` values per record."""
        records = self.stats.records
        shape = (records,) if width == 1 else (records, width)
        file = self.store.new(f"column-{len(self.columns)}", dtype, shape)
        self.columns[name] = _ColumnWriter(file, "<i8" if dtype == "<i8" else "<f8")

    def number_classes(self) -> None:
        """Number the classes; all names of labels must be known."""
        stats, background = self.stats, self.stats.options.background
        names = stats.name_numbers.names
        if stats.integer_labels:
            labels = [integer_background(background) if name is None else name for name in names]
            self.numbers = np.array(labels, np.int64)
        else:
            self.numbers, self.names = class_numbers(
                names,
                classes=self.classes,
                background=background,
                from_text=stats.options.label_from in ("field", "file", "table"),
            )

    def add(self, part: ShardPart) -> None:
        """Add the arrays of a part."""
        stats = self.stats
        has_labels = stats.options.label_from is not None and stats.table is None
        numbers = {name: n for n, name in enumerate(part.fields)}
        names = self.numbers[stats.name_numbers.of(part.names)] if has_labels else self.numbers
        for block in part.blocks():
            for strings in self.strings:
                if f"{strings.name}-ends" in block.arrays:
                    strings.write(block)
            if not block.records:
                continue
            if has_labels:
                labels = block.arrays.get("labels")
                labels = names[block.arrays["names"]] if labels is None else labels
                self.columns["label"].write(labels)
            for name, writer in self.columns.items():
                if name in numbers:
                    values = block.arrays[f"values-{numbers[name]}"]
                    writer.write(values.reshape(block.records, *writer.file.shape[1:]))
            for name, writer in self.fields.items():
                self.add_rows(writer, block.arrays.get(f"rows-{numbers.get(name)}"), block.records)
        self.files_before += part.files

    def add_rows(self, writer: _ColumnWriter, rows: Array | None, records: int) -> None:
        """Add rows of a field, None for a part without the field."""
        if rows is None:
            rows = np.array([MISSING_ROW] * records, writer.file.dtype)
        rows = rows.astype(writer.file.dtype)
        present = rows["length"] >= 0
        if self.stats.files:
            rows["file"][present] += self.files_before
        writer.missing += records - int(present.sum())
        writer.write(rows)

    def join_table(self, table: FromTable) -> None:
        """Add the labels of a table by key, after the keys are written."""
        text, ends = map(self.store.finish_array, ("keys-text", "keys-ends"))
        keys = StringColumn(text, ends)
        partial = self.stats.options.background is not None
        labels = self.stats.name_numbers.of(table.match(keys.tolist(), partial=partial))
        self.number_classes()
        self.columns["label"].write(self.numbers[labels])

    def finish(self) -> dict[str, Any]:
        """Write the arrays that depend on all records; return the entries of the manifest."""
        stats, store = self.stats, self.store
        if stats.table is not None:
            self.join_table(stats.table)
        label, order = self.columns.get("label"), None
        if label is not None and label.kind == "<i8" and len(label.file.shape) == 1:
            values = store.finish_array(label.file.file.stem)
            order = write_class_order(store, values, self.names)
        elif self.names:
            raise ValueError(
                "classes= names integer labels, and the index has no labels: name the source "
                "of the labels with label="
            )
        if self.names:
            store.add(StringColumn.of(self.names).arrays("classes"))
        writers = self.fields | self.columns
        return {
            "container": stats.options.container,
            "records": stats.records,
            "columns": list(self.columns),
            "fields": [
                {"name": name, "kind": stats.fields[name].kind, "missing": writer.missing}
                for name, writer in self.fields.items()
            ],
            "digests": {name: w.digest.hexdigest() for name, w in writers.items() if w.kind},
            "class_order": order,
        }
