"""Merge the parts of all shards into one index: first their totals, then their arrays.

Arrays are read and written a block of records at a time.

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
    assign_classes,
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
    """Merge the parts of all shards, which `stats` lists, and write the index to the folder `path`.

    `classes` are the class names that the caller has given, or None.
    """
    stats.check()
    with index_writer(path) as store:
        merger = _IndexMerger(store, stats, classes)
        store.add(stats.arrays())
        with explain_full_disk(path):
            for file in stats.part_files:
                try:
                    merger.add(load_part(file, check=False))  # reading a block checks its CRC
                except (IndexError, KeyError) as error:  # its statistics name a missing array
                    raise damaged_part(file) from error
            content = merger.finish()
            options = replace(
                stats.options,
                classes_given=bool(classes),
                left_out=stats.num_excluded,
                broken=stats.num_incomplete_shards,
            )
            store.finish(content, vars(options))


class _ColumnWriter:
    """Write the rows of a field, or the values of a column, and compute a digest of the content.

    A row has the location, length and CRC of a field in a record. The digest does not depend on the
    container that holds the records (see docs/index-format.md). `digest_input` says what it covers:

    - "crc32c": the CRC of the field in each record, as int64, and -1 where the field is missing;
    - "<i8", "<f8": the values of a column, as int64 or float64;
    - None: nothing, for a field of lists, which containers encode differently.

    `num_missing` counts the records that lack the field.
    """

    def __init__(
        self, file: ArrayFile, digest_input: Literal["crc32c", "<i8", "<f8"] | None
    ) -> None:
        self.file, self.digest_input = file, digest_input
        self.digest = hashlib.sha256(f"{digest_input} {list(file.shape)}\n".encode())
        self.num_missing = 0

    def write(self, rows: Array) -> None:
        """Write the rows or values of the next records, and add them to the digest."""
        self.file.add(rows)
        if self.digest_input == "crc32c":
            crcs = np.where(rows["length"] < 0, -1, rows["crc"].astype(np.int64))
            self.digest.update(crcs.astype("<i8").tobytes())
        elif self.digest_input is not None:
            self.digest.update(rows.astype(self.digest_input).tobytes())


class _StringWriter:
    """Write strings to two arrays: the bytes of all strings, and the end of each string in these.

    `num_strings` and `num_bytes` are those of all parts together.
    """

    def __init__(self, store: IndexWriter, name: str, num_strings: int, num_bytes: int) -> None:
        self.name, self.num_written = name, 0
        self.text = store.new(f"{name}-text", "u1", (num_bytes,))
        self.ends = store.new(f"{name}-ends", integer_type(num_bytes), (num_strings,))

    def write(self, block: Block) -> None:
        """Write the strings of a block, whose ends count from the beginning of the block."""
        text, ends = block.arrays[f"{self.name}-text"], block.arrays[f"{self.name}-ends"]
        self.text.add(text)
        self.ends.add(ends.astype(np.int64) + self.num_written)
        self.num_written += len(text)


class _IndexMerger:
    """Write the merged arrays of an index, part by part.

    A field that can be a column is written as an array of its values. Of other fields, an array of
    rows says where the field lies in each record. `class_of_name` has the class index of each label
    name of `stats.vocabulary`, and `class_names` the names of the classes by index.
    """

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
                # A row locates the field by the number of a loose file, or else by its offset.
                max_location = stats.num_files or totals.max_offset
                dtype = row_type(max_location, totals.max_length, whole_files=stats.num_files > 0)
                file = store.new(f"field-{len(self.field_writers)}", dtype, (stats.num_records,))
                digest_input: Literal["crc32c"] | None = (
                    "crc32c" if totals.kind == "bytes" else None
                )
                self.field_writers[name] = _ColumnWriter(file, digest_input)
        sizes = stats.string_sizes.items()
        self.string_writers = [_StringWriter(store, name, *size) for name, size in sizes]
        self.num_earlier_files = 0  # the number of loose files of the parts so far
        self.class_names = list(classes or ())
        self.class_indices = np.zeros(0, np.int64)
        if stats.options.label_from:
            self.new_column("label", "<i8", 1)
            if stats.table is None:
                self.set_classes()

    def new_column(self, name: str, dtype: Literal["<i8", "<f4"], width: int) -> None:
        """Create a column with `width` values per record. Floats are stored in 4 bytes.

        The digest of a column is over values of 8 bytes, so it does not depend on the stored type.
        """
        num_records = self.stats.num_records
        shape = (num_records,) if width == 1 else (num_records, width)
        file = self.store.new(f"column-{len(self.column_writers)}", dtype, shape)
        self.column_writers[name] = _ColumnWriter(file, "<i8" if dtype == "<i8" else "<f8")

    def set_classes(self) -> None:
        """Set `class_of_name` and `class_names`, when the label names of all parts are known.

        Integer labels are class indices themselves. Then the only "name" is None, of records
        without a label, and its class is the background. A table may also have integer labels.
        """
        stats, background = self.stats, self.stats.options.background
        names = stats.vocabulary.names
        has_names = "names" in stats.first_labels
        if "integers" in stats.first_labels or (isinstance(background, int) and not has_names):
            labels = [integer_background(background) if name is None else name for name in names]
            self.class_indices = np.array(labels, np.int64)
        else:
            self.class_indices, self.class_names = assign_classes(
                names,
                classes=self.classes,
                background=background,
                from_text=stats.options.label_from in ("field", "file", "table"),
            )

    def add(self, part: ShardPart) -> None:
        """Append the arrays of a part, a block of records at a time.

        A block has the array `rows-N` of field N of the part, and `values-N` if it can be a column
        (see `Block`). It has no `rows-N` if none of its records has the field.
        """
        field_numbers = {name: number for number, name in enumerate(part.fields)}
        # The class of each label name of this part; `names` in a block are indices into it.
        class_of_name = self.class_indices[self.stats.vocabulary.add(part.label_names)]
        for block in part.blocks():
            for strings in self.string_writers:
                if f"{strings.name}-ends" in block.arrays:
                    strings.write(block)
            if "names" in block.arrays:
                self.column_writers["label"].write(class_of_name[block.arrays["names"]])
            elif "labels" in block.arrays:
                self.column_writers["label"].write(block.arrays["labels"])
            for name, writer in self.column_writers.items():
                if name in field_numbers:
                    values = block.arrays[f"values-{field_numbers[name]}"]
                    writer.write(values.reshape(block.num_records, *writer.file.shape[1:]))
            for name, writer in self.field_writers.items():
                rows = block.arrays.get(f"rows-{field_numbers.get(name)}")
                self.add_rows(writer, rows, block.num_records)
        self.num_earlier_files += part.num_files

    def add_rows(self, writer: _ColumnWriter, rows: Array | None, num_records: int) -> None:
        """Append the rows of a field for a block of records; None if no record has the field.

        In a part, loose files are numbered from 0. In the index, they follow those of other parts.
        """
        if rows is None:
            rows = np.array([MISSING_ROW] * num_records, writer.file.dtype)
        rows = rows.astype(writer.file.dtype)
        is_missing = rows["length"] < 0  # -1 in `MISSING_ROW`
        if self.stats.num_files:
            rows["file"][~is_missing] += self.num_earlier_files
        writer.num_missing += int(is_missing.sum())
        writer.write(rows)

    def join_table(self, table: FromTable) -> None:
        """Write the label of each record, looked up by key in a table, as the column "label".

        The keys of all parts were written before. Here they are read again.
        """
        text, ends = map(self.store.finish_array, ("keys-text", "keys-ends"))
        keys = StringColumn(text, ends)
        has_background = self.stats.options.background is not None
        labels = table.match(keys.tolist(), partial=has_background)
        label_ids = self.stats.vocabulary.add(labels)
        self.set_classes()
        self.column_writers["label"].write(self.class_indices[label_ids])

    def finish(self) -> dict[str, Any]:
        """Write the class order, the class names and the labels of a table, after the last part.

        Returns:
            the content of the manifest, without the options and the list of arrays.
        """
        stats, store = self.stats, self.store
        if stats.table is not None:
            self.join_table(stats.table)
        label, order_digest = self.column_writers.get("label"), None
        # A class order needs one integer per record. It may also come from a field "label".
        if label is not None and label.digest_input == "<i8" and len(label.file.shape) == 1:
            array_name = label.file.path.stem  # such as "column-0"
            labels = store.finish_array(array_name)
            order_digest = write_class_order(store, labels, self.class_names)
        elif self.class_names:
            raise ValueError(
                "classes= are names of integer labels, and the index has no labels: say with "
                "label= where the labels are"
            )
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
            "digests": {
                name: w.digest.hexdigest() for name, w in writers.items() if w.digest_input
            },
            "class_order": order_digest,
        }
