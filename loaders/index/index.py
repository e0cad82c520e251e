"""The class `Index`: the byte range of each field of each record, labels and numeric columns."""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.errors import IndexFormatError, LoaderError, StaleIndexError
from twinfeed.loaders.formats.features import WIRE_TYPES
from twinfeed.loaders.index.arrays import ROW, Arrays, Columns, StringColumn, row_types
from twinfeed.loaders.index.manifest import (
    CLASS_ORDER,
    invalid_manifest,
    json_digest,
    read_manifest,
)
from twinfeed.loaders.index.options import IndexOptions
from twinfeed.loaders.index.remote_index import download_index
from twinfeed.loaders.storage.disk_cache import DiskCache
from twinfeed.loaders.storage.url import Location, Root, is_url, parse_location, quoted, unquoted
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.array_types import Ids, Int64s
from twinfeed.loaders.support.display import html_table
from twinfeed.loaders.support.temporary import remove_temporary
from twinfeed.samplers import ClassOrder, validate
from twinfeed.samplers.validate import a_type, counted

SHARD = np.dtype([("bytes", "<i8"), ("headers", "<u4")])
"""One shard: its size, and the checksum of its record headers."""


class Field(NamedTuple):
    """The kind of a field ("bytes", or a list of an Example), and how many records lack it.

    >>> Field("bytes", 0).kind
    'bytes'
    """

    kind: str
    missing: int


