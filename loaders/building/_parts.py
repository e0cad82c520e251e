"""Parts: a part is a file with the arrays and statistics of one shard, before the merge.

A part is a zip. It has a file `NUMBER/NAME.npy` for each array of each record batch (consecutive
records of the shard), and last the statistics of the shard as JSON. At most one record batch is
in memory. A zip has a CRC of each file, and its directory at the end, so damage and truncation
are found.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from twinfeed.loaders.index.options import IndexOptions
from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.support.limits import LIMITS

_STATS_FILE = "facts.json"


class RecordBatch(NamedTuple):
    """Consecutive records of a shard: how many they are, and their arrays by name.

    - `rows-N`: the location of field N in each record, see `row_type`; `values-N`: its values.
    - `keys-text` and `keys-ends`, `files-text` and `files-ends`: the keys and the paths of loose
      files, see `StringColumn`.
    - `labels`: the integer labels, or `names`: of each label name its index in
      `ShardPart.label_names`.
    """

    num_records: int
    arrays: dict[str, Array]


class FieldStats(NamedTuple):
    """Statistics of a field over the records of a shard, which decide how an index stores it.

    `kind` is that of `Range`, such as "bytes". `max_offset` and `max_length` are the largest byte
    offset and length of the field. `column_width` is the number of values that every record has,
    or 0 if the field cannot be a column.
    """

    kind: str
    max_offset: int = 0
    max_length: int = 0
    column_width: int = 0


@dataclass
class ShardPart:
    """The statistics of one shard; its arrays stay in the file of the part.

    - `bytes` is the size of the shard, `sha256` its digest in hex ("" if not asked for), `etag` its
      ETag in an object store, and `headers_crc` a checksum of the headers of all its records.
    - `num_excluded`, `num_skipped`: how many records are left out because of `exclude=`, and
      because a field, the label or the key is missing.
    - `is_incomplete`: whether the shard is unreadable from a bad record on, which is left out with
      all records after it.
    - `mixed_features` are the bytes features with one value in some records, several in others.
    - `block_arrays` has for each record batch its number of records, and the names of its arrays.
    - `string_sizes` has for "keys", and for "files" (the paths of loose files), the number of
      strings and of their bytes.
    - `first_labels` says for errors where the first label of each kind, "integers" or "names", is.
    - `label_names` are the different label names. The record batches have indices into this list.
      None means a record without a label.
    """

    options: IndexOptions
    path: str
    bytes: int
    etag: str | None = None
    num_records: int = 0
    headers_crc: int = 0
    sha256: str = ""
    num_excluded: int = 0
    is_incomplete: bool = False
    num_skipped: int = 0
    mixed_features: list[str] = field(default_factory=list)
    block_arrays: list[tuple[int, list[str]]] = field(default_factory=list)
    string_sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    first_labels: dict[str, str] = field(default_factory=dict)
    label_names: list[str | None] = field(default_factory=list)
    fields: dict[str, FieldStats] = field(default_factory=dict)
    file: Path = Path()

    @property
    def num_files(self) -> int:
        """The number of loose files."""
        return self.string_sizes.get("files", (0, 0))[0]

    def batches(self) -> Iterator[RecordBatch]:
        """Yield the record batches with their arrays."""
        with np.load(self.file) as archive:
            for number, (num_records, names) in enumerate(self.block_arrays):
                arrays = {name: archive[f"{number}/{name}"] for name in names}
                yield RecordBatch(num_records, arrays)


def check_field_count(fields: Collection[str], /) -> None:
    """Raise ValueError for more fields than an index may have."""
    if len(fields) > LIMITS.fields:
        raise ValueError(
            f"more than {LIMITS.fields} different fields ({', '.join(sorted(fields)[:5])}, ...): "
            "select fields with fields= (--field)"
        )


def load_part(file: Path, /) -> ShardPart:
    """Load a part but for its arrays."""
    with zipfile.ZipFile(file) as archive:
        stats = json.loads(archive.read(_STATS_FILE))
    options = IndexOptions(**stats["options"])
    fields = {name: FieldStats(*values) for name, values in stats["fields"].items()}
    return ShardPart(**stats | {"options": options, "fields": fields, "file": file})


class PartFile:
    """Write a part to a new zip file."""

    def __init__(self, archive: zipfile.ZipFile, /) -> None:
        self.zip = archive
        self.block_arrays: list[tuple[int, list[str]]] = []

    def add(self, num_records: int, arrays: Mapping[str, Array], /) -> None:
        """Write a record batch, with its arrays by name."""
        for name, array in arrays.items():
            with self.zip.open(f"{len(self.block_arrays)}/{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
        self.block_arrays.append((num_records, list(arrays)))

    def finish(self, part: ShardPart, /) -> None:
        """Write the statistics of the part as JSON, with the arrays of each record batch."""
        part.block_arrays = self.block_arrays
        # "file" is left empty, since `load_part` sets it to the file that it reads.
        stats = vars(part) | {"options": vars(part.options), "file": ""}
        with self.zip.open(_STATS_FILE, "w") as entry:
            entry.write(json.dumps(stats).encode())
