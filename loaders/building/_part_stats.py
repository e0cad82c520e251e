"""Statistics over all parts, taken before the parts are merged."""

from __future__ import annotations

import warnings
from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from twinfeed.loaders.building._classes import Numbering
from twinfeed.loaders.building._parts import FieldStats, ShardPart, check_field_count
from twinfeed.loaders.building.labels import (
    FromTable,
    check_one_kind,
    label_field_error,
    label_kind,
)
from twinfeed.loaders.errors import ShardWarning
from twinfeed.loaders.index.arrays import StringColumn
from twinfeed.loaders.index.index import SHARD
from twinfeed.loaders.index.options import IndexOptions
from twinfeed.loaders.support.array_types import Array


class FieldTotals:
    """Totals of a field over all shards; `kinds` maps each kind to the first shard with it."""

    def __init__(self) -> None:
        self.kinds, self.widths = dict[str, str](), set[int]()
        self.offset = self.length = self.shards = 0

    def add(self, stats: FieldStats, path: str, records: int) -> None:
        """Add the statistics of a shard."""
        self.kinds.setdefault(stats.kind, path)
        self.offset = max(self.offset, stats.offset)
        self.length = max(self.length, stats.length)
        if records:
            self.widths.add(stats.width)
            self.shards += 1

    @property
    def kind(self) -> str:
        """The kind of the field, the same in all shards."""
        return next(iter(self.kinds))

    def width(self, nonempty: int) -> int:
        """Return the number of values per record, if the field can be a column, or 0.

        Every record must have the same number. `nonempty` is the number of shards with records.
        """
        is_column = len(self.widths) == 1 and self.shards == nonempty
        return next(iter(self.widths)) if is_column else 0


class IndexStats:
    """Totals over all parts; the parts themselves stay on disk."""

    def __init__(self, parts: Iterable[ShardPart], table: FromTable | None) -> None:
        self.table = table
        self.options = IndexOptions()
        self.parts: list[Path] = []
        self.paths: list[str] = []
        self.tags: list[str | None] = []
        self.sizes, self.headers, self.lengths = array("q"), array("L"), array("q")
        self.sums = bytearray()
        self.records = self.num_excluded = self.broken = self.nonempty = self.files = 0
        self.fields = defaultdict[str, FieldTotals](FieldTotals)
        self.strings: dict[str, tuple[int, int]] = {}
        self.mixed: set[str] = set()
        self.name_numbers = Numbering()
        self.labels: dict[str, str] = {}
        if table is not None:
            self.labels = {label_kind(label): "the table" for label in table.labels.values()}
        for part in parts:
            self.add(part)

    def add(self, part: ShardPart) -> None:
        """Add the statistics of a part."""
        if not self.parts:
            self.options = part.options
            if self.table is not None:
                self.options = replace(part.options, label_from="table")
        for name, (count, size) in part.strings.items():
            total = self.strings.get(name, (0, 0))
            self.strings[name] = (total[0] + count, total[1] + size)
        self.files += part.files
        self.parts.append(part.file)
        self.paths.append(part.path)
        self.records += part.records
        self.nonempty += part.records > 0
        self.sizes.append(part.bytes)
        self.headers.append(part.headers)
        self.lengths.append(part.records)
        self.tags.append(part.tag)
        self.sums += bytes.fromhex(part.sha256)
        self.num_excluded += part.excluded + part.skipped
        self.broken += part.broken
        self.mixed.update(part.mixed)
        self.name_numbers.of(part.names)
        self.labels = part.labels | self.labels
        for name, stats in part.fields.items():
            self.fields[name].add(stats, part.path, part.records)

    @property
    def integer_labels(self) -> bool:
        """Whether labels are integers."""
        no_names = "names" not in self.labels and isinstance(self.options.background, int)
        return "integers" in self.labels or no_names

    def mixed_features(self) -> set[str]:
        """Return the names of bytes features with one value in some records, several in others.

        Raises:
            ValueError: a feature has two other kinds, as bytes and floats.
        """
        kinds_of = {name: totals.kinds for name, totals in self.fields.items()}
        conflicts = {name: kinds for name, kinds in kinds_of.items() if len(kinds) > 1}
        for name, kinds in conflicts.items():
            if kinds.keys() != {"bytes", "bytes_list"}:
                where = " and ".join(f"{kind} in {kinds[kind]}" for kind in sorted(kinds))
                raise ValueError(
                    f"feature {name!r} is {where}: write it as one kind in all shards, or leave it "
                    "out with fields= (--field)"
                )
        return self.mixed | conflicts.keys()

    def check(self) -> None:
        """Raise ValueError if no index can be made of the parts; warn of shards without records."""
        if not self.records:
            raise ValueError(
                f"no records: all {len(self.paths)} shards are empty, or every record is left out, "
                "for what it lacks (--missing skip) or by exclude="
            )
        if self.nonempty < len(self.paths):
            lengths = zip(self.paths, self.lengths, strict=True)
            empty = [path for path, length in lengths if length == 0][:5]
            warnings.warn(
                f"{len(self.paths) - self.nonempty} of {len(self.paths)} shards have no records "
                f"(first: {', '.join(empty)})",
                ShardWarning,
                stacklevel=4,
            )
        unknown = {*(self.options.fields or ()), *self.options.lists} - {*self.fields}
        if self.options.label_from == "field":
            unknown.discard("label")
        if unknown:
            raise KeyError(
                f"no record has the fields {sorted(unknown)} of fields= or lists=; "
                f"there are {sorted(self.fields)[:8]}"
            )
        if not self.fields and not self.labels:
            raise ValueError(
                "the records have no field and no label, so there is nothing to read: name "
                "fields that records have, or read them as raw bytes with example=False (--raw)"
            )
        check_field_count(self.fields)
        if self.table is not None:
            if "keys" not in self.strings:
                raise ValueError(
                    "a label table is joined by key, and these records have no keys: name a "
                    "feature with key="
                )
            if "label" in self.fields:
                raise label_field_error(next(iter(self.fields["label"].kinds.values())))
        else:
            check_one_kind(self.labels)

    def arrays(self) -> dict[str, Array]:
        """Return by name the arrays of an index that have an entry for each shard."""
        stops = np.cumsum(self.lengths, dtype=np.int64)
        shards = np.array(list(zip(self.sizes, self.headers, strict=True)), SHARD)
        lengths = np.diff(stops, prepend=0)
        arrays: dict[str, Array] = {"shards": shards, "shardstops": stops, "shardlengths": lengths}
        if self.options.digest:
            arrays["shardsums"] = np.frombuffer(self.sums, np.uint8).reshape(-1, 32)
        if any(self.tags):
            arrays |= StringColumn.of(tag or "" for tag in self.tags).arrays("tags")
        return arrays | StringColumn.of(self.paths).arrays("shardpaths")
