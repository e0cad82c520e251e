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
from twinfeed.loaders.formats.sniff import SNIFF_BYTES, identify, is_tfrecord
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.loaders.support.atomic import check_replaceable
from twinfeed.loaders.support.checksum import masked_crc32c, masked_crc32c_of_each
from twinfeed.loaders.support.closing import Closing
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import BUFFER, open_file, open_shard, read_at

HEADER_SIZE, FOOTER_SIZE = 12, 4
CHUNK_RECORDS = 1 << 13
"""The maximum number of records of a chunk."""

FEW_RECORDS = 16
"""A chunk of fewer records than this is parsed one record at a time, which takes less time."""

_LENGTH_CRC = struct.Struct("<QI")  # the length, and its checksum
_DATA_CRC = struct.Struct("<I")


def scan(
    path: str | os.PathLike[str],
    /,
    *,
    example: bool = True,
    max_record_bytes: int = LIMITS.record_bytes,
    on_bad: OnBad = raise_error,
) -> Iterator[Record]:
    """Yield every record of a TFRecord shard in one sequential pass, a chunk of records in memory.

    With `example`, the fields are the features of a tf.train.Example, and else "data", the record's
    bytes. `on_bad` is called with the error of a record whose data are bad, and the scan continues.
    A bad length always raises an error, since the next record cannot be found.
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
                yield from _parse_each(chunk, path, example, on_bad)
            else:
                yield chunk._replace(fields=fields)


def _chunk_fields(chunk: RecordChunk, example: bool) -> dict[str, FieldRanges] | None:
    """Return the byte ranges of each field in all records of a TFRecord chunk, found by numpy.

    With `example`, a field is a feature of a tf.train.Example, and else "data", the whole record.
    None if the records must be parsed one by one: they are few, a record is bad, or the features
    of the records differ.
    """
    if len(chunk.headers) < FEW_RECORDS:
        return None
    starts, stops = chunk.starts + HEADER_SIZE, chunk.stops - FOOTER_SIZE
    no_prefixes = np.zeros_like(starts)  # the value is not preceded by a tag and a length
    fields: dict[str, FieldRanges] | None
    fields = {"data": FieldRanges("bytes", starts, stops, no_prefixes)}
    if example:
        fields = chunk_features(chunk.data, starts, stops)
    is_good = fields is not None and _has_valid_checksums(chunk.data, starts, stops).all()
    return fields if is_good else None


def _parse_each(chunk: RecordChunk, path: str, example: bool, on_bad: OnBad) -> Iterator[Record]:
    """Yield the records of a TFRecord chunk, each checked and parsed on its own.

    `on_bad` is called with the error of a bad record, and the next records follow.
    """
    messages = slices(chunk.data, chunk.starts + HEADER_SIZE, chunk.stops - FOOTER_SIZE)
    offsets = (chunk.starts + chunk.offset).tolist()
    records = zip(offsets, chunk.headers, messages, strict=True)
    for number, (offset, header, data) in enumerate(records, chunk.first_number):
        # An item of `chunk.headers` is the header and the footer of a record. The footer is the
        # checksum of the data.
        stored_crc = _DATA_CRC.unpack(header[HEADER_SIZE:])[0]
        data_offset = offset + HEADER_SIZE
        try:
            if masked_crc32c(data) != stored_crc:
                raise DataCorruptionError(
                    f"corrupted data at offset {offset}",
                    offset=offset,
                    expected=f"data CRC {stored_crc:#010x}",
                    found=f"{masked_crc32c(data):#010x}",
                )
            if example:
                fields = locate(data, base=data_offset)
            else:
                fields = {"data": Range("bytes", data_offset, len(data), data)}
        except DataCorruptionError as error:
            error.path, error.record = path, number
            on_bad(error)
            continue
        length = HEADER_SIZE + len(data) + FOOTER_SIZE
        yield Record(offset, length, key=None, fields=fields, header=header, number=number)


def _read_frames(file: BinaryIO, path: str, max_record_bytes: int) -> Iterator[RecordChunk]:
    """Yield chunks of complete records, whose lengths are checked, and whose fields are not parsed.

    The `headers` of a chunk have the header and the footer of each record, for the shard's
    checksum.
    """
    size = os.fstat(file.fileno()).st_size
    offset, number, num_bytes = 0, 0, CHUNK_BYTES
    while offset < size:
        data = read_at(file.fileno(), min(num_bytes, size - offset), offset)
        all_starts, all_stops = _complete_records(data, max_record_bytes)
        for first in range(0, len(all_starts), CHUNK_RECORDS):
            chunk = slice(first, first + CHUNK_RECORDS)
            starts, stops = all_starts[chunk], all_stops[chunk]
            footers = slices(data, stops - FOOTER_SIZE, stops)
            headers = list(map(add, slices(data, starts, starts + HEADER_SIZE), footers))
            keys = [None] * len(starts)
            yield RecordChunk(data, offset, number, starts, stops, keys, headers, {})
            number += len(starts)
        if len(all_stops):
            offset, num_bytes = offset + int(all_stops[-1]), CHUNK_BYTES
            continue
        location: dict[str, Any] = {"path": path, "offset": offset, "record": number}
        header = data[:HEADER_SIZE]
        if len(header) < HEADER_SIZE or masked_crc32c(header[:8]) != _LENGTH_CRC.unpack(header)[1]:
            raise _header_error(header, location)
        length = _LENGTH_CRC.unpack(header)[0]
        framed_length = HEADER_SIZE + length + FOOTER_SIZE
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


def _complete_records(data: bytes, max_record_bytes: int) -> tuple[Int64s, Int64s]:
    """Return (starts, stops) of the TFRecord records in `data`, up to the first that is incomplete,
    too long, or has a length with a wrong checksum.
    """
    # First follow the stored lengths, without a check of each: a wrong length only adds wrong ends
    # after it. Then check all lengths at once, and cut the records off at the first wrong one.
    ends, end = [0], 0
    while end + HEADER_SIZE <= len(data):
        length, _ = _LENGTH_CRC.unpack_from(data, end)
        end += HEADER_SIZE + length + FOOTER_SIZE
        if end <= len(data):
            ends.append(end)
    starts, stops = np.array(ends[:-1], np.int64), np.array(ends[1:], np.int64)
    is_good = stops - starts <= HEADER_SIZE + max_record_bytes + FOOTER_SIZE
    is_good &= _has_valid_checksums(data, starts, starts + 8)  # a length has 8 bytes
    num_good = len(starts) if is_good.all() else int(is_good.argmin())  # argmin: the first False
    return starts[:num_good], stops[:num_good]


def _has_valid_checksums(data: bytes, starts: Int64s, stops: Int64s) -> Array:
    """Return for each range data[start:stop] whether the four bytes after it are its checksum.

    The checksum is the masked CRC-32C, as a little-endian integer.
    """
    crc_indices = stops[:, None] + np.arange(4)  # a row with the indices of four bytes per range
    stored = np.frombuffer(data, np.uint8)[crc_indices].view("<u4")[:, 0]
    is_valid: Array = masked_crc32c_of_each(slices(data, starts, stops)) == stored
    return is_valid


def _truncated_error(expected: int, found: int, location: dict[str, Any]) -> TruncatedShardError:
    """Return the error for a record that is truncated by the end of the file."""
    return TruncatedShardError(
        f"truncated record at offset {location['offset']}",
        **location,
        expected=f"{expected} bytes",
        found=f"{found} bytes",
    )


def _header_error(header: bytes, location: dict[str, Any]) -> DataCorruptionError:
    """Return the error for the header of a record that is truncated, or whose length has a wrong
    checksum.

    At the start of a file of another format, the error names the format.
    """
    if location["offset"] == 0:
        with open_file(location["path"]) as file:
            other_format = identify(file.read(SNIFF_BYTES))
        if other_format:
            name, advice = other_format
            problem = f"not an uncompressed TFRecord file: {name}"
            return DataCorruptionError(problem, **location, advice=advice)
    if len(header) < HEADER_SIZE:
        return _truncated_error(HEADER_SIZE, len(header), location)
    return DataCorruptionError(
        f"corrupted length at offset {location['offset']}",
        **location,
        expected=f"length CRC {_LENGTH_CRC.unpack(header)[1]:#010x}",
        found=f"{masked_crc32c(header[:8]):#010x}",
    )


class TFRecordWriter(Closing):
    """Write a TFRecord shard, uncompressed; a context manager.

    The file is equal to the file of TensorFlow's own writer. The file is complete only after
    `close`. An older TFRecord is overwritten; FileExistsError for any other file, and for a link.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with TFRecordWriter(f"{folder}/a") as writer:
    ...         writer.write(b"abc")
    ...         writer.offset
    19
    """

    def __init__(self, path: str | os.PathLike[str], /) -> None:
        check_replaceable(path, "a TFRecord", lambda file: is_tfrecord(file.read(SNIFF_BYTES)))
        self._file = open(path, "wb", buffering=BUFFER)  # noqa: SIM115, closed by close()
        self.offset = 0

    def write(self, data: bytes, /) -> None:
        """Append a record: its length, data, and the checksum of each."""
        length = struct.pack("<Q", len(data))
        self._file.write(length + _DATA_CRC.pack(masked_crc32c(length)))
        self._file.write(data)
        self._file.write(_DATA_CRC.pack(masked_crc32c(data)))
        self.offset += HEADER_SIZE + len(data) + FOOTER_SIZE

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()
