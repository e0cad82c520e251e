"""The settings of a build, which are pickled to its worker processes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from twinfeed.loaders.building.labels import (
    FromFile,
    FromFolder,
    FromJson,
    FromTable,
    LabelSource,
    RecordLabel,
)
from twinfeed.loaders.building.sources import Job, ShardSource
from twinfeed.loaders.formats import files, tar, tfrecord
from twinfeed.loaders.formats.records import OnBad, Record, RecordChunk
from twinfeed.loaders.index.manifest import VERSION
from twinfeed.loaders.index.options import IndexOptions, LabelFrom, Reading
from twinfeed.loaders.storage.url import Location, Root
from twinfeed.loaders.support.checksum import crc32c

Fields = Mapping[str, str] | Iterable[str]


@dataclass(frozen=True)
class BuildPlan:
    """The settings of a build. Records whose key is not in `keys` are skipped."""

    root: Root
    options: IndexOptions
    label: RecordLabel | None = None
    keys: frozenset[str] | None = None

    @classmethod
    def of(
        cls, source: ShardSource, label: LabelSource | None, fields: Fields | None, reading: Reading
    ) -> BuildPlan:
        """Return the plan for the shards of `source`; the labels of a table are joined later."""
        if label is None and any(entry.label for job in source.jobs for entry in job.entries):
            label = FromFolder()
        keys = None
        if isinstance(label, FromTable):
            if reading.missing == "skip" and reading.background is None:
                keys = frozenset(label.labels)
            label = None
        kind, name = _label_source_of(label)
        options = vars(reading) | {
            "container": source.container,
            "label_from": kind,
            "label": name,
            "fields": _field_aliases(fields),
            "root": str(source.root) if isinstance(source.root, Location) else None,
        }
        return cls(source.root, IndexOptions(**options), label, keys)

    def with_lists(self, fields: Iterable[str]) -> BuildPlan:
        """Return a copy that reads these fields as lists too."""
        return replace(self, options=replace(self.options, lists={*self.options.lists, *fields}))

    def digest(self) -> str:
        """Return a digest of all settings that a part depends on, except for a label function."""
        label = None if callable(self.label) else self.label
        keys = None if self.keys is None else sorted(map(repr, self.keys))
        text = repr([VERSION, replace(self.options, root=None), label, keys])
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()

    def scan(
        self, job: Job, path: str, on_bad: OnBad
    ) -> Iterator[Record] | Iterator[Record | RecordChunk]:
        """Yield the records of a job, whose shard is at `path`; `on_bad` gets errors of records.

        A `RecordChunk` takes the place of records that have the same fields.
        """
        options, limit = self.options, self.options.max_record_bytes
        if job.entries:
            return files.scan(str(self.root), job.entries, max_record_bytes=limit, on_bad=on_bad)
        if options.container == "tar":
            return tar.scan_chunks(path, max_record_bytes=limit, join=options.join, on_bad=on_bad)
        return tfrecord.scan_chunks(
            path, example=options.example, max_record_bytes=limit, on_bad=on_bad
        )


def add_headers(checksum: int, headers: Iterable[bytes]) -> int:
    """Return the checksum of all record headers so far, from that before these records."""
    for header in headers:
        checksum = crc32c(checksum.to_bytes(4, "little") + header)
    return checksum


def _label_source_of(label: RecordLabel | None) -> tuple[LabelFrom | None, str | None]:
    """Return the kind of a source of labels and its name, as written in the manifest."""
    if label is None or isinstance(label, str):
        return "field" if label is not None else None, label
    if isinstance(label, FromJson):
        return "json", f"{label.field}:{label.key}" if label.key else label.field
    if isinstance(label, FromFolder):
        return "folder", None
    if isinstance(label, FromFile):
        return "file", label.pattern
    if callable(label) and not isinstance(label, type):
        return "function", None
    raise TypeError(
        "label must be a field's name, FromJson(...), FromFolder(), FromFile(...), FromTable(...) "
        f"or a function, got {label!r}"
    )


def _field_aliases(fields: Fields | None) -> dict[str, str] | None:
    """Return by field the names that it may have in a record, as "jpg;jpeg".

    Raises:
        TypeError: `fields` is no mapping and no list of names.
    """
    if fields is None:
        return None
    if isinstance(fields, str):
        raise TypeError(f"fields must be a mapping or a list of names, got {fields!r}")
    pairs = dict(fields) if isinstance(fields, Mapping) else {name: name for name in fields}
    for name, aliases in pairs.items():
        if not (isinstance(name, str) and isinstance(aliases, str) and name and aliases):
            raise TypeError(
                "fields must map names to names in the records, several with ';' between them, "
                f"got {name!r} to {aliases!r}"
            )
    return pairs
