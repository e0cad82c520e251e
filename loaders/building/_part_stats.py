"""Statistics over the parts of all shards, which are needed before the parts can be merged."""

from __future__ import annotations

import warnings
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from twinfeed.loaders.building._parts import FieldStats, ShardPart, check_field_count
from twinfeed.loaders.errors import ShardWarning
from twinfeed.loaders.index.arrays import StringColumn
from twinfeed.loaders.index.index import SHARD
from twinfeed.loaders.index.options import IndexOptions, Label
from twinfeed.loaders.support.array_types import Array


class IndexStats:
    """Totals over all parts; the parts themselves stay on disk.

    - `fields` has the largest offset and length of each field, `first_shards` the first shard with
      each of its kinds, and `widths` the number of shards by the values of each record (0: they
      differ).
    - `first_records` has the labels of all shards, and says of each which record is the first.
    """

    def __init__(self, parts: Iterable[ShardPart]) -> None:
        self.options = IndexOptions()
        self.part_files: list[Path] = []
        self.shard_paths: list[str] = []
        self.etags: list[str | None] = []
        self.shard_sizes, self.headers_crcs, self.shard_lengths = array("q"), array("L"), array("q")
        self.sha256s = bytearray()
        self.num_records = self.num_excluded = self.num_files = 0
        self.num_incomplete_shards = self.num_nonempty_shards = 0
        self.fields = dict[str, FieldStats]()
        self.first_shards = defaultdict[str, dict[str, str]](dict)
        self.widths = defaultdict[str, Counter[int]](Counter)
        self.string_sizes: dict[str, tuple[int, int]] = {}
        self.first_records: dict[Label | None, str] = {}
        for part in parts:
            self.add(part)

    def add(self, part: ShardPart) -> None:
        """Add the statistics of the next part, which is one scanned shard."""
        self.options = part.options  # the same in all parts
        for name, (count, size) in part.string_sizes.items():  # of keys, and of paths of files
            total_count, total_size = self.string_sizes.get(name, (0, 0))
            self.string_sizes[name] = (total_count + count, total_size + size)
        self.num_files += part.num_files
        self.part_files.append(part.file)
        self.shard_paths.append(part.path)
        self.num_records += part.num_records
        self.num_nonempty_shards += part.num_records > 0
        self.shard_sizes.append(part.bytes)
        self.headers_crcs.append(part.headers_crc)
        self.shard_lengths.append(part.num_records)
        self.etags.append(part.etag)
        self.sha256s += bytes.fromhex(part.sha256)
        self.num_excluded += part.num_excluded + part.num_skipped
        self.num_incomplete_shards += part.is_incomplete
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

    def column_width(self, name: str) -> int:
        """Return how many values of a field every record has, or 0 if it is not a column."""
        widths = +self.widths[name]  # the number of shards with records, by their width
        width = max(widths, default=0)
        return width if widths == {width: self.num_nonempty_shards} else 0

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
                f"no records: all {len(self.shard_paths)} shards are empty, or every record is "
                "left out, because it lacks a field or label (--missing skip) or is in exclude="
            )
        if self.num_nonempty_shards < len(self.shard_paths):
            lengths = zip(self.shard_paths, self.shard_lengths, strict=True)
            empty = [path for path, length in lengths if length == 0]
            warnings.warn(
                f"{len(empty)} of {len(self.shard_paths)} shards have no records "
                f"(first: {', '.join(empty[:5])})",
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
        lengths = np.array(self.shard_lengths, np.int64)  # [3, 2]
        stops = np.cumsum(lengths)  # [3, 5]
        shards = np.array(list(zip(self.shard_sizes, self.headers_crcs, strict=True)), SHARD)
        arrays: dict[str, Array] = {"shards": shards, "shardstops": stops, "shardlengths": lengths}
        if self.options.digest:
            arrays["shardsums"] = np.frombuffer(self.sha256s, np.uint8).reshape(-1, 32)
        if any(self.etags):
            arrays |= StringColumn.of(etag or "" for etag in self.etags).arrays("tags")
        return arrays | StringColumn.of(self.shard_paths).arrays("shardpaths")
