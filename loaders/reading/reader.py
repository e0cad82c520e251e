"""Read records by id: in batches, in any order, every byte checked."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
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
from twinfeed.loaders.formats.example import decode_lists
from twinfeed.loaders.index.index import Index, check_index
from twinfeed.loaders.reading.local import LocalFiles, should_coalesce
from twinfeed.loaders.reading.prefetch.read_plan import ReadPlan, Rows, rows_outside_shards
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.reading.remote import RemoteFiles
from twinfeed.loaders.support import checks, system
from twinfeed.loaders.support.array_types import Ids, Int64s
from twinfeed.loaders.support.checksum import crc32c, wrong_items
from twinfeed.loaders.support.closing import Closing
from twinfeed.loaders.support.fork import PerProcess
from twinfeed.loaders.support.limits import LIMITS

_UNCHECKED_BYTES = 1 << 26
"""A batch of at most this many bytes is not compared with its limit: it fits in the memory."""


class Reader(Closing):
    """Read the fields of records by id from the shards of `index`.

    A reader may be used by several threads, forked, and pickled. Files are opened when they are
    read.

    Args:
        index: where the records lie.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> with Reader(index) as reader:
    ...     reader.read([2, 0, 2])
    {'word': [b'or', b'to', b'or']}
    """

    def __init__(self, index: Index, /) -> None:
        check_index(index)
        self.index = index
        self._fields_with_missing = {name for name, field in index.fields.items() if field.missing}
        self._columns = frozenset(index.columns)
        # The open files or buffered ranges, and the plan of what to prefetch by the schedule (the
        # batches) that it is for. A forked child has its own, as the parent's locks may be locked.
        self._files = PerProcess(partial(_files_of, index))
        self._plans = PerProcess[dict[Schedule, ReadPlan]](dict)
        self._files()  # raises the errors of a store that cannot be opened

    def __repr__(self) -> str:
        return f"Reader({self.index!r})"

    def close(self) -> None:
        """Close the open files; a later call opens them again."""
        self._plans.pop()
        self._files().close()

    def read(self, ids: Ids, fields: Sequence[str] | None = None, /) -> dict[str, list[Any]]:
        """Return a dict from each of `fields` to a list with its value for each id.

        The values are in the order of `ids`. The value of a field is `bytes`; if it is a feature of
        a `tf.train.Example` with several values, it is a list of bytes or an array. If a record
        lacks the field, the value is None. A column, an array of the index, may be read like a
        field: its value is the row of the record. Repeated ids are read once, and small records
        next to each other by one call.

        Args:
            ids: record ids, int[n].
            fields: the names of fields and columns. Default: every field.

        Raises:
            IndexError: an id outside [0, N).
            KeyError: an unknown field.
            StaleIndexError: a shard has changed.
            DataCorruptionError: bytes do not match their checksum.
        """
        names = tuple(self.index.fields) if fields is None else checks.names("fields", fields)
        values = self.read_values(checks.as_ids(ids), names)
        return {name: list(values[name]) for name in names}

    def read_values(self, ids: Int64s, names: Sequence[str], /) -> dict[str, Sequence[Any]]:
        """Do what `read` does for ids and names that need no check; arrays stay together."""
        if self._columns.isdisjoint(names):
            return dict(zip(names, self._read_fields(ids, names), strict=True))
        stored = [name for name in names if name not in self._columns]
        values = dict(zip(stored, self._read_fields(ids, stored), strict=True))
        checks.check_ids(ids, len(self.index))
        for name in self._columns.intersection(names):
            values[name] = list(self.index.columns[name][ids])
        return {name: values[name] for name in names}  # in the order of `names`

    def _read_fields(self, ids: Int64s, names: Sequence[str]) -> list[Sequence[Any]]:
        """Return for each field a list of its values, in the order of `ids`.

        The fields are those whose bytes are in the shards. A value is None if the record lacks the
        field.

        To read less often, a record whose id is repeated is read once, and small fields that lie
        next to each other in a shard are read by one call. For that, the distinct ids are read in
        order, if ids are repeated or if many are neighbours; then the values are put in the order
        of `ids`. For example, ids [7, 5, 7]: read [5, 7], and then return the values of 7, 5, 7.
        """
        if not names or not len(ids):
            return [[] for _ in names]
        # The comments follow the example.
        sorted_ids = ids.copy()
        sorted_ids.sort()  # [5, 7, 7]
        if sorted_ids[0] < 0 or sorted_ids[-1] >= len(self.index):
            checks.check_ids(ids, len(self.index))  # raises IndexError
        id_gaps = sorted_ids[1:] - sorted_ids[:-1]  # [2, 0]
        # 0 if an id is repeated, 1 if two ids are neighbours; larger gaps, and none, count as 2.
        smallest_gap = np.minimum.reduce(id_gaps, initial=2)  # 0
        repeated, adjacent = smallest_gap == 0, smallest_gap == 1
        ids_to_read, inverse = ids, None
        if repeated or (adjacent and should_coalesce(id_gaps == 1)):
            ids_to_read, inverse = np.unique(ids, return_inverse=True)  # [5, 7] and [1, 0, 1]
        # Whether to look for fields next to each other: fields of one record may be, and fields of
        # records that are read in order.
        coalesce = inverse is not None or len(names) > 1
        data, is_missing = self._fetch(ids_to_read, names, coalesce)
        out: list[Sequence[Any]] = []
        for number, name in enumerate(names):
            # `data` has all fields of the first record, then all of the second, and so on.
            field_data, kind = data[number :: len(names)], self.index.fields[name].kind
            values: Sequence[Any] = field_data
            if kind != "bytes":
                values = decode_lists(kind, field_data)
            if is_missing is not None:
                of_field = is_missing[number :: len(names)].tolist()
                values = [None if of_field[n] else value for n, value in enumerate(values)]
            out.append(values if inverse is None else [*map(values.__getitem__, inverse.tolist())])
        return out

    def _fetch(
        self, ids: Int64s, names: Sequence[str], coalesce: bool
    ) -> tuple[list[bytes], npt.NDArray[np.bool_] | None]:
        """Return the bytes of the fields `names` of records, all of ids[0], of ids[1], …: b"" of a
        missing field. Beside it is bool[ids * names], which are missing, or None if none is.
        """
        rows = self.index.rows(names, ids)
        is_missing = None
        if not self._fields_with_missing.isdisjoint(names):
            is_missing = rows["length"] == -1
            rows = rows[~is_missing]
        lengths = rows["length"].tolist()
        if sum(lengths) > _UNCHECKED_BYTES:
            self._check_total_bytes(rows)
        files, data = self._files(), list[bytes]()
        try:
            data = files.read(rows, coalesce=coalesce)
            row = self._wrong_row(files, rows, data, lengths)
        except (OSError, OverflowError, MemoryError):
            row = next(iter(rows_outside_shards(self.index, rows).tolist()), None)
            if row is None:
                raise
        if row is not None:
            position = row if is_missing is None else int(np.flatnonzero(~is_missing)[row])
            record, name = int(ids[position // len(names)]), names[position % len(names)]
            raise self._row_error(record, name, rows[row : row + 1], data[row] if data else b"")
        if is_missing is not None:
            present = iter(data)
            data = [b"" if missing else next(present) for missing in is_missing.tolist()]
        return data, is_missing

    def _check_total_bytes(self, rows: Rows) -> None:
        """Raise LoaderError if rows have more bytes than `LIMITS.batch_bytes` or all shards, as
        only those of an index that was tampered with have: records do not overlap.
        """
        # For a row that is not within its shard, reading raises a better error, which names the
        # record.
        if len(rows_outside_shards(self.index, rows)):
            return
        limit = LIMITS.batch_bytes
        if self.index.container != "files":  # else each length is compared with that of the file
            limit = min(limit, int(self.index.shards["bytes"].sum()))
        advice = f"read fewer records at a time; if you read only a few, {REBUILD}"
        check_bytes(
            "a batch", int(rows["length"].sum()), limit, path=self.index.where, advice=advice
        )

    def _wrong_row(
        self, files: RemoteFiles | LocalFiles, rows: Rows, data: list[bytes], lengths: list[int]
    ) -> int | None:
        """Return the first row whose bytes are wrong, or None.

        Wrong bytes are read once more, as a disk cache may have them.
        """
        crcs = rows["crc"].tolist() if self.index.checksums else None
        for row in wrong_items(data, lengths, crcs):
            if len(rows_outside_shards(self.index, rows[row : row + 1])):
                return row
            data[row] = files.read_again(rows[row])
            if wrong_items([data[row]], [lengths[row]], None if crcs is None else [crcs[row]]):
                return row
        return None

    def _row_error(self, record: int, name: str, rows: Rows, found: bytes) -> LoaderError:
        """Return the error for a field that does not lie within its shard, or whose bytes, `found`,
        are too few or have a wrong checksum; `rows` has its row.
        """
        row = rows[0]
        if len(rows_outside_shards(self.index, rows)):
            shard, number = self.index.location(record)
            return IndexFormatError(
                f"damaged index: field {name!r} of record {record} ({shard}, number {number}) "
                "does not lie within its shard",
                path=self.index.where,
                record=number,
                found=f"{row['length']} bytes at offset {row['offset']}",
            )
        is_file = self.index.container == "files"
        details: dict[str, Any] = {
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
                **details,
            )
        return DataCorruptionError(
            f"corrupted bytes in {field}",
            expected=f"CRC {int(row['crc']):#010x}",
            found=f"{crc32c(found):#010x}",
            advice="restore the shard, or leave bad records out: twinfeed verify --bad-list FILE, "
            "then twinfeed index --exclude FILE (in Python exclude=)",
            **details,
        )


def _files_of(index: Index) -> RemoteFiles | LocalFiles:
    """Return the files of an index, none of which is open yet."""
    # malloc would return the memory of each batch to the system, and request it again.
    system.keep_freed_memory()
    return RemoteFiles(index) if index.remote else LocalFiles(index)


def verified_reader(index: Index, /) -> Reader:
    """Return a reader that compares CRCs, also of an index that was opened without."""
    if not index.checksums:
        index = copy.copy(index)
        index.checksums = True
    return Reader(index)


def plan_of_pass(
    reader: object,
    schedule: Schedule,
    fields: Sequence[str],
    start: int,
    readahead: int | None,
    /,
    *,
    running: bool = False,
) -> ReadPlan | None:
    """Return the plan of what a pass prefetches, from a global step to the end of its epoch; of
    another source than an index, None. The plan of the previous pass goes on if its epoch has ended
    here. If it was broken off, at step 40, and this pass starts at 30, what it has prefetched is
    kept until step 40; if this pass starts at 70, it is dropped. `running`: whether a pass goes on
    over the end of an epoch, whose last batches may not be read yet.
    """
    if not isinstance(reader, Reader):
        return None
    plans, files = reader._plans(), reader._files()
    previous = plans.get(schedule)  # the plan of the previous pass over these batches
    if previous is not None and previous.continue_at(start, running=running):
        return previous
    # Without fields to read, the limit of what is prefetched is 0.
    limit = readahead if fields else 0
    plan = ReadPlan(reader.index, fields, schedule, start, limit=limit, files=files)
    plans[schedule] = plan
    previous_end = None  # for `start_plan`: drop what was prefetched
    if previous is not None and previous.start <= start <= previous.next_step:
        previous_end = previous.next_step  # 40 in the example: keep it until this step
    files.start_plan(previous_end)
    return plan
