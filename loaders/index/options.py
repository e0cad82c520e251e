"""How shards are read, what an index will hold, and how an index was built."""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from twinfeed.loaders._checks import choice, count, flag, names
from twinfeed.loaders.formats import files, tar, tfrecord
from twinfeed.loaders.formats._checksum import crc32c
from twinfeed.loaders.formats._records import CONTAINERS, Container, OnBad, Record
from twinfeed.loaders.index._paths import is_url
from twinfeed.loaders.index._sources import Job, Source
from twinfeed.loaders.index._store import VERSION
from twinfeed.loaders.index.labels import (
    FromFolder,
    FromJson,
    FromTable,
    Label,
    LabelSource,
    RecordLabel,
    is_label,
)
from twinfeed.loaders.limits import LIMITS

Missing = Literal["error", "skip", "empty"]
LabelFrom = Literal["field", "folder", "function", "json", "table"]
Fields = Mapping[str, str] | Iterable[str]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Say how the records of shards are read; `build_index`, `build_parts` and `verify` take it.

    - `container`: the format of the shards. Default: found from the first shard's name or bytes.
    - `example`: False reads TFRecords as raw bytes, in one field "data". Records that are no
      `tf.train.Example`, such as SequenceExamples, need this.
    - `key`: the feature that holds the key of a TFRecord.
    - `lists`: the bytes features that are read as lists, even if each record has one value.
    - `join`: whether to put together the members of one key that lie apart in a tar. Without
      `join`, members that lie apart are an error.
    - `missing`: for records without a named field or label. "error" refuses such records, "skip"
      leaves them out and counts them, "empty" reads the field as b"" or as no numbers.
    - `background`: the label of records without a label, and of records that a table lacks.
    - `max_record_bytes`: longer records are refused before they are read.
    - `complete`: whether a numbered set (`-00003-of-00010`) must have every number.
      `build_parts` and `verify` take sets with gaps too.
    - `digest`: whether the index holds a SHA-256 of each shard. `verify` compares the digests.

    Raises TypeError or ValueError for values that are not allowed.

    >>> Reading(missing="drop")
    Traceback (most recent call last):
    ValueError: missing must be one of 'error', 'skip', 'empty', got 'drop'
    """

    container: Container | None = None
    example: bool = True
    key: str | None = None
    lists: Iterable[str] = ()
    join: bool = False
    missing: Missing = "error"
    background: Label | None = None
    max_record_bytes: int = LIMITS.record_bytes
    complete: bool = True
    digest: bool = False

    def __post_init__(self) -> None:
        if self.container is not None:
            choice("container", self.container, CONTAINERS)
        for name in ("example", "join", "complete", "digest"):
            flag(name, getattr(self, name))
        choice("missing", self.missing, get_args(Missing))
        count("max_record_bytes", self.max_record_bytes)
        object.__setattr__(self, "lists", tuple(sorted(set(names("lists", self.lists)))))
        if self.background is not None and not is_label(self.background):
            raise ValueError(f"background must be an int64 or a name, got {self.background!r}")
        plain = self.example and self.key is None and not self.lists
        if self.container not in (None, "tfrecord") and not plain:
            raise ValueError(
                f"key=, lists= and example=False are for tfrecord, got {self.container}"
            )
        if self.join and self.container not in (None, "tar"):
            raise ValueError(f"join= is for tar, got {self.container}")
        if self.digest and self.container == "files":
            raise ValueError("digest= is for shards, not files")


DEFAULT = Reading()
"""How shards are read unless the caller says otherwise."""


@dataclass(frozen=True, kw_only=True)
class IndexOptions(Reading):
    """Say how an index was built: `Index.options`, as the manifest stores it.

    In addition to the options of `Reading`:

    - `label_from` is the kind of source of the labels, and `label` the name of the source.
    - `fields` maps each chosen field to its possible names in a record, with ";" between them.
    - `classes_given` tells whether the classes were listed by the caller.
    - `root` is the URL of the folder of the shards, if they are remote.
    - `tags` has the store's tag for each remote shard, or None for a shard without a tag. Without
      any tag the list is empty.
    - `left_out` counts the records that the index leaves out.
    - `broken` counts the shards whose records are left out from some record on.

    >>> IndexOptions(label_from="field", label="cls").missing
    'error'
    """

    label_from: LabelFrom | None = None
    label: str | None = None
    fields: Mapping[str, str] | None = None
    classes_given: bool = False
    root: str | None = None
    tags: Sequence[str | None] = ()
    left_out: int = 0
    broken: int = 0

    def facts(self) -> dict[str, Any]:
        """Return the options as JSON holds them, without tags if there are none."""
        return {name: value for name, value in vars(self).items() if name != "tags" or value}


@dataclass(frozen=True)
class Plan:
    """Say what an index will hold: all that a worker needs to know besides its job."""

    root: str
    options: IndexOptions
    label: RecordLabel | None = None

    @classmethod
    def of(
        cls, source: Source, label: LabelSource | None, fields: Fields | None, reading: Reading
    ) -> Plan:
        """Return the plan for the shards of `source`; the labels of a table are joined later."""
        if label is None and any(entry.label for job in source.jobs for entry in job.entries):
            label = FromFolder()
        if isinstance(label, FromTable):
            label = None
        kind, name = _described(label)
        facts = vars(reading) | {
            "container": source.container,
            "label_from": kind,
            "label": name,
            "fields": _named(fields),
            "root": source.root if is_url(source.root) else None,
        }
        return cls(source.root, IndexOptions(**facts), label)

    def with_lists(self, fields: Iterable[str]) -> Plan:
        """Return the plan that reads these fields as lists too."""
        return replace(self, options=replace(self.options, lists={*self.options.lists, *fields}))

    def digest(self) -> str:
        """Return a digest of all that a part depends on.

        Of a label function, only its own code counts. A change in what it uses goes unnoticed.
        """
        label: Any = self.label
        if callable(label):
            code = getattr(label, "__code__", None)
            # From marshal's version 3 on, the bytes depend on reference counts.
            label = type(label) if code is None else marshal.dumps(code, 2)
        text = repr([VERSION, replace(self.options, root=None), label])
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()

    def scan(self, job: Job, path: str, on_bad: OnBad | None) -> Iterator[Record]:
        """Scan the records of a job, whose shard is at `path`."""
        options, most = self.options, self.options.max_record_bytes
        if job.entries:
            return files.scan(self.root, job.entries, max_record_bytes=most, on_bad=on_bad)
        if options.container == "tar":
            return tar.scan(path, max_record_bytes=most, join=options.join, on_bad=on_bad)
        return tfrecord.scan(path, example=options.example, max_record_bytes=most, on_bad=on_bad)


def check_reading(reading: object, /) -> None:
    """Raise TypeError for what is no `Reading`."""
    if not isinstance(reading, Reading):
        raise TypeError(f"reading must be Reading(…), got {reading!r}")


def add_header(checksum: int, record: Record) -> int:
    """Return the checksum of all record headers up to this record."""
    return crc32c(checksum.to_bytes(4, "little") + record.header)


def _described(label: RecordLabel | None) -> tuple[LabelFrom | None, str | None]:
    """Return the kind of source of the labels, and the name of the source."""
    if label is None or isinstance(label, str):
        return "field" if label is not None else None, label
    if isinstance(label, FromJson):
        return "json", f"{label.field}:{label.key}" if label.key else label.field
    if isinstance(label, FromFolder):
        return "folder", None
    if callable(label) and not isinstance(label, type):
        return "function", None
    raise TypeError(
        "label must be a field's name, FromJson(...), FromFolder(), FromTable(...) or a "
        f"function, got {label!r}"
    )


def _named(fields: Fields | None) -> dict[str, str] | None:
    """Return the possible names of each field in a record, with ";" between them."""
    if fields is None:
        return None
    if isinstance(fields, str):
        raise TypeError(f"fields must be a mapping or a list of names, got {fields!r}")
    pairs = dict(fields) if isinstance(fields, Mapping) else {name: name for name in fields}
    for name, aliases in pairs.items():
        if not isinstance(name, str) or not isinstance(aliases, str):
            raise TypeError(
                "fields must map names to names in the records, several with ';' between them, "
                f"got {name!r} to {aliases!r}"
            )
    return pairs
