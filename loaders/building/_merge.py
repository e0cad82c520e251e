"""Merge the parts of all shards into one index: first their facts, then their arrays, in blocks.

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
    check_range,
    class_numbers,
    whole_background,
    write_class_order,
)
from twinfeed.loaders.building._part_stats import Survey
from twinfeed.loaders.building._parts import Block, ShardPart, damaged_part, load_part
from twinfeed.loaders.building.labels import FromTable
from twinfeed.loaders.building.writer import ArrayFile, IndexWriter, index_writer
from twinfeed.loaders.index.arrays import StringColumn, missing_rows, row_type, unsigned
from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.support.atomic import room_for


def write_index(path: Path, survey: Survey, /, *, classes: Sequence[str] | None) -> None:
    """Write the index of the surveyed parts, in their order, to the folder `path`."""
    survey.check()
    with index_writer(path) as store:
        merge = _Merge(store, survey, classes)
        store.add(survey.arrays())
        with room_for(path):
            for file in survey.parts:
                try:
                    merge.add(load_part(file, check=False))
                except (IndexError, KeyError) as error:
                    raise damaged_part(file) from error
            facts = merge.finish()
            options = replace(
                survey.options,
                classes_given=bool(classes),
                left_out=survey.left_out,
                broken=survey.broken,
            )
            store.finish(facts, vars(options))


class _Out:
    """Write a table or a column, and take the digest of contents (see docs/index-format.md).

    Lists have no digest and no `kind`, since each container stores lists in its own way. `missing`
    counts the records without the field.
    """

    def __init__(self, file: ArrayFile, kind: Literal["crc32c", "<i8", "<f8"] | None) -> None:
        self.file, self.kind = file, kind
        self.digest = hashlib.sha256(f"{kind} {list(file.shape)}\n".encode())
        self.missing = 0

    def write(self, piece: Array) -> None:
        """Add the next records."""
        self.file.add(piece)
        if self.kind == "crc32c":
            piece = np.where(piece["length"] < 0, -1, piece["crc"].astype(np.int64))
        if self.kind is not None:
            self.digest.update(piece.astype("<f8" if self.kind == "<f8" else "<i8").tobytes())


class _Strings:
    """Write a column of strings."""

    def __init__(self, store: IndexWriter, name: str, strings: int, size: int) -> None:
        self.name, self.size = name, 0
        self.text = store.new(f"{name}-text", "u1", (size,))
        self.ends = store.new(f"{name}-ends", unsigned(size), (strings,))

    def write(self, block: Block) -> None:
        """Add the strings of a block."""
        text, ends = block.arrays[f"{self.name}-text"], block.arrays[f"{self.name}-ends"]
        self.text.add(text)
        self.ends.add(ends.astype(np.int64) + self.size)
        self.size += len(text)


class _Merge:
    """Write the arrays of an index, part after part."""

    def __init__(self, store: IndexWriter, survey: Survey, classes: Sequence[str] | None) -> None:
        self.store, self.survey, self.classes = store, survey, classes
        self.fields: dict[str, _Out] = {}
        self.columns: dict[str, _Out] = {}
        for name, found in sorted(survey.fields.items()):
            width = found.width(survey.filled)
            if width:
                self.new_column(name, "<f4" if found.kind == "float_list" else "<i8", width)
            else:
                where = survey.files or found.offset
                rows = row_type(where, found.length, whole_files=survey.files > 0)
                file = store.new(f"field-{len(self.fields)}", rows, (survey.records,))
                self.fields[name] = _Out(file, "crc32c" if found.kind == "bytes" else None)
        self.strings = [_Strings(store, name, *sizes) for name, sizes in survey.strings.items()]
        self.files_before = 0
        self.names = list(classes or ())
        self.numbers = np.zeros(0, np.int64)  # the class of each name, as the survey numbers names
        if survey.options.label_from:
            self.new_column("label", "<i8", 1)
            if survey.table is None:
                self.number_classes()

    def new_column(self, name: str, dtype: Literal["<i8", "<f4"], width: int) -> None:
        """Begin a column with `width` numbers per record."""
        records = self.survey.records
        shape = (records,) if width == 1 else (records, width)
        file = self.store.new(f"column-{len(self.columns)}", dtype, shape)
        self.columns[name] = _Out(file, "<i8" if dtype == "<i8" else "<f8")

    def number_classes(self) -> None:
        """Number the classes, once all names of labels are known."""
        survey, background = self.survey, self.survey.options.background
        names = survey.numbering.names
        if survey.whole:
            whole = [whole_background(background) if name is None else name for name in names]
            self.numbers = np.array(whole, np.int64)
        else:
            self.numbers, self.names = class_numbers(
                names,
                classes=self.classes,
                background=background,
                from_text=survey.options.label_from in ("field", "table"),
            )

    def add(self, part: ShardPart) -> None:
        """Add the arrays of a part."""
        survey = self.survey
        labelled = survey.options.label_from is not None and survey.table is None
        place = {name: n for n, name in enumerate(part.fields)}
        names = self.numbers[survey.numbering.of(part.names)] if labelled else self.numbers
        for block in part.blocks():
            for strings in self.strings:
                if f"{strings.name}-ends" in block.arrays:
                    strings.write(block)
            if not block.records:
                continue
            if labelled:
                labels = block.arrays.get("labels")
                labels = names[block.arrays["names"]] if labels is None else labels
                self.columns["label"].write(labels)
            for name, out in self.columns.items():
                if name in place:
                    values = block.arrays[f"values-{place[name]}"]
                    out.write(values.reshape(block.records, *out.file.shape[1:]))
            for name, out in self.fields.items():
                self.add_rows(out, block.arrays.get(f"rows-{place.get(name)}"), block.records)
        self.files_before += part.files

    def add_rows(self, out: _Out, rows: Array | None, records: int) -> None:
        """Add the rows of a field; None is for a part without the field."""
        if rows is None:
            rows = missing_rows(records, out.file.dtype)
        rows = rows.astype(out.file.dtype)
        held = rows["length"] >= 0
        if self.survey.files:
            rows["file"][held] += self.files_before
        out.missing += records - int(held.sum())
        out.write(rows)

    def join(self, table: FromTable) -> None:
        """Add the labels of a table by key, after the keys are written."""
        keys = StringColumn(self.store.finished("keys-text"), self.store.finished("keys-ends"))
        partial = self.survey.options.background is not None
        labels = self.survey.numbering.of(table.match(keys.tolist(), partial=partial))
        self.number_classes()
        self.columns["label"].write(self.numbers[labels])

    def finish(self) -> dict[str, Any]:
        """Write the arrays that depend on all records, and return the facts of the index."""
        survey, store = self.survey, self.store
        if survey.table is not None:
            self.join(survey.table)
        label, order = self.columns.get("label"), None
        if label is not None and label.kind == "<i8" and len(label.file.shape) == 1:
            values = store.finished(label.file.file.stem)
            if self.names:
                check_range(values, self.names)
            order = write_class_order(store, values)
        elif self.names:
            raise ValueError(
                "classes= names integer labels, and the index has no labels: say with label= where "
                "the labels are"
            )
        if self.names:
            store.add(StringColumn.of(self.names).arrays("classes"))
        outs = self.fields | self.columns
        return {
            "container": survey.options.container,
            "records": survey.records,
            "columns": list(self.columns),
            "fields": [
                {"name": name, "kind": survey.fields[name].kind, "missing": out.missing}
                for name, out in self.fields.items()
            ],
            "digests": {n: out.digest.hexdigest() for n, out in outs.items() if out.kind},
            "class_order": order,
        }
