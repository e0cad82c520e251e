"""Parts: what one shard adds to an index, in a file of its own.

A part is written and read block by block, so that no more than a block is held in memory.

- Each block is a line of JSON that names the arrays of the block, and then the bytes of the arrays.
- After the blocks come the facts of the shard as JSON, and the length of the facts in eight bytes.
- Last comes a SHA-256 of all bytes before.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from twinfeed.loaders.building.store import HashedFile
from twinfeed.loaders.errors import IndexFormatError
from twinfeed.loaders.index.arrays import StringColumn
from twinfeed.loaders.index.manifest import CHUNK
from twinfeed.loaders.index.options import IndexOptions
from twinfeed.loaders.support.atomic import beside, room_for
from twinfeed.loaders.support.checks import Array
from twinfeed.loaders.support.regular import open_file

_LINE = 1 << 17
_SHOWN = 8
_TRAILER = 8 + hashlib.sha256().digest_size


class Block(NamedTuple):
    """Hold some records of a shard: how many there are, and their arrays by name.

    The names are `rows-N` and `values-N` for field N, `keys-text`, `keys-ends`, `files-text`,
    `files-ends`, and `labels` or `names`.
    """

    records: int
    arrays: dict[str, Array]

    def having(self, known: Container[str], /) -> Block:
        """Return the block of the records whose keys are known; without keys, of all records."""
        if "keys-ends" not in self.arrays:
            return self
        keys = StringColumn(self.arrays["keys-text"], self.arrays["keys-ends"]).tolist()
        places = [place for place, key in enumerate(keys) if key in known]
        arrays = {
            name: array[places] if name.startswith(("rows-", "values-")) else array
            for name, array in self.arrays.items()
        }
        left = StringColumn.of(keys[place] for place in places)
        return Block(len(places), arrays | left.arrays("keys"))


class FieldFacts(NamedTuple):
    """Facts of a field of a shard: kind, largest offset, largest length, and `width`.

    `width` is how many numbers every record has, or 0 where the field cannot be a column.
    """

    kind: str
    offset: int = 0
    length: int = 0
    width: int = 0


@dataclass
class ShardPart:
    """Hold the facts of one shard; the arrays stay in the file.

    - `tag` is the tag that the store gave the shard.
    - `strings` has the number and the bytes of the "keys", and of the "files" of loose files.
    - `labels` says where the first label of each kind ("integers", "names") is.
    - `names` are the names that the blocks refer to by number; None stands for no label.
    - `seen` are the names of the records' fields. `lacked` is what records that were left out lack,
      each with the advice.
    """

    plan: str
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
    strings: dict[str, tuple[int, int]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    names: list[str | None] = field(default_factory=list)
    fields: dict[str, FieldFacts] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    lacked: dict[str, str] = field(default_factory=dict)
    file: Path = Path()

    @property
    def files(self) -> int:
        """The number of loose files."""
        return self.strings.get("files", (0, 0))[0]

    @classmethod
    def load(cls, file: Path, /, *, check: bool = True) -> ShardPart | None:
        """Return a part; None if the file is missing, cut short or damaged."""
        try:
            with open_file(file, buffering=CHUNK) as data:
                if check and not _is_whole(data):
                    return None
                facts = json.loads(_facts(data))
            options = IndexOptions(**facts["options"])
            fields = {name: FieldFacts(*found) for name, found in facts["fields"].items()}
            return cls(**facts | {"options": options, "fields": fields, "file": file})
        except (AttributeError, OSError, RecursionError, TypeError, ValueError):
            return None

    def blocks(self) -> Iterator[Block]:
        """Yield the arrays of the records, block by block."""
        try:
            with open_file(self.file, buffering=CHUNK) as data:
                end = os.fstat(data.fileno()).st_size - _TRAILER - len(_facts(data))
                data.seek(0)
                while data.tell() < end:
                    yield _block(data, end)
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            raise damaged_part(self.file) from error


def listed(names: Iterable[str], /) -> str:
    """Name the first of some fields, and say how many more there are.

    >>> listed("bcdefgahij")
    "the fields ['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'] and 2 more"
    """
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"the fields {names[:_SHOWN]}{more}"


def load_part(file: Path, /, *, check: bool = True) -> ShardPart:
    """Return a part; raise IndexFormatError if the file is missing or damaged."""
    if (part := ShardPart.load(file, check=check)) is None:
        raise damaged_part(file)
    return part


def damaged_part(file: Path, /) -> IndexFormatError:
    """Return the error of a missing or damaged part."""
    return IndexFormatError(
        "a part is missing or damaged", path=file, advice="build it again with build_parts"
    )


class PartFile(HashedFile):
    """Write a part. The file gets its name when the part is finished."""

    def add(self, records: int, arrays: Mapping[str, Array], /) -> None:
        """Add the arrays of some records."""
        entries = [(n, np.lib.format.dtype_to_descr(a.dtype), a.shape) for n, a in arrays.items()]
        self.write(json.dumps({"records": records, "arrays": entries}).encode() + b"\n")
        for array in arrays.values():
            self.write_array(array)

    def finish(self, part: ShardPart, /) -> None:
        """Add the facts, and give the file its name."""
        text = json.dumps(vars(part) | {"options": vars(part.options), "file": ""}).encode()
        self.write(text + len(text).to_bytes(8, "little"))
        self.write(self.digest.digest())
        self.close()
        os.replace(self.file, part.file)


@contextmanager
def new_part(file: Path, /) -> Iterator[PartFile]:
    """Yield a temporary file for a part, beside `file`. An unfinished part is removed."""
    with room_for(file.parent, None, work=file.parent):
        out = PartFile(beside(file))
        try:
            yield out
        finally:
            with suppress(OSError):  # a full disk was reported already
                out.close()
            out.file.unlink(missing_ok=True)


def _is_whole(data: BinaryIO) -> bool:
    """Compare the bytes of a part with their digest."""
    digest = hashlib.sha256()
    end = os.fstat(data.fileno()).st_size - digest.digest_size
    while chunk := data.read(min(CHUNK, max(end - data.tell(), 0))):
        digest.update(chunk)
    return data.read() == digest.digest()


def _facts(data: BinaryIO) -> bytes:
    """Return the facts of a part as they were written."""
    end = os.fstat(data.fileno()).st_size - _TRAILER
    data.seek(end)
    length = int.from_bytes(data.read(8), "little")
    data.seek(end - length)
    return data.read(length)


def _block(data: BinaryIO, end: int) -> Block:
    """Return the block that begins here."""
    line = json.loads(data.readline(_LINE))
    arrays = {}
    for name, descr, shape in line["arrays"]:
        dtype = np.lib.format.descr_to_dtype(descr)
        size = dtype.itemsize * math.prod(shape)
        if not 0 <= size <= end - data.tell():
            raise ValueError("a block is longer than its part")
        arrays[name] = np.frombuffer(data.read(size), dtype).reshape(shape)
    return Block(line["records"], arrays)
