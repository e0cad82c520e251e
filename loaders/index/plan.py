"""What an index shall hold, and the scan of a shard by it."""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Literal

from twinfeed.loaders.formats import files, tar, tfrecord
from twinfeed.loaders.formats.checksum import crc32c
from twinfeed.loaders.formats.records import MAX_RECORD_BYTES, OnBad, Record
from twinfeed.loaders.index.labels import FromFolder, FromJson, Label, RecordLabel, is_label
from twinfeed.loaders.index.sources import Job
from twinfeed.loaders.index.store import VERSION

Missing = Literal["error", "skip", "empty"]
Fields = Mapping[str, str] | Iterable[str]


@dataclass(frozen=True)
class Plan:
    """Say what an index shall hold; what a worker needs to know besides its job.

    `fields` gives each field's name and the names it may have in a record, the first one present
    counts; None takes all.
    """

    container: str
    root: str
    label: RecordLabel | None = None
    key: str | None = None
    fields: tuple[tuple[str, tuple[str, ...]], ...] | None = None
    missing: Missing = "error"
    background: Label | None = None
    example: bool = True
    max_record_bytes: int = MAX_RECORD_BYTES
    lists: frozenset[str] = frozenset()
    join: bool = False

    def __post_init__(self) -> None:
        kinds = (str, FromJson, FromFolder, NoneType)
        if isinstance(self.label, type) or not (
            isinstance(self.label, kinds) or callable(self.label)
        ):
            raise TypeError(
                "label must be a field's name, FromJson(...), FromFolder(), FromTable(...) or a "
                f"function, not {self.label!r}"
            )
        if self.missing not in ("error", "skip", "empty"):
            raise ValueError(f"missing must be 'error', 'skip' or 'empty', not {self.missing!r}")
        if self.background is not None and not is_label(self.background):
            raise ValueError(f"background must be an int64 or a name, not {self.background!r}")
        container, plain = self.container, self.example and self.key is None and not self.lists
        if container != "tfrecord" and not plain:
            raise ValueError(f"key=, lists= and example=False are for tfrecord, not {container}")
        if self.join and container != "tar":
            raise ValueError(f"join= is for tar, not {container}")

    def options(self) -> dict[str, Any]:
        """Return what the index's manifest tells of the plan."""
        label_from, label = _source(self.label)
        return {
            "background": self.background,
            "container": self.container,
            "example": self.example,
            "fields": self.fields and {name: ";".join(aliases) for name, aliases in self.fields},
            "join": self.join,
            "key": self.key,
            "label": label,
            "label_from": label_from,
            "lists": sorted(self.lists),
            "max_record_bytes": self.max_record_bytes,
            "missing": self.missing,
        }

    def digest(self) -> str:
        """Return a digest of all that a part depends on. Of a label function it has the code, but
        not what the code uses: that its parts are the same can be refuted, never proved.
        """
        label: Any = self.label
        if callable(label):
            code = getattr(label, "__code__", None)
            label = type(label) if code is None else marshal.dumps(code, 2)  # 3 counts references
        facts = replace(self, root="", lists=frozenset(), label=None)
        text = repr([VERSION, facts, sorted(self.lists), label])
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def named(fields: Fields | None) -> tuple[tuple[str, tuple[str, ...]], ...] | None:
    """Return each field's name and the names it may have in a record.

    >>> named({"image": "jpg;png"}), named(["txt"])
    ((('image', ('jpg', 'png')),), (('txt', ('txt',)),))
    """
    if fields is None:
        return None
    if isinstance(fields, str):
        raise TypeError(f"fields must be a mapping or a list of names, not the string {fields!r}")
    pairs = fields if isinstance(fields, Mapping) else {name: name for name in fields}
    for name, aliases in pairs.items():
        if not isinstance(name, str) or not isinstance(aliases, str):
            raise TypeError(
                "fields must map names to names in the records, several with ';' between them, "
                f"not {name!r} to {aliases!r}"
            )
    return tuple((name, tuple(aliases.split(";"))) for name, aliases in pairs.items())


def listed(lists: Iterable[str]) -> frozenset[str]:
    """Return the features to read as lists.

    >>> sorted(listed(["caption"]))
    ['caption']
    """
    if isinstance(lists, str):
        raise TypeError(f"lists must be a list of names, not the string {lists!r}")
    return frozenset(lists)


def _source(label: RecordLabel | None) -> tuple[str | None, str | None]:
    """Return what kind of thing labels come from, and its name."""
    if isinstance(label, FromJson):
        return "json", f"{label.field}:{label.key}" if label.key else label.field
    if label is None or isinstance(label, str):
        return label and "field", label
    return ("folder" if isinstance(label, FromFolder) else "function"), None


def scan_job(plan: Plan, job: Job, path: str, on_bad: OnBad | None) -> Iterator[Record]:
    """Scan the records of a job, its shard being at `path`."""
    most = plan.max_record_bytes
    if job.entries:
        return files.scan(plan.root, job.entries, max_record_bytes=most, on_bad=on_bad)
    if plan.container == "tar":
        return tar.scan(path, max_record_bytes=most, join=plan.join, on_bad=on_bad)
    return tfrecord.scan(path, example=plan.example, max_record_bytes=most, on_bad=on_bad)


def add_header(checksum: int, record: Record) -> int:
    """Return the checksum over the record headers so far and one more."""
    return crc32c(checksum.to_bytes(4, "little") + record.header)
