"""How the records of shards are read, and what an index remembers of how it was built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from twinfeed.loaders._checks import choice, count, flag, names
from twinfeed.loaders.formats._records import CONTAINERS, Container
from twinfeed.loaders.index.labels import (
    FromFolder,
    FromJson,
    FromTable,
    Label,
    LabelSource,
    is_label,
)
from twinfeed.loaders.limits import LIMITS

Missing = Literal["error", "skip", "empty"]
LabelFrom = Literal["field", "folder", "function", "json", "table"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Say how the records of shards are read; `build_index`, `build_parts` and `verify` take it.

    - `container`: what the shards are; by default what the first shard's name or bytes tell.
    - `example`: False reads TFRecords as raw bytes, in one field "data". Records that are no
      `tf.train.Example`, such as SequenceExamples, need this.
    - `key`: the feature that holds the key of a TFRecord.
    - `lists`: the bytes features that read as lists even where each record has one value.
    - `join`: whether to put together the members of one key that lie apart in a tar. Members that
      lie apart are an error otherwise.
    - `missing`: what becomes of a record that lacks a named field or a label. "error"; "skip"
      leaves the record out, and the index counts it; "empty" reads the field as b"" or no numbers.
    - `background`: the label of records that have none, or that a table lacks.
    - `max_record_bytes`: longer records are refused before they are read.
    - `complete`: whether a numbered set (`-00003-of-00010`) must have every number.
      `build_parts` and `verify` take sets with gaps too.
    - `digest`: whether the index holds a SHA-256 of each shard, which `verify` compares.

    Raises TypeError and ValueError for values that mean nothing.

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
        flag("example", self.example)
        flag("join", self.join)
        flag("complete", self.complete)
        flag("digest", self.digest)
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
    """Tell how an index was built, as its manifest has it: `Index.options`.

    Beside what `Reading` says:

    - `label_from` is the kind of thing that labels came from, and `label` its name.
    - `fields` maps each chosen field to the names it may have in a record, with ";" between them.
    - `classes_given` tells whether the classes were listed by the caller.
    - `root` is the URL of the folder of the shards, if they are remote.
    - `tags` has the tag of each shard there, None where the store gave none; empty where no store
      did.
    - `left_out` counts the records that the index leaves out.
    - `broken` counts the shards of which the rest is left out.

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
        told = vars(self) | {"lists": list(self.lists), "tags": list(self.tags)}
        return told if self.tags else {name: told[name] for name in told if name != "tags"}


def describe_label(label: LabelSource | None, /) -> tuple[LabelFrom | None, str | None]:
    """Return what kind of thing labels come from, and its name."""
    if label is None:
        return None, None
    if isinstance(label, str):
        return "field", label
    if isinstance(label, FromJson):
        return "json", f"{label.field}:{label.key}" if label.key else label.field
    if isinstance(label, FromTable):
        return "table", None
    return ("folder" if isinstance(label, FromFolder) else "function"), None
