"""Merge the parts of all shards into one index: first their facts, then their arrays as a stream.

Memory grows with the number of shards, fields and classes, and not with the number of records. A
table of labels is held in memory, together with the keys.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from twinfeed.loaders._checks import Array, Int64s
from twinfeed.loaders.atomic import room_for
from twinfeed.loaders.errors import ShardWarning
from twinfeed.loaders.index._class_order import write_class_order
from twinfeed.loaders.index._digests import ContentDigest
from twinfeed.loaders.index._numbering import (
    Numbering,
    check_range,
    class_numbers,
    pieces,
    whole_background,
)
from twinfeed.loaders.index._parts import Block, FieldFacts, ShardPart, damaged_part, load_part
from twinfeed.loaders.index._rows import missing_rows, row_type, unsigned
from twinfeed.loaders.index._store import ArrayFile, Store, new_store
from twinfeed.loaders.index._strings import StringColumn
from twinfeed.loaders.index.labels import FromTable, label_clash
from twinfeed.loaders.index.opened import SHARD
from twinfeed.loaders.index.options import IndexOptions
from twinfeed.loaders.limits import LIMITS


@dataclass
class _Found:
    """Sum up a field over all shards: the first that has it, how many with records do, and its
    facts there.
    """

    path: str
    kinds: set[str] = field(default_factory=set)
    widths: set[int] = field(default_factory=set)
    offset: int = 0
    length: int = 0
    shards: int = 0

    def add(self, facts: FieldFacts, records: int) -> None:
        """Take in the facts of one shard."""
        self.kinds.add(facts.kind)
        self.offset = max(self.offset, facts.offset)
        self.length = max(self.length, facts.length)
        if records:
            self.widths.add(facts.width)
            self.shards += 1

    def width(self, filled: int) -> int:
        """Return how many numbers each record has of a feature that becomes a column, 0 for a
        field that becomes a table; `filled` is the number of shards with records.
        """
        whole = len(self.widths) == 1 and self.shards == filled
        return next(iter(self.widths)) if whole else 0


class Survey:
    """Sum up the facts of parts; of the parts only the files are kept."""

    def __init__(self, table: FromTable | None) -> None:
        self.table = table
        self.options = IndexOptions()
        self.parts: list[Path] = []
        self.paths: list[str] = []
        self.sizes, self.stops, self.headers = array("q"), array("q"), array("L")
        self.sums = bytearray()
        self.records = self.files = self.file_bytes = self.key_bytes = 0
        self.keys = self.left_out = self.broken = self.filled = 0
        self.fields: dict[str, _Found] = {}
        self.integers: str | None = None
        self.named: tuple[str, str] | None = None
        for label in table.labels.values() if table is not None else ():
            if isinstance(label, str):
                self.named = "the table", label
            else:
                self.integers = "the table"

    def add(self, part: ShardPart) -> None:
        """Take in the facts of one part."""
        if not self.parts:
            self.options = part.options
            if self.table is not None:
                self.options = replace(part.options, label_from="table")
        records, key_bytes = part.records, part.key_bytes
        if self.skips:
            kept = [(b.records, len(b.arrays["keys-text"])) for b in self.blocks(part) if b.records]
            records, key_bytes = (sum(counts) for counts in zip((0, 0), *kept, strict=True))
        self.parts.append(part.file)
        self.paths.append(part.path)
        self.records += records
        self.filled += records > 0
        self.sizes.append(part.bytes)
        self.stops.append(self.records)
        self.headers.append(part.headers)
        self.sums += bytes.fromhex(part.sha256)
        self.files += part.files
        self.file_bytes += part.file_bytes
        self.keys += part.keys
        self.key_bytes += key_bytes
        self.left_out += part.excluded + part.lacking + part.records - records
        self.broken += part.broken
        if part.integers and self.integers is None:
            self.integers = part.path
        name = next((name for name in part.names if name is not None), None)
        if name is not None and self.named is None:
            self.named = part.path, name
        for name, facts in part.fields.items():
            self.fields.setdefault(name, _Found(part.path)).add(facts, records)

    @property
    def skips(self) -> bool:
        """Whether records that a table lacks are left out."""
        options = self.options
        return self.table is not None and options.missing == "skip" and options.background is None

    def blocks(self, part: ShardPart) -> Iterator[Block]:
        """Yield the blocks of a part, without the records that a label table lacks."""
        for block in part.blocks():
            if self.skips and self.table is not None:
                keys = StringColumn(block.arrays["keys-text"], block.arrays["keys-ends"]).tolist()
                block = block.only([n for n, key in enumerate(keys) if key in self.table.labels])
            yield block

    def mixed(self) -> list[str]:
        """Name the bytes features that have one value a record in some parts and lists in
        others.
        """
        clashes = {name: found.kinds for name, found in self.fields.items() if len(found.kinds) > 1}
        for name, kinds in clashes.items():
            if kinds != {"bytes", "bytes_list"}:
                raise ValueError(
                    f"feature {name!r} is {' in some shards and '.join(sorted(kinds))} in others"
                )
        return sorted(clashes)

    def check(self) -> None:
        """Raise ValueError for what is no index: no record, features to read as lists that are not
        there, too many fields, labels of two kinds, or a table of labels that cannot be joined.
        Warn of shards without a record.
        """
        if not self.records:
            raise ValueError(
                f"no records: all {len(self.paths)} shards are empty, or every record is left out"
            )
        if self.filled < len(self.paths):
            lengths = np.diff(self.stops, prepend=0)
            empty = [self.paths[place] for place in np.flatnonzero(lengths == 0)[:5].tolist()]
            warnings.warn(
                f"{len(self.paths) - self.filled} of {len(self.paths)} shards have no records "
                f"(first: {', '.join(empty)})",
                ShardWarning,
                stacklevel=4,
            )
        unknown = sorted(set(self.options.lists) - set(self.fields))
        if unknown:
            raise ValueError(
                f"lists= names {unknown}, which no record has: there are {sorted(self.fields)}"
            )
        if len(self.fields) > LIMITS.fields:
            raise ValueError(
                f"the shards have {len(self.fields)} different fields, more than {LIMITS.fields} "
                f"({', '.join(sorted(self.fields)[:5])}, ...): name those you want with fields="
            )
        if self.table is not None:
            if not self.keys:
                raise ValueError(
                    "a label table is joined by key, and these records have none: name a feature "
                    "with key="
                )
            if "label" in self.fields:
                raise label_clash(self.fields["label"].path)
        elif self.named and self.integers:
            path, name = self.named
            raise ValueError(
                f"labels are names in {path} ({name!r}) and integers in {self.integers}"
            )

    def arrays(self) -> dict[str, Array]:
        """Return the arrays that tell of the shards."""
        shards = np.zeros(len(self.paths), SHARD)
        shards["bytes"], shards["headers"] = self.sizes, self.headers
        arrays = {"shards": shards, "shardstops": np.array(self.stops, np.int64)}
        if self.options.digest:
            arrays["shardsums"] = np.frombuffer(self.sums, np.uint8).reshape(-1, 32)
        return arrays | StringColumn.of(self.paths).arrays("shardpaths")


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
        self.strings: list[_Strings] = []
        if survey.keys:
            self.strings.append(_Strings(store, "keys", survey.records, survey.key_bytes))
        if survey.files:
            self.strings.append(_Strings(store, "files", survey.files, survey.file_bytes))
        self.files_before = 0
        self.labels = _Labels(store, survey) if survey.options.label_from else None

    def new_field(self, name: str, found: _Found) -> None:
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
        self.files_before += part.files

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

    @property
    def whole(self) -> bool:
        """Whether labels are integers."""
        survey = self.survey
        no_names = survey.named is None and isinstance(survey.options.background, int)
        return survey.integers is not None or no_names

    def numbers_of(self, part: ShardPart) -> Int64s | None:
        """Return the numbers of the names of a part."""
        return None if self.whole else self.numbering.of(part.names)

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
        if self.whole:
            filled = [self.background if label is None else label for label in labels]
            self.file.add(np.array(filled, np.int64))
        else:
            self.file.add(self.numbering.of(labels))

    @property
    def background(self) -> int:
        """The number of a record without a label, while labels are collected."""
        if self.whole:
            return whole_background(self.survey.options.background)
        return int(self.numbering.of([None])[0])

    def finish(self, out: _Out, classes: Sequence[str] | None) -> list[str]:
        """Write the column, and return the names of the classes."""
        names, numbers = list(classes or ()), None
        if not self.whole:
            numbers, names = class_numbers(
                self.numbering.names,
                classes=classes,
                background=self.survey.options.background,
                from_text=self.survey.options.label_from in ("field", "table"),
            )
        for piece in pieces(self.store.taken("labels")):
            out.write(piece if numbers is None else numbers[piece])
        return names
