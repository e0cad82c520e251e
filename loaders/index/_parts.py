"""The part of an index that one shard makes, kept in one file until the index is whole."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from twinfeed.loaders._checks import Array
from twinfeed.loaders.atomic import replace_file, room_for
from twinfeed.loaders.index._numbering import Labels
from twinfeed.loaders.index._strings import StringColumn
from twinfeed.loaders.index.options import IndexOptions

_DIGEST = 32


@dataclass
class ShardPart:
    """Hold what one shard adds to an index."""

    plan: str
    options: IndexOptions
    path: str
    bytes: int
    records: int = 0
    headers: int = 0
    excluded: int = 0
    broken: bool = False
    lacking: int = 0
    kinds: dict[str, str] = field(default_factory=dict)
    tables: dict[str, Array] = field(default_factory=dict)
    values: dict[str, Array] = field(default_factory=dict)
    keys: StringColumn | None = None
    labels: Labels | None = None
    files: list[str] = field(default_factory=list)

    def only(self, places: Array) -> ShardPart:
        """Return the part with these of its records; the others count as lacking something."""
        keys = self.keys
        return replace(
            self,
            records=len(places),
            lacking=self.lacking + self.records - len(places),
            tables={name: table[places] for name, table in self.tables.items()},
            values={name: array[places] for name, array in self.values.items()},
            keys=keys and StringColumn.of(keys[place] for place in places.tolist()),
        )

    def save(self, file: Path) -> None:
        """Write the part to `file`, whole or not at all: a digest, then the .npz that it is of."""
        facts = {
            name: getattr(self, name)
            for name in (
                "plan",
                "path",
                "bytes",
                "records",
                "headers",
                "excluded",
                "broken",
                "lacking",
                "kinds",
                "files",
            )
        }
        facts["options"] = self.options.facts()
        arrays = {f"table-{n}": self.tables[name] for n, name in enumerate(self.kinds)}
        arrays |= {
            f"values-{n}": self.values[name]
            for n, name in enumerate(self.kinds)
            if name in self.values
        }
        if self.keys is not None:
            arrays |= self.keys.arrays("keys")
        if self.labels is not None:
            facts["names"] = self.labels.names
            arrays |= {"labels": self.labels.numbers, "unlabelled": self.labels.without}
        buffer = io.BytesIO()
        text = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        np.savez(buffer, facts=text, **arrays)  # type: ignore[arg-type]
        data = buffer.getvalue()
        with room_for(file.parent, _DIGEST + len(data)):
            digest = hashlib.sha256(data).digest()
            replace_file(file, digest + data, durable=False)  # a damaged part is built anew

    @classmethod
    def load(cls, file: Path) -> ShardPart | None:
        """Read a part back; None if there is none, or it was cut short or damaged."""
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
            return None
        try:
            arrays = _unpacked(data[_DIGEST:])
            return cls._of(arrays)
        except (AttributeError, BadZipFile, EOFError, KeyError, TypeError, ValueError):
            return None

    @classmethod
    def _of(cls, arrays: dict[str, Array]) -> ShardPart:
        """Return the part that was saved as these arrays."""
        facts = json.loads(arrays.pop("facts").tobytes())
        names = facts.pop("names", None)
        part = cls(**facts | {"options": IndexOptions(**facts["options"])})
        for n, name in enumerate(part.kinds):
            part.tables[name] = arrays[f"table-{n}"]
            if f"values-{n}" in arrays:
                part.values[name] = arrays[f"values-{n}"]
        if "keys-ends" in arrays:
            part.keys = StringColumn(arrays["keys-text"], arrays["keys-ends"])
        if "labels" in arrays:
            part.labels = Labels(arrays["labels"], names, arrays["unlabelled"])
        return part


def _unpacked(data: bytes) -> dict[str, Array]:
    """Return the arrays of an .npz, which must not be compressed: a few bytes could be many."""
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        if any(entry.compress_type for entry in archive.zip.infolist()):
            raise ValueError("a part is not compressed")
        return dict(archive)
