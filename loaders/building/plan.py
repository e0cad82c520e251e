"""The settings of a build, which are pickled to its worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from twinfeed.loaders.building.labels import (
    FromFolder,
    LabelSource,
    label_source,
)
from twinfeed.loaders.building.sources import Job, ShardSource
from twinfeed.loaders.formats import files, tar, tfrecord
from twinfeed.loaders.formats.records import OnBad, Record, RecordChunk
from twinfeed.loaders.index.options import IndexOptions, Reading
from twinfeed.loaders.storage.url import Location, Root
from twinfeed.loaders.support.checksum import crc32c

Fields = Mapping[str, str] | Iterable[str]


@dataclass(frozen=True)
class BuildPlan:
    """The settings of a build, which each worker needs to scan a shard."""

    root: Root
    options: IndexOptions
    label: LabelSource | None = None

    @classmethod
    def of(
        cls, source: ShardSource, label: LabelSource | None, fields: Fields | None, reading: Reading
    ) -> BuildPlan:
        """Return the plan for indexing the shards of `source`."""
        if label is None and any(entry.label for job in source.jobs for entry in job.entries):
            label = FromFolder()  # images in folders that are named after classes
        label_kind, label_name = label_source(label)  # as the index stores where labels are
        options = vars(reading) | {
            "container": source.container,
            "label_from": label_kind,
            "label": label_name,
            "fields": _field_aliases(fields),
            "root": str(source.root) if isinstance(source.root, Location) else None,
        }
        return cls(source.root, IndexOptions(**options), label)

    def with_lists(self, fields: Iterable[str]) -> BuildPlan:
        """Return a copy that reads these fields as lists too."""
        return replace(self, options=replace(self.options, lists={*self.options.lists, *fields}))

    def scan(
        self, job: Job, path: str, on_bad: OnBad
    ) -> Iterator[Record] | Iterator[Record | RecordChunk]:
        """Yield the records of a job, or chunks of consecutive records of the same fields.

        `path` is the shard as a local file. `on_bad` is called with the error of each bad record,
        and the scan continues.
        """
        options, limit = self.options, self.options.max_record_bytes
        if job.entries:  # loose files: each entry has the files of one record
            return files.scan(str(self.root), job.entries, max_record_bytes=limit, on_bad=on_bad)
        if options.container == "tar":
            return tar.scan_chunks(path, max_record_bytes=limit, join=options.join, on_bad=on_bad)
        return tfrecord.scan_chunks(
            path, example=options.example, max_record_bytes=limit, on_bad=on_bad
        )


def add_headers(checksum: int, headers: Iterable[bytes]) -> int:
    """Continue the CRC-32C over headers: of the checksum so far, followed by the header."""
    for header in headers:
        checksum = crc32c(checksum.to_bytes(4, "little") + header)
    return checksum


def _field_aliases(fields: Fields | None) -> dict[str, str] | None:
    """Map each field to its names in the records, with ";" between; a list to themselves."""
    if fields is None:
        return None
    if isinstance(fields, str):
        raise TypeError(f"fields must be a mapping or a list of names, got {fields!r}")
    pairs = dict(fields) if isinstance(fields, Mapping) else {name: name for name in fields}
    for name, aliases in pairs.items():
        if not (isinstance(name, str) and isinstance(aliases, str) and name and aliases):
            raise TypeError(
                "fields must map each field to its name in the records, or names with ';' between "
                f"them, got {name!r} to {aliases!r}"
            )
    return pairs
