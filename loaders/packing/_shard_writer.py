"""Write samples to the shards of a split, in each container."""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from twinfeed.loaders.formats.example import encode
from twinfeed.loaders.formats.sniff import image_extension
from twinfeed.loaders.formats.tar import TarWriter
from twinfeed.loaders.formats.tfrecord import TFRecordWriter
from twinfeed.loaders.packing._inputs import UserSample, tar_key
from twinfeed.loaders.packing._sample_check import (
    add_record_to_errors,
    kind_of_value,
    split_key,
)
from twinfeed.loaders.support.array_types import as_array
from twinfeed.loaders.support.atomic import fsync_path
from twinfeed.loaders.support.progress import progress_bar

ShardContainer = Literal["tfrecord", "tar"]
FieldKinds = dict[str, tuple[str, int]]
"""By field: the kind of its values, and the number of the first record with the field."""

_FIELD_ADVICE = (
    "pack to TFRecord, or build an index first with fields= (--field), which can rename a field or "
    "leave it out"
)

SHARD_BYTES = 200_000_000
"""The default of the approximate size of a shard, in bytes."""


@dataclass
class PackedSplit:
    """The samples of a split to write to `folder`, and statistics of those that were written.

    `samples` has each sample with its number in the source. `shard_stops` says after how many
    records of the split a shard ends: {3, 6, 10}. `field_of_suffix` has the field of each suffix
    of members in a tar: {"cls": "label", "png": "image", "jpg": "image"}.
    """

    folder: Path
    container: ShardContainer
    name: str
    samples: Iterable[tuple[int, UserSample]]
    num_samples: int | None = None
    shard_stops: Collection[int] = ()
    shard_files: list[Path] = field(default_factory=list)
    num_records: int = 0
    num_keys: int = 0
    first_records: dict[str, str] = field(default_factory=dict)
    field_of_suffix: dict[str, str] = field(default_factory=dict)
    field_counts: Counter[str] = field(default_factory=Counter)

    @property
    def missing_counts(self) -> dict[str, int]:
        """The number of records that lack a field, for each field that some records lack."""
        missing = {name: self.num_records - count for name, count in self.field_counts.items()}
        return {name: count for name, count in missing.items() if count}

    def add(self, number: int, key: str | None, values: dict[str, Any]) -> None:
        """Add a sample that was written, its number, key and fields, to the statistics."""
        self.num_records += 1
        self.num_keys += key is not None
        self.field_counts.update(values.keys())
        if isinstance(label := values.get("label"), str):
            self.first_records.setdefault(label, f"record {number}")


def write_shards(
    packed: PackedSplit,
    /,
    kinds: FieldKinds,
    max_bytes: float = SHARD_BYTES,
    max_records: int | None = None,
    *,
    progress: bool = False,
) -> None:
    """Write the samples of a split to shards, and update the statistics in `packed`.

    A shard ends by `shard_stops`, `max_bytes` or `max_records`. `kinds` is of all splits together.
    """
    title = f"packing {packed.name}"
    shown = progress_bar(packed.samples, title, "record", progress, total=packed.num_samples)
    items = (item for item in shown)  # it ends once, unlike an iterator that begins again
    open_writer = TarWriter if packed.container == "tar" else TFRecordWriter
    for first in items:
        path = packed.folder / f"{packed.name}-{len(packed.shard_files):05d}.shard"
        packed.shard_files.append(path)
        keys: dict[str, int] = {}
        with open_writer(path) as writer:
            for shard_records, (number, sample) in enumerate(chain([first], items), 1):
                with add_record_to_errors(number, sample):
                    key, values = split_key(sample)
                    if isinstance(writer, TarWriter):
                        members = _members(values, packed)
                        if key is not None:
                            key = tar_key(key)
                            _check_key(key, number, keys)
                        writer.write(f"{packed.num_records:09d}" if key is None else key, members)
                    else:
                        writer.write(_example(key, values))
                    _check_kinds(values, number, kinds, packed.container)
                    packed.add(number, key, values)
                is_full = shard_records == max_records or writer.offset >= max_bytes
                if is_full or packed.num_records in packed.shard_stops:
                    break
        fsync_path(path)


def _example(key: str | None, values: dict[str, Any]) -> bytes:
    """Return a sample as a serialized Example, with its key as the feature "key"."""
    if key is not None and "key" in values:
        raise ValueError(
            "a sample has both __key__ and key, which get one name in a TFRecord: rename field key"
        )
    return encode(values | ({} if key is None else {"key": key}))


def _check_kinds(
    values: dict[str, Any], number: int, kinds: FieldKinds, container: ShardContainer
) -> None:
    """Raise ValueError if a field (of a tar, the label) has another kind of values than before."""
    for name, value in values.items():
        if container == "tar" and name != "label":
            continue
        kind = kind_of_value(value)
        first_kind, first = kinds.setdefault(name, (kind, number))
        if kind != first_kind:
            raise ValueError(
                f"field {name!r} has {kind} here and {first_kind} in record {first}: use values "
                "of one kind in all records, such as 1.0 for 1, or two fields"
            )


def _check_key(key: str, number: int, keys: dict[str, int]) -> None:
    """Raise ValueError if an earlier record of this tar shard has the key: both would be one."""
    first = keys.setdefault(key, number)
    if first != number:
        raise ValueError(
            f"record {first} of the tar shard has the key {key!r} too: use a different __key__ "
            "for each record, or pack to TFRecord"
        )


def _members(values: dict[str, Any], packed: PackedSplit) -> dict[str, bytes]:
    """Return the bytes of each tar member of a sample by its suffix, such as "caption.txt"."""
    if not values:
        raise ValueError(
            "it has no field, so it would have no member in a tar: remove it, or pack to TFRecord"
        )
    members = {}
    for name, value in values.items():
        suffix = _member_suffix(name, value)
        if ";" in suffix:  # the options of the index would read it as several suffixes
            raise ValueError(f"a field's name must not contain ';', got {name!r}: {_FIELD_ADVICE}")
        first_name = packed.field_of_suffix.setdefault(suffix, name)  # of this or an earlier record
        if first_name != name:
            raise ValueError(
                f"the fields {first_name!r} and {name!r} would both be the tar member {suffix!r}: "
                f"{_FIELD_ADVICE}"
            )
        members[suffix] = _as_bytes(name, value)
    return members


def _member_suffix(name: str, value: Any) -> str:
    """Return the suffix of a field's tar member: its name, "cls", or the format of an image."""
    if name == "label":
        return "cls"
    lower_name = name.replace("/", ".").lower()
    if name == "image":
        image_format = image_extension(value) if isinstance(value, bytes) else None
        return image_format or lower_name
    return lower_name


def _as_bytes(name: str, value: Any) -> bytes:
    """Return the value of a field as the bytes of a tar member; numbers become JSON."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    array = as_array(value)
    if array.dtype.kind not in "iufb" or array.dtype.itemsize > 8:
        raise TypeError(
            f"field {name!r} must hold bytes, str or numbers of up to 64 bits in a tar, "
            f"got {reprlib.repr(value)}: {_FIELD_ADVICE}"
        )
    return json.dumps(array.tolist()).encode()
