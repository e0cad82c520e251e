"""Statistics over the parts of all shards, which are needed before the parts can be merged."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from twinfeed.loaders.building._parts import FieldStats, ShardPart, check_field_count
from twinfeed.loaders.errors import ShardWarning
from twinfeed.loaders.index.arrays import StringColumn
from twinfeed.loaders.index.index import SHARD
from twinfeed.loaders.index.options import IndexOptions, Label
from twinfeed.loaders.support.array_types import Array

_DROPPED: dict[str, Any] = {"labels": [], "first_records": [], "string_sizes": {}, "fields": {}}
_DROPPED["options"] = IndexOptions()
"""The attributes of a part that stay on disk."""


class IndexStats:
    """Totals over all parts. Of the `parts`, what grows with records or labels stays on disk.

    - `fields` has the largest offset and length of each field, `first_shards` the first shard with
      each of its kinds, and `widths` the number of shards by the values of each record (0: they
      differ).
    - `first_records` has the labels of all shards, and says of each which record is the first.
    """

    def __init__(self, parts: Iterable[ShardPart]) -> None:
        self.options = IndexOptions()
        self.parts: list[ShardPart] = []
        self.fields = dict[str, FieldStats]()
        self.first_shards = defaultdict[str, dict[str, str]](dict)
        self.widths = defaultdict[str, Counter[int]](Counter)
        self.string_sizes: dict[str, tuple[int, int]] = {}
        self.first_records: dict[Label | None, str] = {}
        for part in parts:
            self.add(part)
        self.num_files = self.string_sizes.get("files", (0, 0))[0]
        self.num_records = sum(part.num_records for part in self.parts)
        self.empty = [part.path for part in self.parts if not part.num_records]

    def add(self, part: ShardPart) -> None:
        """Add the statistics of the next part, which is one scanned shard."""
        self.options = part.options  # the same in all parts
        for name, (count, size) in part.string_sizes.items():  # of keys, and of paths of files
            total_count, total_size = self.string_sizes.get(name, (0, 0))
            self.string_sizes[name] = (total_count + count, total_size + size)
        for label, record in zip(part.labels, part.first_records, strict=True):
            self.first_records.setdefault(label, record)
        for name, stats in part.fields.items():
            self.first_shards[name].setdefault(stats.kind, part.path)
            self.widths[name][stats.column_width] += part.num_records > 0
            before = self.fields.get(name, stats)
            offset = max(before.max_offset, stats.max_offset)
            length = max(before.max_length, stats.max_length)
            self.fields[name] = before._replace(max_offset=offset, max_length=length)
        for name in part.mixed_features:
            self.first_shards[name] |= dict.fromkeys(("bytes", "bytes_list"), part.path)
        self.parts.append(replace(part, **_DROPPED))

    def column_width(self, name: str) -> int:
        """Return how many values of a field every record has, or 0 if it is not a column."""
        widths = +self.widths[name]  # the number of shards with records, by their width
        width = max(widths, default=0)
        return width if widths == {width: len(self.parts) - len(self.empty)} else 0

    def mixed_features(self) -> set[str]:
        """Return the bytes features with one value in some records, and several in others."""
        mixed = set()
        for name, first_shards in self.first_shards.items():
            if first_shards.keys() == {"bytes", "bytes_list"}:
                mixed.add(name)
            elif len(first_shards) > 1:
                locations = [f"{kind} in {shard}" for kind, shard in sorted(first_shards.items())]
                raise ValueError(
                    f"feature {name!r} is {' and '.join(locations)}: write it as one kind in all "
                    "shards, or leave it out with fields= (--field)"
                )
        return mixed

    def check(self) -> None:
        """Raise an error if no index can be made of the parts; warn of shards without records."""
        if not self.num_records:
            raise ValueError(
                f"no records: all {len(self.parts)} shards are empty, or every record is "
                "left out, because it lacks a field or label (--missing skip) or is in exclude="
            )
        if self.empty:
            warnings.warn(
                f"{len(self.empty)} of {len(self.parts)} shards have no records "
                f"(first: {', '.join(self.empty[:5])})",
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
        if not self.fields and self.first_records.keys() <= {None}:
            raise ValueError(
                "the records have no field and no label, so there is nothing to read: name "
                "fields that records have, or read them as raw bytes with example=False (--raw)"
            )
        check_field_count(self.fields)

    def arrays(self) -> dict[str, Array]:
        """Return the arrays of an index that have an item for each shard, by name."""
        lengths = np.array([part.num_records for part in self.parts], np.int64)  # [3, 2]
        stops = np.cumsum(lengths)  # [3, 5]
        shards = np.array([(part.bytes, part.headers_crc) for part in self.parts], SHARD)
        arrays: dict[str, Array] = {"shards": shards, "shardstops": stops, "shardlengths": lengths}
        if self.options.digest:
            sums = b"".join(bytes.fromhex(part.sha256) for part in self.parts)
            arrays["shardsums"] = np.frombuffer(sums, np.uint8).reshape(-1, 32)
        if any(part.etag for part in self.parts):
            arrays |= StringColumn.of(part.etag or "" for part in self.parts).arrays("tags")
        return arrays | StringColumn.of(part.path for part in self.parts).arrays("shardpaths")
