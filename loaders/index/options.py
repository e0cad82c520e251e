"""The options of reading shards, and of building an index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

import numpy as np

from twinfeed.loaders.formats.records import CONTAINERS, Container
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.samplers import validate

Missing = Literal["error", "skip", "empty"]
LabelFrom = Literal["example", "field", "file", "folder", "function", "json", "table"]


class ReadingOptions(TypedDict, total=False):
    """The options of `build_index` and `verify` that say how records are read.

    Attributes:
        container: the format of the shards. Default: found from the first shard's name or bytes.
        example: False reads TFRecords as raw bytes, in one field "data". Records of
            any other kind than `tf.train.Example`, such as SequenceExamples, need this.
        key: the feature that holds the key of a TFRecord.
        lists: the features that are read as lists, even if each record has one value. Otherwise
            numbers are a column of the index if each record has equally many of them, at most 16.
        join: whether to join the members of one key that are not consecutive in a tar. Without
            `join`, such members are an error.
        missing: what happens to records without a named field or label. "error" refuses them,
            "skip" excludes and counts them, with "empty" a feed reads b"" or no numbers.
        background: the label of records without a label, and of records that a table of labels
            does not have.
        max_record_bytes: longer records are refused before they are read.
        complete: whether a numbered set (`-00003-of-00010`) must have every number. `verify`
            takes sets with gaps too.
        digest: whether the index holds a SHA-256 of each shard. `verify` compares the digests.

    Raises:
        TypeError: a value has another type.
        ValueError: a value is not allowed.

    >>> ReadingOptions(example=False, max_record_bytes=1 << 20)
    {'example': False, 'max_record_bytes': 1048576}
    """

    container: Container | None
    example: bool
    key: str | None
    lists: Iterable[str]
    join: bool
    missing: Missing
    background: Label | None
    max_record_bytes: int
    complete: bool
    digest: bool


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The options for reading the records of shards; see `ReadingOptions`.

    Raises:
        TypeError: a value has another type.
        ValueError: a value is not allowed.

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
            validate.choice("container", self.container, CONTAINERS)
        for name in ("example", "join", "complete", "digest"):
            validate.flag(name, getattr(self, name))
        if not isinstance(self.key, str | None):
            raise TypeError(f"key must be the name of a feature, got {self.key!r}")
        validate.choice("missing", self.missing, get_args(Missing))
        validate.integer("max_record_bytes", self.max_record_bytes, minimum=1)
        object.__setattr__(self, "lists", tuple(sorted(set(checks.names("lists", self.lists)))))
        if self.background is not None and as_label(self.background) is None:
            raise ValueError(f"background must be an int64 or a name, got {self.background!r}")
        plain = self.example and self.key is None and not self.lists
        if self.container not in (None, "tfrecord") and not plain:
            raise ValueError(
                f"key=, lists= and example=False (--raw) are for tfrecord, got {self.container}"
            )
        if self.join and self.container not in (None, "tar"):
            raise ValueError(f"join= is for tar, got {self.container}")
        if self.digest and self.container == "files":
            raise ValueError("digest= is for shards, not files")


@dataclass(frozen=True, kw_only=True)
class IndexOptions(Reading):
    """The options that an index was built with: `Index.options`, as the manifest stores it.

    The options of `Reading` are attributes too.

    Attributes:
        label_from: the kind of source of the labels.
        label: the name of the source.
        fields: maps each chosen field to its possible names in a record, with ";" between them.
        classes_given: whether the classes were listed by the caller.
        root: the URL of the folder of the shards, if they are remote.
        left_out: the number of records that the index excludes.
        broken: the number of shards of which the index excludes all records from some record on.

    >>> IndexOptions(label_from="field", label="cls").missing
    'error'
    """

    label_from: LabelFrom | None = None
    label: str | None = None
    fields: Mapping[str, str] | None = None
    classes_given: bool = False
    root: str | None = None
    left_out: int = 0
    broken: int = 0


def parse_reading_options(function: Callable[..., object], options: ReadingOptions, /) -> Reading:
    """Return the keyword options of a call of `function` that say how to read records."""
    option_names = ReadingOptions.__annotations__
    for name in options:
        if name not in option_names:
            names = ", ".join(option_names)
            raise TypeError(f"{function.__name__} takes no {name}=: shards are read by {names}")
    return Reading(**options)


Label = int | str


def as_label(value: object, /) -> Label | None:
    """Return a value as a label: a str that is not empty, or an int64; None for any other value.

    A float counts if it is an integer, and small enough that no other integer rounds to it.
    """
    if isinstance(value, str):
        with suppress(UnicodeEncodeError):  # a lone surrogate
            return str(value) if value.encode() else None
    if isinstance(value, (float, np.floating)):
        is_exact = abs(float(value)) < 2 / float(np.finfo(type(value)).eps)
        value = int(value) if is_exact and float(value).is_integer() else None
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return int(value) if is_int and -(2**63) <= value < 2**63 else None  # type: ignore[operator, call-overload]
