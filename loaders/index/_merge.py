"""Merge the parts of all shards into one index: their arrays as a stream, after their facts.

Memory grows with the number of shards, fields and classes, and not with the number of records. A
table of labels is held in memory, together with the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from twinfeed.loaders._atomic import room_for
from twinfeed.loaders._checks import Array, Int64s
from twinfeed.loaders.index._class_order import write_class_order
from twinfeed.loaders.index._digests import ContentDigest
from twinfeed.loaders.index._numbering import (
    Numbering,
    check_range,
    class_numbers,
    pieces,
    whole_background,
)
from twinfeed.loaders.index._parts import Block, ShardPart, damaged_part, load_part
from twinfeed.loaders.index._rows import missing_rows, row_type, unsigned
from twinfeed.loaders.index._store import ArrayFile, Store, new_store
from twinfeed.loaders.index._strings import StringColumn
from twinfeed.loaders.index._survey import FieldSurvey, Survey
from twinfeed.loaders.index.labels import FromTable


def write_index(path: Path, survey: Survey, /, *, classes: Sequence[str] | None) -> None:
    """Write the index of the parts that were surveyed, in their order, to the folder `path`."""
    survey.check()
    with new_store(path) as store:
        merge = _Merge(store, survey)
        store.add(survey.arrays())
        with room_for(path, sum(file.size for file in store.open.values())):
            for file in survey.parts:
                try:
                    merge.add(load_part(file, check=False))
                except (IndexError, KeyError) as error:
                    raise damaged_part(file) from error
            facts = merge.finish(classes)
            options = replace(
                survey.options,
                classes_given=bool(classes),
                left_out=survey.left_out,
                broken=survey.broken,
                tags=survey.tags if any(survey.tags) else (),
            )
            store.finish(facts, options.facts())


class _Out:
    """Write a table or a column, and take the digest of what it holds; `missing` counts the records
    that lack the field.
    """

    def __init__(self, file: ArrayFile, digest: str | None) -> None:
        self.file = file
        self.digest = None if digest is None else ContentDigest(file.shape, digest)
        self.missing = 0

    def write(self, piece: Array) -> None:
        """Add the next records."""
        self.file.add(piece)
        if self.digest is not None:
            self.digest.add(piece)


class _Strings:
    """Write a column of strings."""

    def __init__(self, store: Store, name: str, strings: int, size: int) -> None:
        self.name = name
        self.text = store.new(f"{name}-text", "u1", (size,))
        self.ends = store.new(f"{name}-ends", unsigned(size), (strings,))
        self.size = 0

    def write(self, block: Block) -> None:
        """Add the strings of a block."""
        text, ends = block.arrays[f"{self.name}-text"], block.arrays[f"{self.name}-ends"]
        self.text.add(text)
        self.ends.add(ends.astype(np.int64) + self.size)
        self.size += len(text)


class _Merge:
    """Write the arrays of an index, part after part."""

    def __init__(self, store: Store, survey: Survey) -> None:
        self.store = store
        self.survey = survey
        self.fields: dict[str, _Out] = {}
        self.columns: dict[str, _Out] = {}
        for name in sorted(survey.fields):
            self.new_field(name, survey.fields[name])
        self.strings = [_Strings(store, name, *told) for name, told in survey.strings.items()]
        self.files_before = 0
        self.labels = _Labels(store, survey) if survey.options.label_from else None

    def new_field(self, name: str, found: FieldSurvey) -> None:
        """Begin the column or the table of a field."""
        survey, (kind,) = self.survey, found.kinds
        width = found.width(survey.filled)
        if width:
            shape = (survey.records,) if width == 1 else (survey.records, width)
            kept, read = ("<f4", "<f8") if kind == "float_list" else ("<i8", "<i8")
            file = self.store.new(f"column-{len(self.columns)}", kept, shape)
            self.columns[name] = _Out(file, read)
            return
        where = survey.files or found.offset
        rows = row_type(where, found.length, whole_files=survey.files > 0)
        file = self.store.new(f"field-{len(self.fields)}", rows, (survey.records,))
        self.fields[name] = _Out(file, "crc32c" if kind == "bytes" else None)

    def add(self, part: ShardPart) -> None:
        """Add the arrays of a part."""
        place = {name: n for n, name in enumerate(part.fields)}
        names = self.labels.numbers_of(part) if self.labels else None
        for block in self.survey.blocks(part):
            for strings in self.strings:
                if f"{strings.name}-ends" in block.arrays:
                    strings.write(block)
            if not block.records:
                continue
            for name, out in self.columns.items():
                values = block.arrays[f"values-{place[name]}"]
                out.write(values.reshape(block.records, *out.file.shape[1:]))
            for name, out in self.fields.items():
                self.add_rows(out, block.arrays.get(f"rows-{place.get(name)}"), block.records)
            if self.labels and "labels" in block.arrays:
                self.labels.add(block, names)
        self.files_before += part.strings.get("files", (0, 0))[0]

    def add_rows(self, out: _Out, rows: Array | None, records: int) -> None:
        """Add the rows of a field, which a part may lack altogether."""
        if rows is None:
            rows = missing_rows(records, out.file.dtype)
        rows = rows.astype(out.file.dtype)
        held = rows["length"] >= 0
        if self.survey.files:
            rows["file"][held] += self.files_before
        out.missing += records - int(held.sum())
        out.write(rows)

    def finish(self, classes: Sequence[str] | None) -> dict[str, Any]:
        """Write what takes all records to know, and return the facts of the index."""
        survey, store = self.survey, self.store
        names = list(classes or ())
        if self.labels:
            if survey.table is not None:
                self.labels.join(survey.table)
            names = self.labels.finish(self.new_label(), classes)
        label = self.columns.get("label")
        order = None
        if label is not None and label.file.dtype.kind == "i" and len(label.file.shape) == 1:
            values = store.finished(label.file.file.stem)
            if names:
                check_range(values, names)
            order = write_class_order(store, values)
        elif names:
            raise ValueError(
                "classes= names integer labels, and there are none: say where they are with label="
            )
        outs = self.fields | self.columns
        return {
            "container": survey.options.container,
            "records": survey.records,
            "classes": names,
            "columns": list(self.columns),
            "fields": [
                {
                    "name": name,
                    "kind": next(iter(survey.fields[name].kinds)),
                    "missing": out.missing,
                }
                for name, out in self.fields.items()
            ],
            "digests": {n: out.digest.hexdigest() for n, out in outs.items() if out.digest},
            "class_order": order,
        }

    def new_label(self) -> _Out:
        """Begin the column of the labels."""
        file = self.store.new(f"column-{len(self.columns)}", "<i8", (self.survey.records,))
        self.columns["label"] = _Out(file, "<i8")
        return self.columns["label"]


class _Labels:
    """Write the labels of all records twice: as the numbers that names have until all names are
    known, in a file that does not stay, and then as the column of the index.
    """

    def __init__(self, store: Store, survey: Survey) -> None:
        self.store = store
        self.survey = survey
        self.numbering = Numbering()
        self.file = store.new("labels", "<i8", (survey.records,))

    def numbers_of(self, part: ShardPart) -> Int64s | None:
        """Return the numbers of the names of a part."""
        return None if self.survey.whole else self.numbering.of(part.names)

    def add(self, block: Block, names: Int64s | None) -> None:
        """Add the labels of a block."""
        numbers = block.arrays["labels"]
        numbers = numbers.copy() if names is None or not len(names) else names[numbers]
        without = block.arrays["unlabelled"]
        if len(without):
            numbers[without] = self.background
        self.file.add(numbers)

    def join(self, table: FromTable) -> None:
        """Take the labels of a table by the keys, which are written already."""
        survey = self.survey
        keys = StringColumn(self.store.finished("keys-text"), self.store.finished("keys-ends"))
        labels = table.match(keys.tolist(), partial=survey.options.background is not None)
        if self.survey.whole:
            filled = [self.background if label is None else label for label in labels]
            self.file.add(np.array(filled, np.int64))
        else:
            self.file.add(self.numbering.of(labels))

    @property
    def background(self) -> int:
        """The number of a record without a label, while labels are collected."""
        if self.survey.whole:
            return whole_background(self.survey.options.background)
        return int(self.numbering.of([None])[0])

    def finish(self, out: _Out, classes: Sequence[str] | None) -> list[str]:
        """Write the column, and return the names of the classes."""
        names, numbers = list(classes or ()), None
        if not self.survey.whole:
            numbers, names = class_numbers(
                self.numbering.names,
                classes=classes,
                background=self.survey.options.background,
                from_text=self.survey.options.label_from in ("field", "table"),
            )
        for piece in pieces(self.store.taken("labels")):
            out.write(piece if numbers is None else numbers[piece])
        return names
