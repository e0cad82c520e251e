"""Parts: what one shard adds to an index, in a file of its own.

A part is a zip. Each array of each block of records is an entry, `NUMBER/NAME.npy`. The last entry
is the facts of the shard as JSON. No more than a block is held in memory. The zip has a CRC of each
entry, and its directory comes last, so damage and cuts are found.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from twinfeed.loaders.errors import IndexFormatError
from twinfeed.loaders.index.options import IndexOptions
from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.support.atomic import beside, room_for
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import open_file

_FACTS = "facts.json"


class Block(NamedTuple):
    """Some records of a shard: how many there are, and their arrays by name.

    The names are `rows-N` and `values-N` for field N, `keys-text`, `keys-ends`, `files-text`,
    `files-ends`, and `labels` or `names`.
    """

    records: int
    arrays: dict[str, Array]


class FieldFacts(NamedTuple):
    """Facts of a field of a shard: kind, largest offset, largest length, and `width`.

    `width` is how many numbers every record has, or 0 if the field cannot be a column.
    """

    kind: str
    offset: int = 0
    length: int = 0
    width: int = 0


@dataclass
class ShardPart:
    """The facts of one shard; the arrays stay in the file.

    - `tag` is the tag that the store gave the shard.
    - `held` has the number of records of each block, and the names of the block's arrays.
    - `strings` has the number and the bytes of the "keys", and of the "files" of loose files.
    - `labels` says where the first label of each kind ("integers", "names") is.
    - `names` are the names that the blocks refer to by number; None stands for no label.
    """

    options: IndexOptions
    path: str
    bytes: int
    tag: str | None = None
    records: int = 0
    headers: int = 0
    sha256: str = ""
    excluded: int = 0
    broken: bool = False
    lacking: int = 0
    held: list[tuple[int, list[str]]] = field(default_factory=list)
    strings: dict[str, tuple[int, int]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    names: list[str | None] = field(default_factory=list)
    fields: dict[str, FieldFacts] = field(default_factory=dict)
    file: Path = Path()

    @property
    def files(self) -> int:
        """The number of loose files."""
        return self.strings.get("files", (0, 0))[0]

    @classmethod
    def load(cls, file: Path, /, *, check: bool = True) -> ShardPart | None:
        """Return a part; None if the file is missing, cut short or damaged."""
        try:
            with open_file(file) as data, zipfile.ZipFile(data) as held:
                if check and held.testzip() is not None:
                    return None
                facts = json.loads(held.read(_FACTS))
            options = IndexOptions(**facts["options"])
            fields = {name: FieldFacts(*found) for name, found in facts["fields"].items()}
            return cls(**facts | {"options": options, "fields": fields, "file": file})
        except Exception:  # whatever the damage leads to
            return None

    def blocks(self) -> Iterator[Block]:
        """Yield the arrays of the records, block by block."""
        try:
            with open_file(self.file) as data, zipfile.ZipFile(data) as held:
                for number, (records, names) in enumerate(self.held):
                    yield Block(records, {name: _array(held, number, name) for name in names})
        except Exception as error:
            raise damaged_part(self.file) from error


def check_number(fields: Collection[str], /) -> None:
    """Raise ValueError for more fields than records have."""
    if len(fields) > LIMITS.fields:
        raise ValueError(
            f"more than {LIMITS.fields} different fields ({', '.join(sorted(fields)[:5])}, ...): "
            "name those you want with fields= (--field)"
        )


def load_part(file: Path, /, *, check: bool = True) -> ShardPart:
    """Return a part; raise IndexFormatError if the file is missing or damaged."""
    if (part := ShardPart.load(file, check=check)) is None:
        raise damaged_part(file)
    return part


def damaged_part(file: Path, /) -> IndexFormatError:
    """Return the error of a missing or damaged part."""
    return IndexFormatError(
        "a part is missing or damaged",
        path=file,
        advice="build the index again; with executor= every worker must see this folder",
    )


class PartFile:
    """Write a part. The file gets its name when the part is finished."""

    def __init__(self, file: Path, /) -> None:
        self.file = file
        self.zip = zipfile.ZipFile(file, "x")
        self.held: list[tuple[int, list[str]]] = []

    def add(self, records: int, arrays: Mapping[str, Array], /) -> None:
        """Add the arrays of some records."""
        for name, array in arrays.items():
            with self.zip.open(f"{len(self.held)}/{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
        self.held.append((records, list(arrays)))

    def finish(self, part: ShardPart, /) -> None:
        """Add the facts, and give the file its name."""
        part.held = self.held
        facts = vars(part) | {"options": vars(part.options), "file": ""}
        with self.zip.open(_FACTS, "w") as entry:
            entry.write(json.dumps(facts).encode())
        self.zip.close()
        os.replace(self.file, part.file)


@contextmanager
def new_part(file: Path, /) -> Iterator[PartFile]:
    """Yield a temporary file for a part, beside `file`. An unfinished part is removed."""
    with room_for(file.parent):
        out = PartFile(beside(file))
        try:
            yield out
        finally:
            with suppress(OSError):  # a full disk was reported already
                out.zip.close()
            out.file.unlink(missing_ok=True)


def _array(held: zipfile.ZipFile, block: int, name: str) -> Array:
    """Return an array of a block."""
    data = held.read(f"{block}/{name}.npy")  # checks the CRC
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
