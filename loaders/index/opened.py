"""The index: for every record, where it and each of its fields lie, and its label and other small
numbers.

Large arrays are memory-mapped, so that opening costs the same for a thousand and ten million
records, and all processes share one copy. A field's table has one row a record: where its bytes
start in which file, how many they are, and their CRC-32C.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from twinfeed.loaders._checks import Ids, Int64s, check_ids
from twinfeed.loaders.errors import REBUILD, IndexFormatError, StaleIndexError
from twinfeed.loaders.index._arrays import Arrays, Columns
from twinfeed.loaders.index._paths import check_names, check_shards, refuse_unfinished
from twinfeed.loaders.index._store import read_manifest
from twinfeed.loaders.index._strings import StringColumn
from twinfeed.loaders.index.options import IndexOptions

ROW = np.dtype([("offset", "<i8"), ("length", "<i8"), ("file", "<u4"), ("crc", "<u4")])
"""One record's entry in the table of a field; a `length` of -1 says that the record lacks the
field.
"""

SHARD = np.dtype([("bytes", "<i8"), ("stop", "<i8"), ("headers", "<u4"), ("unused", "<u4")])
"""One shard: its size, the id after its last record, and the checksum of its record headers."""


class Field(NamedTuple):
    """Say how a field's bytes are read ("bytes", or a list of an Example), and how many records
    lack it.

    >>> Field("bytes", 0).kind
    'bytes'
    """

    kind: str
    missing: int


class Index:
    """Hold the table of all records of a set of shards; made by `build_index`, `pack` and
    `open_index`.

    `fields` names what can be read of a record, `columns` are arrays of one row a record (`label`
    among them, if there are labels), `classes` the names of the labels (empty where labels are
    numbers without names), `shard_lengths` (int64[S]) the records of each shard. `fingerprint`
    stands for the data: it is the same wherever the index is copied, and another one when a
    record, a label or a class changes. `digests` has a SHA-256 of what each bytes field and each
    column holds, by name: the same in every container. `options` tells how the index was built.
    An index pickles as its path.

    The index's own bytes are checked too: small arrays and the list of shards at opening, a large
    column, or the keys, when they are first used (IndexFormatError; a gigabyte takes about half a
    second, once, and no process that is sent the index does it again). Where a field lies is
    checked by the CRC of what is read there.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> index = pack([{"word": b"to", "label": 0}, {"word": b"be", "label": 1}], mkdtemp())["data"]
    >>> len(index), index.labels, list(index.fields), index.shard_lengths
    (2, array([0, 1]), ['word'], array([2]))
    """

    def __init__(self, path: Path, root: str, manifest: Mapping[str, Any]) -> None:
        self.path = path
        self.root = root
        self.manifest = manifest
        self.container: str = manifest["container"]
        self.options = _options(path, manifest)
        self.classes: tuple[str, ...] = tuple(manifest["classes"])
        self.fingerprint: str = manifest["fingerprint"]
        self.fields = MappingProxyType(
            {f["name"]: Field(f["kind"], f["missing"]) for f in manifest["fields"]}
        )
        self.digests: Mapping[str, str] = MappingProxyType(manifest["digests"])
        arrays = self._arrays = Arrays(path, manifest)
        self._tables = {name: arrays[f"field-{n}"] for n, name in enumerate(self.fields)}
        self._words = {
            name: table.view(np.int64).reshape(-1, 3) for name, table in self._tables.items()
        }
        self.columns: Mapping[str, npt.NDArray[Any]] = Columns(
            arrays, {name: f"column-{n}" for n, name in enumerate(manifest["columns"])}
        )
        self.shards = arrays.check("shards")
        self._records = int(self.shards["stop"][-1])
        self.shard_paths = StringColumn(
            arrays.check("shardpaths-text"), arrays.check("shardpaths-ends")
        )
        self.files = self.shard_paths
        if "files-ends" in arrays:
            self.files = StringColumn(arrays["files-text"], arrays["files-ends"])
        self._keys = None
        if "keys-ends" in arrays:
            self._keys = StringColumn(arrays["keys-text"], arrays["keys-ends"])

    def __len__(self) -> int:
        return int(self.shards["stop"][-1]) if len(self.shards) else 0

    def __repr__(self) -> str:
        return (
            f"<Index {str(self.path)!r}: {len(self)} records, {len(self.shards)} shards, "
            f"fields {list(self.fields)}, columns {list(self.columns)}>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self.path), self.root, self.fingerprint, self._arrays.checked)

    @property
    def has_keys(self) -> bool:
        """Whether records have keys of their own."""
        return self._keys is not None

    @property
    def labels(self) -> Int64s | None:
        """The labels, int64[N], or None; a `label` of several numbers or of floats is a column
        only.
        """
        label = self.columns.get("label")
        return None if label is None or label.ndim > 1 or label.dtype.kind != "i" else label

    @property
    def shard_lengths(self) -> Int64s:
        """The number of records of each shard, int64[S]."""
        return np.diff(self.shards["stop"], prepend=0)

    def table(self, field: str, /) -> npt.NDArray[Any]:
        """Return the table of a field: N rows of (offset, length, file, crc)."""
        try:
            return self._tables[field]
        except KeyError:
            raise KeyError(
                f"no field {field!r}: this index has the fields {list(self.fields)} "
                f"and the columns {list(self.columns)}"
            ) from None

    def rows(self, field: str, ids: Int64s, /) -> npt.NDArray[Any]:
        """Return the rows of the table of a field for `ids`; as words, since numpy is slow to take
        rows of mixed types.
        """
        self.table(field)
        return self._words[field][ids].view(ROW).reshape(-1)

    def place(self, record: int, /) -> tuple[str, int]:
        """Return the shard's path, relative to the root, and the number of the record within it,
        bad ones not counted.
        """
        shard = int(np.searchsorted(self.shards["stop"], record, side="right"))
        start = self.shards["stop"][shard - 1] if shard else 0
        return self.shard_paths[shard], record - int(start)

    def keys(self, ids: Ids, /) -> list[str]:
        """Return the key of each record; where the container has none, "shard#number"."""
        ids = check_ids(ids, len(self)).tolist()
        if self._keys is not None:
            self._arrays.check("keys-text")
            self._arrays.check("keys-ends")
            return [self._keys[record] for record in ids]
        return ["{}#{}".format(*self.place(record)) for record in ids]

    def describe(self, record: int, /) -> str:
        """Say in one line where a record lies, for messages."""
        record = int(check_ids([record], len(self))[0])
        key = "" if self._keys is None else f", key {self._keys[record]!r}"
        shard, number = self.place(record)
        held = [table[record] for table in self._tables.values() if table["length"][record] >= 0]
        if self.container == "files" and held:
            return f"record {record} ({self.files[int(held[0]['file'])]}{key})"
        where = f" at byte offset {min(int(row['offset']) for row in held)}" if held else ""
        return f"record {record} ({shard}, number {number}{where}{key})"


def open_index(
    path: str | os.PathLike[str], /, *, root: str | os.PathLike[str] | None = None
) -> Index:
    """Open the index folder at `path`, and check that its shards are there and of the size they
    were indexed with.

    Shard paths are relative to `root`: by default the folder that holds the index folder. A `root`
    may be a URL that fsspec knows; its shards are checked when they are first read, as are loose
    files.

    Raises FileNotFoundError (no index; shards missing: the first five are named), IndexFormatError
    (an incomplete or damaged index, or a newer version), StaleIndexError (a shard has another
    size) and UnsafeContentError (a path that leaves the root).

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> folder = mkdtemp()
    >>> index = pack([{"word": b"to"}], folder)["data"]
    >>> open_index(f"{folder}/data.index").fingerprint == index.fingerprint
    True
    """
    index = load_index(path, root)
    if index.container != "files":  # those are checked when they are read: there may be millions
        check_shards(index.root, index.shard_paths.tolist(), index.shards["bytes"].tolist())
    return index


def load_index(path: str | os.PathLike[str], root: str | os.PathLike[str] | None, /) -> Index:
    """Open the index folder at `path`, and leave its shards unlooked at."""
    path = Path(os.path.abspath(path))
    where = os.fspath(root) if root is not None else str(path.parent)
    refuse_unfinished(path.parent, path.name)
    manifest = read_manifest(path)
    try:
        index = Index(path, where, manifest)
    except FileNotFoundError:
        again = read_manifest(path)  # was it replaced by a new build meanwhile?
        if again == manifest:
            raise IndexFormatError(
                "incomplete index: an array is missing",
                path=path,
                advice=REBUILD,
            ) from None
        index = Index(path, where, again)
    check_names(index.shard_paths.tolist())
    return index


def _options(path: Path, manifest: Mapping[str, Any]) -> IndexOptions:
    """Return how the index was built."""
    try:
        return IndexOptions(**manifest["options"])
    except (TypeError, ValueError) as error:
        problem = "damaged index: its manifest tells options that mean nothing"
        raise IndexFormatError(problem, path=path, found=error, advice=REBUILD) from None


def check_index(index: Index) -> None:
    """Raise TypeError for what is no open index."""
    if not isinstance(index, Index):
        raise TypeError(
            f"index must be an Index, got a {type(index).__name__}: open_index(path) gives one"
        )


def _reopen(path: str, root: str, fingerprint: str, checked: set[str]) -> Index:
    """Open a pickled index in another process, where it must still be the same; what was checked
    is not checked again.
    """
    index = load_index(path, root)
    if index.fingerprint != fingerprint:
        raise StaleIndexError(
            "the index was built anew while it was in use",
            path=path,
            expected=f"fingerprint {fingerprint}",
            found=index.fingerprint,
            advice="start again with the new index",
        )
    index._arrays.checked |= checked
    return index
