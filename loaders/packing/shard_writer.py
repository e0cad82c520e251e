"""Samples to shard files: what each container makes of a sample, and where one shard ends."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from twinfeed.loaders.atomic import sync
from twinfeed.loaders.formats.example import encode
from twinfeed.loaders.formats.sniff import image_extension
from twinfeed.loaders.formats.tar import TarWriter
from twinfeed.loaders.formats.tfrecord import TFRecordWriter
from twinfeed.loaders.index.labels import Label
from twinfeed.loaders.packing.check import checked, told_of
from twinfeed.loaders.packing.samples import Sample

Container = Literal["tfrecord", "tar"]

_OTHERWISE = (
    "pack to TFRecord, or index with fields= first, which names a field otherwise or leaves it out"
)


@dataclass
class Written:
    """Say what was written of one split: what its index has to be told."""

    files: list[Path] = field(default_factory=list)
    records: int = 0
    keyed: int = 0
    named: set[str] = field(default_factory=set)
    labelled: int = 0
    fields: dict[str, dict[str, None]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def optional(self) -> bool:
        """Whether some records lack a field that others have."""
        return any(count < self.records for count in self.counts.values())


def write_shards(
    samples: Iterable[Sample],
    folder: Path,
    name: str,
    *,
    numbers: Iterable[int],
    container: Container,
    stops: Sequence[int],
    most_bytes: int,
    most_records: int | None,
) -> Written:
    """Write `samples`, which have these `numbers` in the source, to shards: a new one behind each
    of `stops` records, and where one would grow too large.
    """
    written = Written()
    writer: TFRecordWriter | TarWriter | None = None
    ends, in_shard = set(stops), 0
    try:
        for number, sample in zip(numbers, samples, strict=False):
            if writer is None:
                written.files.append(folder / f"{name}-{len(written.files):05d}.part")
                writer = _writer(container, written.files[-1])
                in_shard = 0
            with told_of(number, sample):
                _write(writer, sample, written)
            in_shard += 1
            if written.records in ends or in_shard == most_records or writer.offset >= most_bytes:
                _close(writer, written.files[-1])
                writer = None
    finally:
        if writer is not None:
            _close(writer, written.files[-1])
    return written


def _writer(container: Container, path: Path) -> TFRecordWriter | TarWriter:
    """Open a shard."""
    return TarWriter(path) if container == "tar" else TFRecordWriter(path)


def _close(writer: TFRecordWriter | TarWriter, path: Path) -> None:
    """Close a shard and bring it to the disk."""
    writer.close()
    sync(path)


def _write(writer: TFRecordWriter | TarWriter, sample: Sample, written: Written) -> None:
    """Write one sample and note what it has."""
    number = written.records
    written.records += 1
    key, values = checked(sample)
    if "label" in values:
        _note_label(values["label"], written)
    for name in values:
        written.counts[name] = written.counts.get(name, 0) + 1
    if key is not None:
        written.keyed += 1
        if "key" in values and isinstance(writer, TFRecordWriter):
            raise ValueError(
                "a sample has both __key__ and key, and a TFRecord room for one of them: "
                "rename the field key"
            )
    if isinstance(writer, TFRecordWriter):
        writer.write(encode(values | ({} if key is None else {"key": key})))
        return
    members: dict[str, str] = {}
    for name, value in values.items():
        extension = _extension(name, value, sample.get("__ext__", {}))
        if extension in members:
            raise ValueError(
                f"the fields {members[extension]!r} and {name!r} would both be the tar member "
                f"{extension!r}: {_OTHERWISE}"
            )
        members[extension] = name
        if name != "label":
            written.fields.setdefault(name, {})[extension] = None
    parts = {extension: _as_bytes(name, values[name]) for extension, name in members.items()}
    writer.write(f"{number:09d}" if key is None else key, parts)


def _note_label(label: Label, written: Written) -> None:
    """Note a label, which must be of the kind of those before it."""
    named = isinstance(label, str)
    if written.labelled and named != bool(written.named):
        kinds = ("names", "integers") if written.named else ("integers", "names")
        raise ValueError(f"label {label!r} is among the {kinds[1]}, those before it are {kinds[0]}")
    written.labelled += 1
    if isinstance(label, str):
        written.named.add(label)


def _extension(name: str, value: Any, known: dict[str, str]) -> str:
    """Return the extension of a field in a tar: plain for the image, behind the field's name for
    others.
    """
    if name == "label":
        return "cls"
    plain = name.replace("/", ".").lower()
    if name == "image":
        found = image_extension(value) if isinstance(value, bytes) else None
        return known.get(name) or found or plain
    return f"{plain}.{known[name]}" if name in known else plain


def _as_bytes(name: str, value: Any) -> bytes:
    """Return a value as the bytes of a tar member; numbers as JSON text."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    array = np.asarray(value)
    if array.dtype.kind not in "iufb":
        raise TypeError(
            f"field {name!r} must hold bytes, str or numbers in a tar, not {reprlib.repr(value)}: "
            f"{_OTHERWISE}"
        )
    return json.dumps(array.tolist()).encode()
