"""Parts: a part is a file with the arrays and statistics of one shard, before the merge.

A part is a zip. Each array of each block of records is an entry, `NUMBER/NAME.npy`. The last entry
is the statistics of the shard as JSON. At most a block is in memory. The zip has a CRC of each
entry, and its directory comes last, so damage and truncation are found.
"""

from __future__ import annotations

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
from twinfeed.loaders.support.atomic import explain_full_disk, temporary_name
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import open_file

_STATS_FILE = "facts.json"


class Block(NamedTuple):
    """A block of records of a shard: their number, and their arrays by name.

    The names are `rows-N` and `values-N` for field N, `keys-text`, `keys-ends`, `files-text`,
    `files-ends`, and `labels` or `names`.
    """

    records: int
    arrays: dict[str, Array]


class FieldStats(NamedTuple):
    """Statistics of a field of a shard: kind, largest offset, largest length, and `width`.

    `width` is the number of values of every record, or 0 if the field cannot be a column.
    """

    kind: str
    offset: int = 0
    length: int = 0
    width: int = 0


@dataclass
class ShardPart:
    """The statistics of one shard; its arrays stay in the file of the part.

    - `tag` is the shard's ETag in its store.
    - `excluded`, `skipped`: the numbers of records left out by `exclude=`, and for a missing field,
      label or key. `broken`: whether the records after some record are left out.
    - `block_arrays` has the number of records of each block, and the names of the block's arrays.
    - `strings` has the number and the bytes of the "keys", and of the "files" of loose files.
    - `labels` says where the first label of each kind ("integers", "names") is.
    - `mixed` are the bytes features with one value in some records, and several in others.
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
    skipped: int = 0
    mixed: list[str] = field(default_factory=list)
    block_arrays: list[tuple[int, list[str]]] = field(default_factory=list)
    strings: dict[str, tuple[int, int]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    names: list[str | None] = field(default_factory=list)
    fields: dict[str, FieldStats] = field(default_factory=dict)
    file: Path = Path()

    @property
    def files(self) -> int:
        """The number of loose files."""
        return self.strings.get("files", (0, 0))[0]

    @classmethod
    def load(cls, file: Path, /, *, check: bool = True) -> ShardPart | None:
        """Load a part; return None if the file is missing, truncated or damaged."""
        try:
            with open_file(file) as data, zipfile.ZipFile(data) as archive:
                if check and archive.testzip() is not None:
                    return None
                stats = json.loads(archive.read(_STATS_FILE))
            options = IndexOptions(**stats["options"])
            fields = {name: FieldStats(*found) for name, found in stats["fields"].items()}
            return cls(**stats | {"options": options, "fields": fields, "file": file})
        except Exception:  # damage can raise any error
            return None

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks of records with their arrays; raise IndexFormatError for damage."""
        try:
            with open_file(self.file) as data, np.load(data) as arrays:  # checks CRCs
                for number, (records, names) in enumerate(self.block_arrays):
                    yield Block(records, {name: arrays[f"{number}/{name}"] for name in names})
        except Exception as error:
            raise damaged_part(self.file) from error


def check_field_count(fields: Collection[str], /) -> None:
    """Raise ValueError for more fields than an index may have."""
    if len(fields) > LIMITS.fields:
        raise ValueError(
            f"more than {LIMITS.fields} different fields ({', '.join(sorted(fields)[:5])}, ...): "
            "name those you want with fields= (--field)"
        )


def load_part(file: Path, /, *, check: bool = True) -> ShardPart:
    """Load a part; raise IndexFormatError if the file is missing or damaged."""
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
    """Write a part to a temporary file, which is renamed when the part is finished."""

    def __init__(self, file: Path, /) -> None:
        self.file = file
        self.zip = zipfile.ZipFile(file, "x")
        self.block_arrays: list[tuple[int, list[str]]] = []

    def add(self, records: int, arrays: Mapping[str, Array], /) -> None:
        """Write a block of records, with its arrays by name."""
        for name, array in arrays.items():
            with self.zip.open(f"{len(self.block_arrays)}/{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
        self.block_arrays.append((records, list(arrays)))

    def finish(self, part: ShardPart, /) -> None:
        """Write the statistics, and rename the file to its final name."""
        part.block_arrays = self.block_arrays
        stats = vars(part) | {"options": vars(part.options), "file": ""}
        with self.zip.open(_STATS_FILE, "w") as entry:
            entry.write(json.dumps(stats).encode())
        self.zip.close()
        os.replace(self.file, part.file)


@contextmanager
def new_part(file: Path, /) -> Iterator[PartFile]:
    """Yield a writer to a temporary file beside `file`. It is removed if it was not finished."""
    with explain_full_disk(file.parent):
        out = PartFile(temporary_name(file))
        try:
            yield out
        finally:
            with suppress(OSError):  # a full disk was reported already
                out.zip.close()
            out.file.unlink(missing_ok=True)
