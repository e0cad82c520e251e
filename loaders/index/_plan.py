"""What an index shall hold, and the scan of a shard by it."""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

from twinfeed.loaders.formats import files, tar, tfrecord
from twinfeed.loaders.formats._checksum import crc32c
from twinfeed.loaders.formats._records import OnBad, Record
from twinfeed.loaders.index._paths import is_url
from twinfeed.loaders.index._sources import Job, Source
from twinfeed.loaders.index._store import VERSION
from twinfeed.loaders.index.labels import FromFolder, FromJson, FromTable, LabelSource, RecordLabel
from twinfeed.loaders.index.options import IndexOptions, Reading, describe_label

Fields = Mapping[str, str] | Iterable[str]
Aliases = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Plan:
    """Say what an index shall hold; what a worker needs to know besides its job.

    `reading` names the container. `fields` gives each field's name and the names it may have in a
    record, the first one present counts; None takes all.
    """

    root: str
    reading: Reading
    label: RecordLabel | None = None
    fields: Aliases | None = None

    @classmethod
    def of(
        cls, source: Source, label: LabelSource | None, fields: Fields | None, reading: Reading
    ) -> Plan:
        """Return the plan for the shards of `source`; the labels of a table are joined later."""
        if label is None and any(entry.label for job in source.jobs for entry in job.entries):
            label = FromFolder()
        if isinstance(label, FromTable):
            label = None
        kinds = (str, FromJson, FromFolder, NoneType)
        if isinstance(label, type) or not (isinstance(label, kinds) or callable(label)):
            raise TypeError(
                "label must be a field's name, FromJson(...), FromFolder(), FromTable(...) or a "
                f"function, got {label!r}"
            )
        return cls(source.root, replace(reading, container=source.container), label, named(fields))

    def with_lists(self, fields: Iterable[str]) -> Plan:
        """Return the plan that reads these fields as lists too."""
        lists = {*self.reading.lists, *fields}
        return replace(self, reading=replace(self.reading, lists=lists))

    def options(self) -> IndexOptions:
        """Return what the index's manifest tells of the plan."""
        label_from, label = describe_label(self.label)
        fields = None
        if self.fields is not None:
            fields = {name: ";".join(aliases) for name, aliases in self.fields}
        return IndexOptions(
            **vars(self.reading),
            label_from=label_from,
            label=label,
            fields=fields,
            root=self.root if is_url(self.root) else None,
        )

    def digest(self) -> str:
        """Return a digest of all that a part depends on. Of a label function it has the code, but
        not what the code uses: that its parts are the same can be refuted, never proved.
        """
        label: Any = self.label
        if callable(label):
            code = getattr(label, "__code__", None)
            label = type(label) if code is None else marshal.dumps(code, 2)  # 3 counts references
        text = repr([VERSION, self.reading, self.fields, label])
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def named(fields: Fields | None) -> Aliases | None:
    """Return each field's name and the names it may have in a record.

    >>> named({"image": "jpg;png"}), named(["txt"])
    ((('image', ('jpg', 'png')),), (('txt', ('txt',)),))
    """
    if fields is None:
        return None
    if isinstance(fields, str):
        raise TypeError(f"fields must be a mapping or a list of names, got {fields!r}")
    pairs = fields if isinstance(fields, Mapping) else {name: name for name in fields}
    for name, aliases in pairs.items():
        if not isinstance(name, str) or not isinstance(aliases, str):
            raise TypeError(
                "fields must map names to names in the records, several with ';' between them, "
                f"got {name!r} to {aliases!r}"
            )
    return tuple((name, tuple(aliases.split(";"))) for name, aliases in pairs.items())


def scan_job(plan: Plan, job: Job, path: str, on_bad: OnBad | None) -> Iterator[Record]:
    """Scan the records of a job, its shard being at `path`."""
    reading = plan.reading
    most = reading.max_record_bytes
    if job.entries:
        return files.scan(plan.root, job.entries, max_record_bytes=most, on_bad=on_bad)
    if reading.container == "tar":
        return tar.scan(path, max_record_bytes=most, join=reading.join, on_bad=on_bad)
    return tfrecord.scan(path, example=reading.example, max_record_bytes=most, on_bad=on_bad)


def add_header(checksum: int, record: Record) -> int:
    """Return the checksum over the record headers so far and one more."""
    return crc32c(checksum.to_bytes(4, "little") + record.header)
