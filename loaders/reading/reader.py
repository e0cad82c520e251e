"""Read records by id: in batches, in any order, every byte checked."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.errors import (
    REBUILD,
    DataCorruptionError,
    IndexFormatError,
    LoaderError,
    TruncatedShardError,
    check_bytes,
)
from twinfeed.loaders.formats.example import decode_list
from twinfeed.loaders.index.index import Index, check_index
from twinfeed.loaders.reading.checked import WrongBytes
from twinfeed.loaders.reading.local import LocalFiles, many_near
from twinfeed.loaders.reading.prefetch.read_plan import ReadPlan, outside
from twinfeed.loaders.reading.remote import RemoteFiles
from twinfeed.loaders.support import checks, system
from twinfeed.loaders.support.array_types import Ids, Int64s
from twinfeed.loaders.support.checksum import crc32c
from twinfeed.loaders.support.closing import Closing
from twinfeed.loaders.support.display import call_repr
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.samplers import BatchStream, validate

Value = Any
_CHECKED_BYTES = 1 << 26
"""Rows of more bytes in total are compared with the limit of a batch."""


class Reader(Closing):
    """Read the fields of records by id from the shards of `index`.

    A reader may be used by several threads, forked, and pickled. Files are opened when they are
    read.

    Args:
        index: where the records lie.
        checksums: whether every field's bytes are compared with the CRC-32C that the index holds.
        max_open_files: the most shards that stay open (by default a quarter of what the process may
            open).

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> with Reader(index) as reader:
    ...     reader.read([2, 0, 2])
    {'word': [b'or', b'to', b'or']}
    """

    def __init__(
        self, index: Index, /, *, checksums: bool = True, max_open_files: int | None = None
    ) -> None:
        check_index(index)
        if max_open_files is not None:
            max_open_files = validate.integer("max_open_files", max_open_files, minimum=1)
        self.index = index
        self.checksums = validate.flag("checksums", checksums)
        self.max_open_files = max_open_files
        self._fill = index.options.missing == "empty"
        self._may_lack = {name for name, field in index.fields.items() if field.missing}
        self._renew()

    def __repr__(self) -> str:
        return call_repr(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by parameters: the files are opened where they are read."""
        again = partial(Reader, checksums=self.checksums, max_open_files=self.max_open_files)
        return again, (self.index,)

    def close(self) -> None:
        """Close the open files; a later call opens them anew."""
        if self._pid == os.getpid():
            self._plans.clear()
            self._own_files.close()

    def read(
        self,
        ids: Ids,
        fields: Sequence[str] | None = None,
        /,
        *,
        missing: Mapping[str, Value] | None = None,
    ) -> dict[str, list[Value]]:
        """Return the values of `fields` (default: every field) for each id, in the order of `ids`.

        A field gives `bytes`. A feature of several values gives a list of bytes or an array. A
        column gives its rows. Repeated ids are read once, and neighbours in one piece.

        Args:
            ids: of the records, int.
            fields: their names. Default: every field.
            missing: the value of a field for the records that lack the field.

        Raises:
            IndexError: an id outside [0, N).
            KeyError: an unknown field.
            LoaderError: a record lacks a field.
            StaleIndexError: a shard has changed.
            DataCorruptionError: bytes do not match their checksum.
        """
        names = tuple(self.index.fields) if fields is None else checks.names("fields", fields)
        return self._values(checks.as_ids(ids), names, missing or {})

    def _values(
        self, ids: Int64s, names: Sequence[str], missing: Mapping[str, Value], /
    ) -> dict[str, list[Value]]:
        """Return the same as `read`, without checks of the arguments."""
        columns = self.index.columns
        stored = [name for name in names if name not in columns]
        values = dict(zip(stored, self._read_fields(ids, stored, missing), strict=True))
        if len(stored) == len(names):
            return values
        checks.check_ids(ids, len(self.index))
        for name in columns.keys() & names:
            values[name] = list(columns[name][ids])
        return {name: values[name] for name in names}

    @property
    def _files(self) -> RemoteFiles | LocalFiles:
        """The open files or buffered ranges of this process.

        A forked child makes its own: the parent's locks may be locked.
        """
        if self._pid != os.getpid():
            self._renew()
        return self._own_files

    def _renew(self) -> None:
        self._pid = os.getpid()
        system.keep_freed_memory()
        self._plans: dict[BatchStream, ReadPlan] = {}  # of the last pass of each stream
        self._own_files: RemoteFiles | LocalFiles
        if self.index.remote:
            self._own_files = RemoteFiles(self.index, self.checksums)
        else:
            self._own_files = LocalFiles(self.index, self.checksums, self.max_open_files)

    def _read_fields(
        self, ids: Int64s, names: Sequence[str], missing: Mapping[str, Value]
    ) -> list[list[Value]]:
        """Return the values of each field in the order of `ids`."""
        if not names or not len(ids):
            return [[] for _ in names]
        unique, inverse = ids, None
        ordered = np.sort(ids)
        checks.check_bounds(int(ordered[0]), int(ordered[-1]), len(self.index))
        gaps = ordered[1:] - ordered[:-1]
        least = np.minimum.reduce(gaps, initial=2)
        if not least or (least == 1 and many_near(gaps == 1)):  # same rows, or neighbours
            unique, inverse = np.unique(ids, return_inverse=True)
        data = self._fetch(unique, names, missing, inverse is not None or len(names) > 1)
        out = []
        for number, name in enumerate(names):
            values = self._decode(name, data[number :: len(names)])
            if name in missing and name in self._may_lack:
                missing_rows = self.index.rows([name], unique)["length"] == -1
                values = [
                    missing[name] if is_missing else value
                    for value, is_missing in zip(values, missing_rows.tolist(), strict=True)
                ]
            out.append(values if inverse is None else [values[n] for n in inverse.tolist()])
        return out

    def _fetch(
        self, ids: Int64s, names: Sequence[str], missing: Container[str], neighbours: bool
    ) -> list[bytes]:
        """Return the bytes of each field, record by record; b"" if it may be `missing`."""
        rows = self.index.rows(names, ids)
        present = None
        if not self._may_lack.isdisjoint(names):
            present = self._present(rows, ids, names, missing)
            rows = rows[present]
        self._check_batch(rows)
        files = self._files
        try:
            if isinstance(files, RemoteFiles):
                data = files.fetch(rows)
            else:
                data = files.read(rows, neighbours=neighbours)
        except (WrongBytes, OSError, OverflowError, MemoryError) as error:
            damaged = outside(self.index, rows).tolist()
            if damaged:
                row, found = damaged[0], None
            elif isinstance(error, WrongBytes):
                row, found = error.row, error.found
            else:
                raise
            number = row if present is None else int(present[row])
            record, name = int(ids[number // len(names)]), names[number % len(names)]
            if found is None:
                raise self._damaged_error(record, name, rows[row]) from None
            raise self._bytes_error(record, name, rows[row], found) from None
        if present is None:
            return data
        filled = [b""] * (len(ids) * len(names))
        for number, row_data in zip(present.tolist(), data, strict=True):
            filled[number] = row_data
        return filled

    def _check_batch(self, rows: npt.NDArray[Any]) -> None:
        """Raise LoaderError for more bytes than a batch may have, as in a hostile index."""
        wanted = int(rows["length"].sum())
        if wanted > _CHECKED_BYTES and not len(outside(self.index, rows)):
            advice = f"read fewer records at a time; if these are few, {REBUILD}"
            check_bytes("a batch", wanted, self._most, path=self.index.where, advice=advice)

    @cached_property
    def _most(self) -> int:
        """Most bytes that the records of a batch can have together."""
        if self.index.container == "files":  # their lengths are compared with the files
            return LIMITS.batch_bytes
        # Records of one index do not overlap, and a batch may have a record several times.
        return min(LIMITS.batch_bytes, 16 * int(self.index.shards["bytes"].sum()))

    def _present(
        self, rows: npt.NDArray[Any], ids: Int64s, names: Sequence[str], missing: Container[str]
    ) -> Int64s:
        """Return the numbers of the rows that are there; raise if a row may not be missing."""
        present = rows["length"] != -1
        optional = [self._fill or name in missing for name in names]
        missing_rows = np.flatnonzero(~(present.reshape(-1, len(names)) | optional))
        if len(missing_rows):
            raise self._missing_error(int(missing_rows[0]), ids, names)
        return np.flatnonzero(present)

    def _damaged_error(self, record: int, name: str, row: np.void) -> IndexFormatError:
        """Return the error of a row that does not lie within its shard."""
        shard, number = self.index.location(record)
        return IndexFormatError(
            f"damaged index: field {name!r} of record {record} ({shard}, number {number}) "
            "does not lie within its shard",
            path=self.index.where,
            record=number,
            found=f"{row['length']} bytes at offset {row['offset']}",
        )

    def _decode(self, name: str, data: list[bytes]) -> list[Value]:
        """Return the values that the bytes of a field encode."""
        kind = self.index.fields[name].kind
        return data if kind == "bytes" else [decode_list(kind, item) for item in data]

    def _missing_error(self, row: int, ids: Int64s, names: Sequence[str]) -> LoaderError:
        """Return the error of a record that lacks a field."""
        record, name = int(ids[row // len(names)]), names[row % len(names)]
        return LoaderError(
            f"{self.index.describe(record)} lacks the field {name!r}",
            advice=f"give Feed or Reader.read a value for it, missing={{{name!r}: …}}, or "
            "read other fields",
        )

    def _bytes_error(self, record: int, name: str, row: np.void, found: bytes) -> LoaderError:
        """Return the error of bytes that are not as indexed."""
        is_file = self.index.container == "files"
        facts: dict[str, Any] = {
            "path": f"{self.index.root}/{self.index.files[int(row['file'])]}",
            "offset": None if is_file else int(row["offset"]),
            "record": self.index.location(record)[1],
            "key": self.index.keys([record])[0],
        }
        offset = "" if is_file else f" at byte {row['offset']}"
        field = f"field {name!r}{offset} of {self.index.describe(record)}"
        if len(found) < row["length"]:
            return TruncatedShardError(
                f"the shard ends within {field}",
                expected=f"{row['length']} bytes",
                found=f"{len(found)} bytes",
                advice=f"restore the shard, or {REBUILD}",
                **facts,
            )
        return DataCorruptionError(
            f"corrupted bytes in {field}",
            expected=f"CRC {int(row['crc']):#010x}",
            found=f"{crc32c(found):#010x}",
            advice="restore the shard, or leave bad records out: twinfeed verify --bad-list FILE, "
            "then twinfeed index --exclude FILE (in Python exclude=)",
            **facts,
        )
