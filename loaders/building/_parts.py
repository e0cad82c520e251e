"""Parts: a part is a zip with the arrays of a shard, by record batch, and statistics as JSON."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from twinfeed.loaders.index.options import IndexOptions, Label
from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.support.limits import LIMITS

_STATS_FILE = "facts.json"


RecordBatch = dict[str, Array]
"""The arrays of consecutive records of a shard: `count`, how many they are; `rows-N`, the location
of field N (see `row_type`), and `values-N`; the `StringColumn`s `keys` and `files`; and `labels`,
indices into `ShardPart.labels`.
"""


class FieldStats(NamedTuple):
    """Statistics of a field over a shard; `column_width` is 0 if the field cannot be a column."""

    kind: str
    max_offset: int = 0
    max_length: int = 0
    column_width: int = 0


@dataclass
class ShardPart:
    """The statistics of one shard; its arrays stay in the file of the part.

    - `num_excluded`, `num_skipped`: the records left out by `exclude=`, and for something that is
      missing.
    - `is_incomplete`: whether all records from a bad one on are left out.
    - `mixed_features` are the bytes features with one value in some records, several in others.
    - `string_sizes` has for "keys", and for "files", the number of strings and of their bytes.
    - `labels` are the different labels, of which the batches have indices; None is a missing label.
      `first_records` says of each which record is the first that has it; of an integer, "" after
      the first one, as there may be as many as records.
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
    string_sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    labels: list[Label | None] = field(default_factory=list)
    first_records: list[str] = field(default_factory=list)
    fields: dict[str, FieldStats] = field(default_factory=dict)
    file: str = ""

    @property
    def num_files(self) -> int:
        """The number of loose files."""
        return self.string_sizes.get("files", (0, 0))[0]

    def batches(self) -> Iterator[RecordBatch]:
        """Yield the record batches with their arrays."""
        with np.load(self.file) as archive:
            paths = (path.partition("/") for path in archive.files if "/" in path)
            for number, names in groupby(paths, itemgetter(0)):
                yield {name: archive[f"{number}/{name}"] for _, _, name in names}


def check_field_count(fields: Collection[str], /) -> None:
    """Raise ValueError for more fields than an index may have."""
    if len(fields) > LIMITS.fields:
        raise ValueError(
            f"more than {LIMITS.fields} different fields ({', '.join(sorted(fields)[:5])}, ...): "
            "select fields with fields= (--field)"
        )


def load_part(file: str | Path, /) -> ShardPart:
    """Load a part but for its arrays."""
    with zipfile.ZipFile(file) as archive:
        stats = json.loads(archive.read(_STATS_FILE))
    options = IndexOptions(**stats["options"])
    fields = {name: FieldStats(*values) for name, values in stats["fields"].items()}
    return ShardPart(**stats | {"options": options, "fields": fields, "file": str(file)})


class PartFile:
    """Write a part to a new zip file."""

    def __init__(self, archive: zipfile.ZipFile, /) -> None:
        self.zip, self.num_batches = archive, 0

    def add(self, num_records: int, arrays: RecordBatch, /) -> None:
        """Write a record batch."""
        for name, array in {"count": np.array(num_records), **arrays}.items():
            with self.zip.open(f"{self.num_batches}/{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
        self.num_batches += 1

    def finish(self, part: ShardPart, /) -> None:
        """Write the statistics of the part as JSON."""
        stats = vars(part) | {"options": vars(part.options)}
        with self.zip.open(_STATS_FILE, "w") as entry:
            entry.write(json.dumps(stats).encode())
