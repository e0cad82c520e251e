"""A buffer of the byte ranges of a field in a record batch, and of its numeric values."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import lru_cache, partial

import numpy as np

from twinfeed.loaders.building._parts import FieldStats
from twinfeed.loaders.formats.example import decode_list
from twinfeed.loaders.formats.records import Range, RecordChunk, slices
from twinfeed.loaders.index.arrays import MISSING_ROW, row_type
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.loaders.support.checksum import crc32c, crc32c_of_each

WIDEST_COLUMN = 16
"""The maximum number of values per record of a column."""

_CACHE_ITEMS = 1 << 16  # of a cache of decoded lists


class FieldBuffer:
    """The location of a field in each record of a record batch, and its values if numeric.

    `rows` has three integers for each record: the byte offset of the field (or the number of its
    file), its length, and its CRC-32C. `values` has the numbers of each record, as long as every
    record has `column_width` of them. Maxima and `num_decoded` are over all batches.
    """

    def __init__(self, kind: str, first_record: int, *, is_list: bool) -> None:
        self.kind = kind
        self.first_record = first_record
        self.max_offset = self.max_length = self.column_width = self.num_decoded = 0
        self.can_be_column = kind not in ("bytes", "bytes_list") and not is_list
        self.decode = lru_cache(_CACHE_ITEMS)(partial(decode_list, kind))
        self.clear()

    def clear(self) -> None:
        """Remove the rows and values, to start the next batch."""
        self.rows = array("q")
        self.values: list[Array] = []

    def add(self, index: int, range_: Range, offset_or_file: int) -> None:
        """Add the field of the record with this index in the batch, by its offset, or number of its
        file.
        """
        self.add_missing_rows(index)
        self.rows.extend((offset_or_file, range_.length, crc32c(range_.data)))
        self.add_values([range_.data])

    def add_chunk(self, index: int, chunk: RecordChunk, starts: Int64s, stops: Int64s) -> None:
        """Add the field of several records: the bytes `[starts, stops)` of the data of a chunk."""
        self.add_missing_rows(index)
        offsets, lengths = starts + chunk.offset, stops - starts  # offsets in the shard
        checksums = np.array(crc32c_of_each(slices(chunk.data, starts, stops)), np.int64)
        rows = np.stack([offsets, lengths, checksums], axis=1)
        self.rows.frombytes(rows.tobytes())
        self.add_values(slices(chunk.data, starts, stops))

    def add_values(self, lists: Iterable[bytes]) -> None:
        """Decode the numbers of further records, as long as the field can be a column."""
        if self.can_be_column:
            values = [np.asarray(self.decode(data)) for data in lists]
            if self.num_decoded == 0:
                self.column_width = len(values[0])
            self.num_decoded += len(values)
            self.values += values
            is_equal = set(map(len, values)) == {self.column_width}
            self.can_be_column = is_equal and self.column_width <= WIDEST_COLUMN

    def add_missing_rows(self, num_records: int) -> None:
        """Append rows for records that lack the field, until there are `num_records` rows."""
        num_rows = len(self.rows) // len(MISSING_ROW)  # a row is three integers
        self.rows.extend(MISSING_ROW * (num_records - num_rows))

    def arrays(self, number: int, num_records: int, *, whole_files: bool) -> dict[str, Array]:
        """Return the arrays of the batch for field N: `rows-N`, and `values-N` if it can be a
        column.
        """
        self.add_missing_rows(num_records)  # for the last records of the batch
        arrays: dict[str, Array] = {f"rows-{number}": self.row_array(whole_files=whole_files)}
        if self.can_be_column and len(self.values) == num_records:  # no record lacks the field
            values = np.concatenate(self.values)
            arrays[f"values-{number}"] = values.reshape(num_records, self.column_width)
        return arrays

    def row_array(self, *, whole_files: bool) -> Array:
        """Return the rows of the batch in the narrowest dtype for the largest values so far."""
        offsets_or_files, lengths, crcs = np.frombuffer(self.rows, np.int64).reshape(-1, 3).T
        self.max_offset = max(self.max_offset, int(offsets_or_files.max()))
        self.max_length = max(self.max_length, int(lengths.max()))
        dtype = row_type(self.max_offset, self.max_length, whole_files=whole_files)
        rows = np.empty(len(lengths), dtype)
        rows["file" if whole_files else "offset"] = offsets_or_files
        rows["length"], rows["crc"] = lengths, crcs
        return rows

    def stats(self, num_records: int) -> FieldStats:
        """Return the statistics of the field, for a shard with `num_records` records."""
        is_column = self.can_be_column and self.num_decoded == num_records
        width = self.column_width if is_column else 0
        return FieldStats(self.kind, self.max_offset, self.max_length, width)
