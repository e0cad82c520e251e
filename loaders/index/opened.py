"""The open index: where each record and its fields lie, with labels and small numbers.

The table of a field has one row per record: the place of the field's bytes, how many bytes there
are, and their CRC-32C.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from twinfeed.loaders._checks import Ids, Int64s, check_ids, choice
from twinfeed.loaders._temporary import remove_temporary
from twinfeed.loaders.errors import REBUILD, IndexFormatError, LoaderError, StaleIndexError
from twinfeed.loaders.formats._features import WIRES
from twinfeed.loaders.index._arrays import ROW, Arrays, Columns, StringColumn, row_types
from twinfeed.loaders.index._paths import check_shards, is_url, refuse_unfinished, remembered_root
from twinfeed.loaders.index._remote_index import bring_index
from twinfeed.loaders.index._store import digest_of, read_manifest
from twinfeed.loaders.index.options import IndexOptions
from twinfeed.loaders.remote._store import store_of
from twinfeed.loaders.remote.cache import DiskCache, cache_of_environment
from twinfeed.samplers import ClassOrder
from twinfeed.samplers._explain import html_table
from twinfeed.samplers._validate import counted

SHARD = np.dtype([("bytes", "<i8"), ("headers", "<u4")])
"""One shard: its size, and the checksum of its record headers."""

_LOOKED_AT, _OF_MANY = 1000, 16
"""Of at most the first number of shards, opening looks at all; of more, at the second number."""


class Field(NamedTuple):
    """Say how a field is read ("bytes", or a list of an Example), and how many records lack it.

    >>> Field("bytes", 0).kind
    'bytes'
    """

    kind: str
    missing: int


class Index:
    """Hold what is known of all records of a set of shards.

    `build_index`, `pack` and `open_index` return an index. An index pickles as its path.

    - `fields`: what can be read of a record.
    - `columns`: arrays of one row per record, with `label` among them if there are labels.
    - `classes`: the names of the labels, or empty if labels are numbers without names.
    - `shard_lengths` (int64[S]): the number of records of each shard.
    - `fingerprint`: stands for the data. It is the same wherever the index is copied, and changes
      when a record, a label or a class changes.
    - `digests`: by name, a SHA-256 of what each bytes field and each column holds, the same in
      every container.
    - `options`: how the index was built.
    - `digest`: a SHA-256 of the whole manifest, for `open_index(digest=…)`.
    - `cache`: keeps on a local disk what is read of remote shards, or None.

    The bytes of the index itself are checked too (IndexFormatError): a small array when the index
    is opened, and a large column, or the keys, when first used. This takes about half a second per
    gigabyte, once. A process that is sent the index does not check again. Where a field lies is
    checked by the CRC of what is read there.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> index = pack([{"word": b"to", "label": 0}, {"word": b"be", "label": 1}], mkdtemp())["data"]
    >>> len(index), index.labels, list(index.fields), index.shard_lengths
    (2, array([0, 1]), ['word'], array([2]))
    """

    def __init__(
        self, path: Path, root: str, manifest: Mapping[str, Any], cache: DiskCache | None = None
    ) -> None:
        self.path = path
        self.where = str(path)  # or the URL that `path` is a copy of
        self.root = root
        self.cache = cache
        self.manifest = manifest
        self.container: str = manifest["container"]
        self.options = IndexOptions(**manifest["options"])
        self.digest: str = digest_of(manifest)
        self.classes: tuple[str, ...] = tuple(manifest["classes"])
        self.fingerprint: str = manifest["fingerprint"]
        self.fields = MappingProxyType(
            {
                f["name"]: Field(choice("kind", f["kind"], ("bytes", *WIRES)), f["missing"])
                for f in manifest["fields"]
            }
        )
        self.digests: Mapping[str, str] = MappingProxyType(manifest["digests"])
        arrays = self._arrays = Arrays(path, manifest)
        self._records = int(manifest["records"])
        self._check_arrays()
        self._tables = {name: arrays[f"field-{n}"] for n, name in enumerate(self.fields)}
        self._words = {  # numpy is slow to take rows of mixed types
            name: table.view(np.uint32).reshape(len(table), -1)
            for name, table in self._tables.items()
        }
        self.columns: Mapping[str, npt.NDArray[Any]] = Columns(
            arrays, {name: f"column-{n}" for n, name in enumerate(manifest["columns"])}
        )

    def _check_arrays(self) -> None:
        """Raise IndexFormatError unless all arrays are there, of the right type and length."""
        arrays, records, shards = self._arrays, self._records, len(self._arrays["shards"])
        fields, columns = range(len(self.fields)), range(len(self.manifest["columns"]))
        rows: tuple[Any, ...] = tuple(row_types(whole_files=self.container == "files"))
        strings = {"shardpaths": shards}
        if self.has_keys:
            strings["keys"] = records
        if "files-ends" in arrays:
            strings["files"] = len(arrays["files-ends"])
        wanted = [
            ("shards", shards, SHARD),
            ("shardstops", shards, "<i8"),
            *([("shardsums", shards, "u1")] if self.options.digest else []),
            *((f"field-{n}", records, *rows) for n in fields),
            *((f"column-{n}", records, "<i8", "<f4") for n in columns),
            *((f"{name}-ends", length, "<u4", "<i8") for name, length in strings.items()),
            *((f"{name}-text", int(arrays[f"{name}-ends"][-1]), "u1") for name in strings),
        ]
        wrong = [
            name
            for name, length, *types in wanted
            if name not in arrays
            or arrays[name].dtype not in map(np.dtype, types)
            or len(arrays[name]) != length
        ]
        if wrong or arrays["shardstops"][-1] != records:
            raise IndexFormatError(
                "damaged index: its arrays do not fit together",
                path=self.where,
                expected=f"{records} records in {shards} shards",
                found=f"other lengths or types in {', '.join(wrong or ['shardstops'])}",
                advice=REBUILD,
            )

    @property
    def shards(self) -> npt.NDArray[Any]:
        """The table of shards: the bytes of each, and the checksum of its record headers."""
        return self._arrays.check("shards")

    @property
    def shard_stops(self) -> Int64s:
        """The id after the last record of each shard, int64[S]."""
        return self._arrays.check("shardstops")

    @property
    def shard_sums(self) -> npt.NDArray[np.uint8]:
        """The SHA-256 of each shard, uint8[S, 32], or no rows if the index was built without."""
        held = "shardsums" in self._arrays
        return self._arrays.check("shardsums") if held else np.zeros((0, 32), np.uint8)

    @property
    def shard_paths(self) -> StringColumn:
        """The paths of the shards, relative to the root."""
        return self._strings("shardpaths")

    @property
    def files(self) -> StringColumn:
        """The paths that the rows of tables refer to by number: of loose files, or of shards."""
        return self._strings("files" if "files-ends" in self._arrays else "shardpaths")

    def tag(self, number: int, /) -> str | None:
        """Return the tag that its store gave a shard when the shard was indexed, or None.

        There is no tag for shards that are now read from another place.
        """
        tags = self.options.tags
        return tags[number] if tags and self.root == self.options.root else None

    def _strings(self, name: str, *, checked: bool = True) -> StringColumn:
        """Return a column of strings. Only messages and a first look take it unchecked."""
        get = self._arrays.check if checked else self._arrays.__getitem__
        return StringColumn(get(f"{name}-text"), get(f"{name}-ends"))

    def look_at_shards(self) -> None:
        """Compare the sizes of all shards, or of a few spread over many, with the index."""
        arrays, n = self._arrays, len(self._arrays["shards"])
        chosen = np.linspace(0, n - 1, n if n <= _LOOKED_AT else _OF_MANY).astype(np.int64)
        paths = self._strings("shardpaths", checked=False)
        names = [paths[place] for place in chosen.tolist()]
        try:
            check_shards(self.root, names, arrays["shards"]["bytes"][chosen].tolist())
        except (LoaderError, OSError):
            _ = self.shards, self.shard_paths  # raises if it is the index that is damaged
            raise

    def __len__(self) -> int:
        return self._records

    def __repr__(self) -> str:
        return (
            f"<Index {self.where!r}: {counted(len(self), 'record')}, "
            f"{counted(len(self._arrays['shards']), 'shard')}, "
            f"fields {list(self.fields)}, columns {list(self.columns)}>"
        )

    def _repr_html_(self) -> str:
        """Show what the index holds in a notebook."""
        classes = ", ".join(self.classes[:12]) + (", …" if len(self.classes) > 12 else "")
        return html_table(
            f"Index {self.where!r}",
            [
                ("records", f"{len(self):,}"),
                ("shards", f"{len(self._arrays['shards']):,} ({self.container})"),
                ("fields", ", ".join(self.fields)),
                ("columns", ", ".join(self.columns)),
                ("classes", f"{len(self.classes):,}: {classes}" if classes else "no names"),
            ],
        )

    def __reduce__(self) -> tuple[Any, ...]:
        checked = self._arrays.checked
        told = self.fingerprint, checked, self.cache, self.where
        return _reopen, (str(self.path), self.root, *told)

    @property
    def has_keys(self) -> bool:
        """Whether records have keys of their own."""
        return "keys-ends" in self._arrays

    @property
    def labels(self) -> Int64s | None:
        """The labels, int64[N]; None without a column `label` of one integer per record."""
        label = self.columns.get("label")
        return None if label is None or label.ndim > 1 or label.dtype.kind != "i" else label

    @property
    def class_order(self) -> ClassOrder | None:
        """The records sorted by class, or None where there are no labels.

        `PKBatchSampler` takes this in place of `labels`. The order is sorted already, and mapped.
        """
        if self.manifest["class_order"] is None:
            return None
        mapped = self._arrays.mapped
        return ClassOrder.from_arrays(
            records=mapped("classorder-records"),
            starts=mapped("classorder-starts"),
            sizes=mapped("classorder-sizes"),
            digest=self.manifest["class_order"],
        )

    @property
    def shard_lengths(self) -> Int64s:
        """The number of records of each shard, int64[S]."""
        return np.diff(self.shard_stops, prepend=0)

    def table(self, field: str, /) -> npt.NDArray[Any]:
        """Return the table of a field as it is stored: N rows of (offset, length, crc). Loose files
        have the number of the file in place of the offset.
        """
        try:
            return self._tables[field]
        except KeyError:
            raise KeyError(
                f"no field {field!r}: this index has the fields {list(self.fields)} "
                f"and the columns {list(self.columns)}"
            ) from None

    def rows(self, fields: Sequence[str], ids: Int64s, /) -> npt.NDArray[Any]:
        """Return a `ROW` for each field of each record, record by record."""
        rows = np.zeros((len(ids), len(fields)), ROW)
        if self.container != "files":
            rows["file"].T[:] = self.shard_stops.searchsorted(ids, "right")
        for place, field in enumerate(fields):
            dtype = self.table(field).dtype
            held = self._words[field].take(ids, 0).view(dtype)[:, 0]  # faster than indexing
            for name in dtype.names or ():
                rows[name][:, place] = held[name]
        return rows.reshape(-1)

    def place(self, record: int, /) -> tuple[str, int]:
        """Return the path of a record's shard, relative to the root, and the record's number there.

        Bad records are not counted.
        """
        stops = self.shard_stops
        shard = int(stops.searchsorted(record, "right"))
        return self.shard_paths[shard], record - int(stops[shard - 1] if shard else 0)

    def keys(self, ids: Ids, /) -> list[str]:
        """Return the key of each record, or "shard#number" if the container has no keys."""
        ids = check_ids(ids, len(self)).tolist()
        if self.has_keys:
            return list(map(self._strings("keys").__getitem__, ids))
        return ["{}#{}".format(*self.place(record)) for record in ids]

    def describe(self, record: int, /) -> str:
        """Say in one line where a record lies, for messages."""
        record = int(check_ids([record], len(self))[0])
        key = f", key {self._strings('keys', checked=False)[record]!r}" if self.has_keys else ""
        shard, number = self.place(record)
        held = [table[record] for table in self._tables.values() if table["length"][record] >= 0]
        if self.container == "files" and held:
            return f"record {record} ({self.files[int(held[0]['file'])]}{key})"
        where = f" at byte offset {min(int(row['offset']) for row in held)}" if held else ""
        return f"record {record} ({shard}, number {number}{where}{key})"


def open_index(
    path: str | os.PathLike[str],
    /,
    *,
    root: str | os.PathLike[str] | None = None,
    digest: str | None = None,
    cache: DiskCache | None = None,
) -> Index:
    """Open the index folder at `path`, a path or a URL, and check that its shards are there.

    Each shard must have the size that it was indexed with. Of more than a thousand shards, only
    sixteen are looked at, spread over all. The others are checked when they are first read, and so
    are shards at a URL and loose files.

    Shard paths are relative to `root`. The default is the URL that the index was built with, or
    else the folder that holds the index folder.

    A `cache` keeps on a local disk what is read of shards at a URL, for later epochs and other
    processes. The default is the cache that the environment names; see `DiskCache`. An index at a
    URL is copied to the cache, where the copy stays, or else to a temporary folder.

    A checksum is no signature: whoever can write the index can write checksums that fit. Where the
    index comes from somebody else, give the `digest` (`Index.digest`) that you got in a way that
    you trust. The digest covers the index with all its checksums.

    Raises FileNotFoundError (no index; shards missing: the first five are named), IndexFormatError
    (an incomplete or damaged index, or another version), StaleIndexError (a shard has another
    size, or the index another digest), UnsafeContentError (a path that leaves the root) and
    LoaderError (a store that cannot be reached, or refuses).

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> folder = mkdtemp()
    >>> index = pack([{"word": b"to"}], folder)["data"]
    >>> open_index(f"{folder}/data.index", digest=index.digest).fingerprint == index.fingerprint
    True
    """
    if not isinstance(cache, DiskCache | None):
        raise TypeError(f"cache must be a DiskCache, got {cache!r}")
    if cache is None and is_url(os.fspath(path)):
        cache = cache_of_environment()
    index = load_index(path, root, cache)
    if is_url(index.root):
        index.cache = cache or cache_of_environment()
        store_of(index.root).forget()
    if digest is not None and index.digest != digest:
        raise StaleIndexError(
            "this is another index",
            path=index.where,
            expected=f"digest {digest}",
            found=index.digest,
            advice="get the index again from where the digest comes from",
        )
    if index.container != "files":  # there may be millions of files: each is checked when read
        index.look_at_shards()
    return index


def load_index(
    path: str | os.PathLike[str],
    root: str | os.PathLike[str] | None,
    cache: DiskCache | None = None,
    /,
) -> Index:
    """Open the index folder at `path`, a path or a URL, without a look at its shards."""
    given = os.fspath(path)
    if is_url(given):
        folder, temporary = bring_index(given, cache)
        near = given.rstrip("/").rpartition("/")[0]
    else:
        folder, temporary = Path(os.path.abspath(given)), None
        near = str(folder.parent)
        refuse_unfinished(near, folder.name)
    manifest, index = read_manifest(folder), None
    while index is None:
        try:
            where = remembered_root(manifest["options"].get("root"), near)
            index = Index(folder, where if root is None else os.fspath(root), manifest, cache)
        except FileNotFoundError:
            before, manifest = manifest, read_manifest(folder)
            if manifest == before:  # it was not replaced by a new build meanwhile
                raise IndexFormatError(
                    "incomplete index: an array is missing", path=folder, advice=REBUILD
                ) from None
        except IndexFormatError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise IndexFormatError(
                "damaged index: its manifest tells what cannot be",
                path=folder,
                found=f"{type(error).__name__}: {error}",
                advice=REBUILD,
            ) from None
    if is_url(given):
        index.where = given
    if temporary is not None:
        weakref.finalize(index, remove_temporary, temporary)
    return index


def check_index(index: Index) -> None:
    """Raise TypeError for what is no open index."""
    if not isinstance(index, Index):
        raise TypeError(
            f"index must be an Index, got a {type(index).__name__}: open_index(path) gives one"
        )


def _reopen(
    path: str,
    root: str,
    fingerprint: str,
    checked: set[str],
    cache: DiskCache | None,
    place: str,
) -> Index:
    """Open a pickled index in another process; raise StaleIndexError if the index has changed.

    What was checked before is not checked again.
    """
    index = load_index(path, root, cache)
    if index.fingerprint != fingerprint:
        raise StaleIndexError(
            "the index was built anew while it was in use",
            path=place,
            expected=f"fingerprint {fingerprint}",
            found=index.fingerprint,
            advice="start again with the new index",
        )
    index.where = place
    index._arrays.checked |= checked
    return index