class Index:
    """An index of the records of a set of shards: locations, labels, keys and checksums.

    `build_index`, `pack` and `open_index` return an index. An index pickles as its path.

    The bytes of the index itself are checked too (IndexFormatError): a small array when the index
    is opened, and a large column, or the keys, when first used. This takes about half a second per
    gigabyte, once. A process that gets the index pickled does not check again. Where a field lies
    is checked by the CRC of what is read there.

    Attributes:
        fields: what can be read of a record.
        columns: arrays of one row per record, with `label` among them if there are labels.
        classes: the names of the labels, or empty if labels are numbers without names.
        shard_lengths: the number of records of each shard, int64[S].
        fingerprint: a digest of the data. It is the same wherever the index is copied, and changes
            when a record, a label or a class changes.
        digests: by name, a SHA-256 of what each bytes field and each column holds, the same in
            every container.
        options: how the index was built.
        digest: a SHA-256 of the whole manifest, for `open_index(digest=…)`.
        cache: keeps on a local disk what is read of remote shards, or None.
        checksums: whether the bytes of each field are compared with their CRC-32C.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> index = pack([{"word": b"to", "label": 0}, {"word": b"be", "label": 1}], mkdtemp())["data"]
    >>> len(index), index.labels, list(index.fields), index.shard_lengths
    (2, array([0, 1]), ['word'], array([2]))
    """

    def __init__(
        self,
        path: Path,
        where: str,
        root: Root,
        manifest: Mapping[str, Any],
        cache: DiskCache | None = None,
    ) -> None:
        self.path = path
        self.where = where  # `path`, or the URL that `path` is a copy of
        self.shards_root = root
        self.cache = cache
        self.checksums = True
        self.manifest = manifest
        self.container: str = manifest["container"]
        self.options = IndexOptions(**manifest["options"])
        built = self.options.root
        self.built_root = Location.of(built, from_user=False) if built and is_url(built) else None
        self.digest: str = json_digest(manifest)
        self.fingerprint: str = manifest["fingerprint"]
        fields = {f["name"]: Field(f["kind"], f["missing"]) for f in manifest["fields"]}
        for field in fields.values():
            validate.choice("kind", field.kind, ("bytes", *WIRE_TYPES))
        self.fields: Mapping[str, Field] = MappingProxyType(fields)
        self.digests: Mapping[str, str] = MappingProxyType(manifest["digests"])
        arrays = self._arrays = Arrays(path, manifest)
        self._records: int = manifest["records"]
        self._check_arrays()
        self._tables = {name: arrays[f"field-{n}"] for n, name in enumerate(self.fields)}
        array_names = {name: f"column-{n}" for n, name in enumerate(manifest["columns"])}
        self.columns = Columns(arrays, array_names)

    @property
    def root(self) -> str:
        """The folder or the URL that contains the shards."""
        return str(self.shards_root)

    @property
    def remote(self) -> bool:
        """Whether the shards are in an object store, not in a local folder."""
        return isinstance(self.shards_root, Location)

    def _check_arrays(self) -> None:
        """Raise KeyError or ValueError unless all arrays have the right types and lengths."""
        arrays, records, shards = self._arrays, self._records, len(self._arrays["shards"])

        def check(name: str, length: int, *dtypes: Any, ndim: int = 1) -> None:
            array = arrays[name]
            fits = array.dtype in map(np.dtype, dtypes) and len(array) == length
            if not fits or array.ndim > ndim:
                raise ValueError(f"{name} does not fit {records} records in {shards} shards")

        check("shards", shards, SHARD)
        check("shardstops", shards, "<i8")  # the id after the last record of each shard
        check("shardlengths", shards, "<i8")
        if self.options.digest:
            check("shardsums", shards, "u1", ndim=2)  # the SHA-256 of each shard
        for number in range(len(self.fields)):
            check(f"field-{number}", records, *row_types(whole_files=self.container == "files"))
        for number in range(len(self.manifest["columns"])):
            check(f"column-{number}", records, "<i8", "<f4", ndim=2)
        # The number of strings of each column of strings, or None if any number is allowed. All
        # but the paths of the shards are optional.
        strings = {"keys": records, "tags": shards, "files": None, "classes": None}
        for name, length in {"shardpaths": shards, **strings}.items():
            if name == "shardpaths" or f"{name}-ends" in arrays:
                ends = arrays[f"{name}-ends"]
                check(f"{name}-ends", len(ends) if length is None else length, "<u4", "<i8")
                check(f"{name}-text", int(ends[-1]), "u1")
        if "leftout" in arrays:  # the shard and the number of each record
            pairs = arrays["leftout"]
            fits = pairs.dtype == np.dtype("<i8") and pairs.shape == (self.options.left_out, 2)
            if not fits or (pairs[:, 0] // shards).any():
                raise ValueError(f"leftout does not fit {shards} shards")
        if arrays["shardstops"][-1] != records:
            raise ValueError(f"shardstops does not fit {records} records")

    @property
    def shards(self) -> npt.NDArray[Any]:
        """The table of shards: the bytes of each, and the checksum of its record headers."""
        return self._arrays.verified_array("shards")

    @cached_property
    def shard_stops(self) -> Int64s:
        """The id after the last record of each shard, int64[S]."""
        return self._arrays.verified_array("shardstops")

    @property
    def shard_sums(self) -> npt.NDArray[np.uint8]:
        """The SHA-256 of each shard, uint8[S, 32], or no rows if the index was built without."""
        stored = "shardsums" in self._arrays
        return self._arrays.verified_array("shardsums") if stored else np.zeros((0, 32), np.uint8)

    @property
    def shard_paths(self) -> StringColumn:
        """The paths of the shards, relative to the root."""
        return self._strings("shardpaths")

    @property
    def classes(self) -> Sequence[str]:
        """The names of the labels, by number, which may be mapped: a sequence like a tuple."""
        return self._strings("classes") if "classes-ends" in self._arrays else ()

    @property
    def num_classes(self) -> int:
        """The number of classes, which is the number of outputs that a classifier needs.

        This is the number of class names. If the labels have no names, it is the largest label plus
        1, and if there are no labels, 0.
        """
        order = self.class_order
        if self.classes or order is None:
            return len(self.classes)
        first_records = order.records[order.starts]  # a record of each class: reads fewer labels
        return int(self.labels[first_records].max()) + 1

    @property
    def files(self) -> StringColumn:
        """The paths of the loose files, or else of the shards: the `file` of a row is an index."""
        return self._strings("files" if "files-ends" in self._arrays else "shardpaths")

    def tag(self, number: int, /) -> str | None:
        """Return the ETag that a shard had when it was indexed, or None if it is not known.

        An object store sends the ETag, which changes when the object does. It is also None if the
        shards are now read from another root: copies of the shards have other ETags.
        """
        if "tags-ends" not in self._arrays or self.root != self.options.root:
            return None
        return self._strings("tags")[number] or None  # "" if the store has sent none

    def _strings(self, name: str, *, verify: bool = True) -> StringColumn:
        """Return the column of strings called `name`, if `verify` compared with its SHA-256."""
        get_array = self._arrays.verified_array if verify else self._arrays.__getitem__
        text, ends = get_array(f"{name}-text"), get_array(f"{name}-ends")
        # Only paths may have to be converted: "a%20b.tar" at a web server is "a b.tar" in a folder.
        return StringColumn(text, ends, self._path_converter(name))

    def _path_converter(self, column: str) -> Callable[[str], str] | None:
        """Return a function that converts stored paths to paths below the root, if one is needed:
        the shards are now at a web server, whose paths are percent-encoded, or no longer are.
        """
        is_web = isinstance(self.shards_root, Location) and self.shards_root.web
        was_web = self.built_root is not None and self.built_root.web
        if is_web == was_web or column not in ("shardpaths", "files"):
            return None
        return quoted if is_web else unquoted

    def __len__(self) -> int:
        return self._records

    def __repr__(self) -> str:
        return (
            f"<Index {self.where!r}: {counted(len(self), 'record')}, "
            f"{counted(len(self._arrays['shards']), 'shard')}, "
            f"fields {list(self.fields)}, columns {list(self.columns)}>"
        )

    def _repr_html_(self) -> str:
        kinds = {name: field.kind for name, field in self.fields.items()} | self.columns.types()
        return html_table(repr(self), kinds.items())

    def __getitem__(self, record: SupportsIndex, /) -> dict[str, Any]:
        """Read the fields and columns of one record, to look at it.

        The shard is opened and closed each time: use a `Reader` for many records. A missing field
        is None.

        Raises:
            IndexError: there is no such record.
            LoaderError: an error of reading.
        """
        from twinfeed import Reader  # at call time, since `Reader` imports this module

        number = range(len(self))[operator.index(record)]
        names = [*self.fields, *self.columns]
        with Reader(self) as reader:
            values = reader.read([number], names)
        return {name: rows[0] for name, rows in values.items()}

    def summary(self) -> str:
        """Return a string with the sizes of shards, fields and classes.

        >>> from tempfile import mkdtemp
        >>> from twinfeed import pack
        >>> records = [{"word": b"to", "label": 0}, {"word": b"be", "label": 1}]
        >>> print(pack(records, mkdtemp())["data"].summary())
        2 records in 1 shard, 2 records per shard
        word: bytes, 2 bytes per record, 4 bytes in total
        label: column, int64[2]
        2 classes, 1 record per class, median 1
        """
        shards = counted(len(self.shard_lengths), "shard")
        per_shard = f"{_range(self.shard_lengths, 'record')} per shard"
        lines = [f"{counted(len(self), 'record')} in {shards}, {per_shard}"]
        for name, field in self.fields.items():
            lengths = self.table(name)["length"]
            lengths = lengths[lengths >= 0]  # a missing field has length -1
            total = counted(int(lengths.sum()), "byte")
            stored = f"{_range(lengths, 'byte')} per record, {total} in total"
            missing = f", {field.missing:,} missing" if field.missing else ""
            missing += ", read as empty" if missing and self.options.missing == "empty" else ""
            lines.append(f"{name}: {field.kind}, {stored}{missing}")
        lines += [f"{name}: column, {kind}" for name, kind in self.columns.types().items()]
        if self.class_order is not None:
            sizes = np.asarray(self.class_order.sizes)
            per_class = f"{_range(sizes, 'record')} per class, median {int(np.median(sizes)):,}"
            classes = counted(len(sizes), "class")
            if len(sizes) != self.num_classes:  # the highest label plus 1
                classes += f" (num_classes={self.num_classes:,})"
            lines.append(f"{classes}, {per_class}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        state = self.fingerprint, self._arrays.verified, self.cache, self.where, self.checksums
        return _unpickle, (str(self.path), self.shards_root, *state)

    @property
    def has_keys(self) -> bool:
        """Whether the index has the keys of records."""
        return "keys-ends" in self._arrays

    @property
    def has_labels(self) -> bool:
        """Whether there is a column `label` of one integer per record."""
        label = self.columns.get("label")
        return label is not None and label.ndim == 1 and label.dtype.kind == "i"

    @property
    def labels(self) -> Int64s:
        """The labels, int64[N].

        Raises:
            LoaderError: there is no column `label` of one integer per record.
        """
        if not self.has_labels:
            raise LoaderError(
                "the index has no labels",
                path=self.where,
                advice=f"build it with label=, of the fields {list(self.fields)} or another "
                "source: FromFile(r'class_(\\d+)') takes the label from the name of a class file; "
                "images get their labels from a folder for each class",
            )
        return self.columns["label"]

    @cached_property
    def class_order(self) -> ClassOrder | None:
        """The records sorted by class, or None without labels.

        `PKBatchSampler` takes this in place of `labels`: the build has sorted the records, and
        large arrays are memory-mapped.
        """
        digest = self.manifest["class_order"]
        if digest is None:
            return None
        # `CLASS_ORDER` maps the name of an array to an argument of `ClassOrder`: for example,
        # "classorder-sizes" to "sizes".
        arrays = {key: self._arrays.verified_memmap(name) for name, key in CLASS_ORDER.items()}
        try:
            order = ClassOrder.from_arrays(**arrays, digest=digest)
            _check_class_bounds(order, len(self))
        except (TypeError, ValueError) as error:
            problem = "damaged index: its class order does not fit its records"
            raise IndexFormatError(problem, path=self.where, found=error) from None
        return order

    @property
    def shard_lengths(self) -> Int64s:
        """The number of records of each shard, int64[S]."""
        return self._arrays.verified_array("shardlengths")

    def table(self, field: str, /) -> npt.NDArray[Any]:
        """Return the rows of a field as they are stored: (offset, length, crc) for each record.

        With loose files, a row has an index into `Index.files` in place of the offset.
        """
        try:
            return self._tables[field]
        except KeyError:
            raise KeyError(
                f"no field {field!r}: this index has the fields {list(self.fields)} "
                f"and the columns {list(self.columns)}"
            ) from None

    def rows(self, fields: Sequence[str], ids: Int64s, /) -> npt.NDArray[Any]:
        """Return the byte range of each of the fields of each record: all fields of the first
        record, then all of the second, and so on.

        A row is (offset, length, file, crc), where `file` is an index into `Index.files`. The
        array has len(ids) * len(fields) rows.
        """
        rows = np.zeros(len(ids) * len(fields), ROW)
        if self.container != "files":  # the file is the shard of the record
            rows["file"] = self.shard_stops.searchsorted(ids, "right").repeat(len(fields))
        for number, field in enumerate(fields):
            rows_of_field, stored = rows[number :: len(fields)], self.table(field).take(ids)
            # A stored row has either an offset or a file, in as few bytes as possible. So copy each
            # component of the row by itself.
            for component in stored.dtype.names or ():
                rows_of_field[component] = stored[component]
        return rows

    def location(self, record: int, /) -> tuple[str, int]:
        """Return the path of a record's shard, relative to the root, and the record's index in it.

        Records of the shard that the index leaves out are counted.
        """
        stops = self.shard_stops
        shard = int(stops.searchsorted(record, "right"))
        number = record - int(stops[shard - 1] if shard else 0)
        if "leftout" in self._arrays:
            next_ids, counts = self._left_out
            number += int(next_ids.searchsorted(record, "right") - counts[shard])
        return self.shard_paths[shard], number

    @cached_property
    def _left_out(self) -> tuple[Int64s, Int64s]:
        """Of each record that is left out, the id of the record after it; and of each shard, how
        many are left out of earlier shards.

        Two shards of 3 records, of which the index leaves out 0 and 2, and then 1: ids 0 1 2 are
        the records 1, and 0 2. The next ids are [0, 1, 2], and the counts [0, 2].
        """
        shards, numbers = self._arrays.verified_array("leftout").T
        counts = shards.searchsorted(np.arange(len(self.shard_stops)))
        starts = self.shard_stops - self.shard_lengths
        return (starts + counts)[shards] + numbers - np.arange(len(numbers)), counts

    def keys(self, ids: Ids | None = None, /) -> list[str]:
        """Return the key of each record in `ids`, by default of all records.

        The key is "shard#number" if the container has no keys.
        """
        ids = checks.check_ids(range(len(self)) if ids is None else ids, len(self)).tolist()
        if self.has_keys:
            return list(map(self._strings("keys").__getitem__, ids))
        return ["{}#{}".format(*self.location(record)) for record in ids]

    def describe(self, record: int, /) -> str:
        """Return a description of a record for messages: its shard and number, or file, and key."""
        record = int(checks.check_ids([record], len(self))[0])
        # not compared with its checksum, which takes long, since a message needs only one key
        key = f", key {self._strings('keys', verify=False)[record]!r}" if self.has_keys else ""
        location = "{}, number {}".format(*self.location(record))
        rows = [table[record] for table in self._tables.values()]
        stored = [row for row in rows if row["length"] >= 0]  # a missing field has length -1
        if self.container == "files" and stored:
            location = self.files[int(stored[0]["file"])]  # of the first field
        return f"record {record} ({location}{key})"


def _check_class_bounds(order: ClassOrder, num_records: int) -> None:
    """Raise ValueError if a class has no records, or ids that are not of the `num_records`."""
    for values in (order.records, order.starts, order.sizes - 1):  # which may be mapped: no copies
        if values.min(initial=0) < 0 or values.max(initial=-1) >= num_records:
            raise ValueError(f"numbers beyond its {num_records} records")
    if len(order.records) != num_records or (order.starts + order.sizes > num_records).any():
        raise ValueError(f"classes beyond its {num_records} records")


def _range(values: npt.NDArray[Any], noun: str) -> str:
    """Return the smallest and the largest value as text: "1 to 20 records", "1 record" if equal."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    return counted(low, noun) if low == high else f"{low:,} to {counted(high, noun)}"


def load_index(
    path: str | os.PathLike[str],
    root: str | os.PathLike[str] | Location | None,
    cache: DiskCache | None = None,
    /,
) -> Index:
    """Load the index in the folder or at the URL `path`, without looking at its shards.

    An index at a URL is copied to the cache, or to a folder that is removed with the object.
    """
    location = parse_location(path)
    default_root: Root
    if isinstance(location, Location):
        folder, temporary = download_index(location, cache)
        where, default_root = str(location), location.parent
    else:
        folder, temporary = Path(os.path.abspath(location)), None
        where, default_root = str(folder), str(folder.parent)
    if root is not None:
        default_root = root if isinstance(root, Location) else parse_location(root)
    try:
        index = _open_arrays(folder, where, default_root, cache)
    except IndexFormatError as error:
        if temporary is not None:
            error.path = where  # the copy is temporary
        raise
    if temporary is not None:
        weakref.finalize(index, remove_temporary, temporary)
    return index


def _open_arrays(folder: Path, where: str, root: Root, cache: DiskCache | None) -> Index:
    """Load the index in a local folder; retry if a build replaces the index at the same time."""
    manifest, previous = read_manifest(folder, where), None
    while manifest != previous:
        try:
            return Index(folder, where, root, manifest, cache)
        except FileNotFoundError:
            previous, manifest = manifest, read_manifest(folder, where)
        except LoaderError:
            raise
        except (LookupError, AttributeError, OverflowError, TypeError, ValueError) as error:
            raise invalid_manifest(where, error) from None
    raise IndexFormatError("incomplete index: an array is missing", path=where)


def check_index(index: Index) -> None:
    """Raise TypeError for anything but an `Index`."""
    if not isinstance(index, Index):
        raise TypeError(f"index must be an Index, got {a_type(index)}: open_index(path) gives one")


def _unpickle(
    path: str,
    root: str | Location,
    fingerprint: str,
    verified: set[str],
    cache: DiskCache | None,
    where: str,
    checksums: bool,
) -> Index:
    """Load a pickled index in another process; StaleIndexError if it was rebuilt in between.

    Arrays that are `verified` are not compared again. `where` is the folder or the URL, for
    messages.
    """
    index = load_index(path, root, cache)
    if index.fingerprint != fingerprint:
        raise StaleIndexError(
            "the index was rebuilt while it was in use",
            path=where,
            expected=f"fingerprint {fingerprint}",
            found=index.fingerprint,
            advice="start again with the new index",
        )
    index.checksums = checksums
    index.where = where  # `load_index` got only the local folder
    index._arrays.verified |= verified
    return index
