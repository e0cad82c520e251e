"""TFRecord files: scan a shard sequentially, with every checksum, and write a shard.

A record is its length (uint64, little-endian), the length's masked CRC-32C, the data, and the
data's masked CRC-32C (`tensorflow/core/lib/io/record_writer.h`).

- A wrong checksum of a length ends the scan, since the next record cannot be found.
- A wrong checksum of the data concerns one record only.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from operator import add
from typing import Any, BinaryIO

import numpy as np

from twinfeed.loaders.errors import DataCorruptionError, TruncatedShardError
from twinfeed.loaders.formats._chunk_features import chunk_features
from twinfeed.loaders.formats.example import locate
from twinfeed.loaders.formats.records import (
    CHUNK_BYTES,
    TOO_LONG,
    FieldRanges,
    OnBad,
    Range,
    Record,
    RecordChunk,
    one_by_one,
    raise_error,
    slices,
)
from twinfeed.loaders.formats.sniff import HEAD, identify
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.loaders.support.checksum import masked_crc32c, masked_crc32c_of_each
from twinfeed.loaders.support.closing import Closing
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import BUFFER, open_file, open_shard, read_at

HEADER, FOOTER = 12, 4
CHUNK_RECORDS = 1 << 13
"""The maximum number of records of a chunk."""

FEW_RECORDS = 16
"""Fewer records than this are located one by one, which takes less time."""

_HEADER = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")


def scan(
    path: str | os.PathLike[str],
    /,
    *,
    example: bool = True,
    max_record_bytes: int = LIMITS.record_bytes,
    on_bad: OnBad = raise_error,
) -> Iterator[Record]:
    """Yield every record of a TFRecord shard in one sequential pass.

    - The memory is that of the longest record, and of a chunk.
    - With `example`, the fields are the features of a tf.train.Example. Otherwise the only field is
      "data", the record's bytes.
    - A record longer than `max_record_bytes` is an error before it is read.
    - `on_bad` is called with the error of a record whose data are bad, and the scan continues. A
      bad length always raises an error.

    Raises:
        DataCorruptionError: a checksum, a length, a message that is no Example.
        TruncatedShardError: the shard ends within a record.
    """
    chunks = scan_chunks(path, example=example, max_record_bytes=max_record_bytes, on_bad=on_bad)
    return one_by_one(chunks)


def scan_chunks(
    path: str | os.PathLike[str], /, *, example: bool, max_record_bytes: int, on_bad: OnBad
) -> Iterator[Record | RecordChunk]:
    """Yield what `scan` yields, with a chunk in place of records that have the same fields."""
    path = os.fspath(path)
    with open_shard(path) as file:
        for chunk in _read_frames(file, path, max_record_bytes):
            fields = _chunk_fields(chunk, example)
            if fields is None:
                yield from _records(chunk, path, example, on_bad)
            else:
                yield chunk._replace(fields=fields)


def _chunk_fields(chunk: RecordChunk, example: bool) -> dict[str, FieldRanges] | None:
    """Return the fields of all records; None if a record is bad or has other fields, or if they are
    few.
    """
    if len(chunk.headers) < FEW_RECORDS:
        return None
    starts, stops = chunk.starts + HEADER, chunk.stops - FOOTER
    fields: dict[str, FieldRanges] | None
    fields = {"data": FieldRanges("bytes", starts, stops, np.zeros_like(starts))}
    if example:
        fields = chunk_features(chunk.data, starts, stops)
    is_good = fields is not None and _has_checksums(chunk.data, starts, stops, at=stops).all()
    return fields if is_good else None


def _records(chunk: RecordChunk, path: str, example: bool, on_bad: OnBad) -> Iterator[Record]:
    """Yield the records one by one, each with its own fields."""
    messages = slices(chunk.data, chunk.starts + HEADER, chunk.stops - FOOTER)
    offsets = (chunk.starts + chunk.offset).tolist()
    records = zip(offsets, chunk.headers, messages, strict=True)
    for number, (offset, header, data) in enumerate(records, chunk.number):
        start = offset + HEADER
        stored = _CHECKSUM.unpack(header[HEADER:])[0]
        try:
            if masked_crc32c(data) != stored:
                raise DataCorruptionError(
                    f"corrupted data at offset {offset}",
                    offset=offset,
                    expected=f"data CRC {stored:#010x}",
                    found=f"{masked_crc32c(data):#010x}",
                )
            if example:
                fields = locate(data, base=start)
            else:
                fields = {"data": Range("bytes", 0, start, len(data), data, 0)}
        except DataCorruptionError as error:
            error.path, error.record = path, number
            on_bad(error)
            continue
        yield Record(offset, HEADER + len(data) + FOOTER, None, fields, header, number)


def _read_frames(file: BinaryIO, path: str, max_record_bytes: int) -> Iterator[RecordChunk]:
    """Yield chunks of complete records without fields, whose lengths are checked.

    The `headers` of a chunk have the header and the footer of each record. The footer is the
    checksum of the data. So any change in the data is noticed.

    Raises:
        DataCorruptionError: a bad header, a record that is too long, or a truncated record.
    """
    size = os.fstat(file.fileno()).st_size
    offset, number, num_bytes = 0, 0, CHUNK_BYTES
    while offset < size:
        data = read_at(file.fileno(), min(num_bytes, size - offset), offset)
        all_starts, all_stops = _bounds(data, max_record_bytes)
        for first in range(0, len(all_starts), CHUNK_RECORDS):
            starts, stops = (
                ends[first : first + CHUNK_RECORDS] for ends in (all_starts, all_stops)
            )
            footers = slices(data, stops - FOOTER, stops)
            headers = list(map(add, slices(data, starts, starts + HEADER), footers))
            keys = [None] * len(starts)
            yield RecordChunk(data, offset, number, starts, stops, keys, headers, {})
            number += len(starts)
        if len(all_stops):
            offset, num_bytes = offset + int(all_stops[-1]), CHUNK_BYTES
            continue
        location: dict[str, Any] = {"path": path, "offset": offset, "record": number}
        header = data[:HEADER]
        if len(header) < HEADER or masked_crc32c(header[:8]) != _HEADER.unpack(header)[1]:
            raise _header_error(header, location)
        length = _HEADER.unpack(header)[0]
        framed_length = HEADER + length + FOOTER
        if length > max_record_bytes:
            raise DataCorruptionError(
                f"record of {length} bytes at offset {offset}",
                **location,
                expected=f"at most max_record_bytes={max_record_bytes}",
                advice=TOO_LONG,
            )
        if offset + framed_length > size:
            raise _truncated_error(framed_length, size - offset, location)
        if framed_length <= num_bytes:  # the file has become shorter since the scan began
            raise _truncated_error(framed_length, len(data), location)
        num_bytes = framed_length


def _bounds(data: bytes, max_record_bytes: int) -> tuple[Int64s, Int64s]:
    """Return (starts, stops) of the complete records in `data`, up to the first bad header."""
    ends, end = [0], 0
    while end + HEADER <= len(data):
        end += HEADER + int(_HEADER.unpack_from(data, end)[0]) + FOOTER
        if end <= len(data):
            ends.append(end)
    starts, stops = np.array(ends[:-1], np.int64), np.array(ends[1:], np.int64)
    is_good = stops - starts <= HEADER + max_record_bytes + FOOTER
    is_good &= _has_checksums(data, starts, starts + 8, at=starts + 8)
    good = int(np.append(is_good, False).argmin())
    return starts[:good], stops[:good]


def _has_checksums(data: bytes, starts: Int64s, stops: Int64s, *, at: Int64s) -> Array:
    """Return for each range of `data` whether its masked checksum is stored at position `at`."""
    stored = np.frombuffer(data, np.uint8)[at[:, None] + np.arange(4)].view("<u4")[:, 0]
    has_checksum: Array = masked_crc32c_of_each(slices(data, starts, stops)) == stored
    return has_checksum


def _truncated_error(expected: int, found: int, location: dict[str, Any]) -> TruncatedShardError:
    """Return the error for a record that is truncated by the end of the file."""
    return TruncatedShardError(
        f"truncated record at offset {location['offset']}",
        **location,
        expected=f"{expected} bytes",
        found=f"{found} bytes",
    )


def _header_error(header: bytes, location: dict[str, Any]) -> DataCorruptionError:
    """Return the error for a header that is truncated, or whose length has a wrong checksum.

    At the start of a file that is no TFRecord, the error says what the file is.
    """
    if location["offset"] == 0:
        with open_file(location["path"]) as file:
            other = identify(file.read(HEAD))
        if other:
            problem = f"not an uncompressed TFRecord file: {other[0]}"
            return DataCorruptionError(problem, **location, advice=other[1])
    if len(header) < HEADER:
        return _truncated_error(HEADER, len(header), location)
    return DataCorruptionError(
        f"corrupted length at offset {location['offset']}",
        **location,
        expected=f"length CRC {_HEADER.unpack(header)[1]:#010x}",
        found=f"{masked_crc32c(header[:8]):#010x}",
    )


class TFRecordWriter(Closing):
    """Write a TFRecord shard, uncompressed; a context manager.

    The file is equal to the file of TensorFlow's own writer. The file is complete only after
    `close`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with TFRecordWriter(f"{folder}/a") as writer:
    ...         writer.write(b"abc")
    ...         writer.offset
    19
    """

    def __init__(self, path: str | os.PathLike[str], /) -> None:
        self._file = open(path, "wb", buffering=BUFFER)  # noqa: SIM115, closed by close()
        self.offset = 0

    def write(self, data: bytes, /) -> None:
        """Append a record: its length, data, and the checksum of each."""
        length = struct.pack("<Q", len(data))
        self._file.write(length + _CHECKSUM.pack(masked_crc32c(length)))
        self._file.write(data)
        self._file.write(_CHECKSUM.pack(masked_crc32c(data)))
        self.offset += HEADER + len(data) + FOOTER

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()
