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
from typing import Any, BinaryIO

from twinfeed.loaders.errors import DataCorruptionError, TruncatedShardError
from twinfeed.loaders.formats.example import locate
from twinfeed.loaders.formats.records import TOO_LONG, OnBad, Range, Record, raise_error
from twinfeed.loaders.formats.sniff import HEAD, identify
from twinfeed.loaders.support.checksum import masked_crc32c
from twinfeed.loaders.support.closing import Closing
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import BUFFER, open_file, open_shard

HEADER, FOOTER = 12, 4
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

    - The memory is that of the longest record.
    - With `example`, the fields are the features of a tf.train.Example. Otherwise the only field is
      "data", the record's bytes.
    - A record longer than `max_record_bytes` is an error before it is read.
    - `on_bad` is called with the error of a record whose data are bad, and the scan continues. A
      bad length always raises an error.

    Raises:
        DataCorruptionError: a checksum, a length, a message that is no Example.
        TruncatedShardError: the shard ends within a record.
    """
    path = os.fspath(path)
    with open_shard(path) as file:
        frames = _read_frames(file, path, max_record_bytes)
        for number, (offset, header, data, footer) in enumerate(frames):
            start = offset + HEADER
            try:
                if masked_crc32c(data) != _CHECKSUM.unpack(footer)[0]:
                    raise DataCorruptionError(
                        f"corrupted data at offset {offset}",
                        offset=offset,
                        expected=f"data CRC {_CHECKSUM.unpack(footer)[0]:#010x}",
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
            length = HEADER + len(data) + FOOTER
            # The footer is the checksum of the data: with it, any change in them is noticed.
            yield Record(offset, length, None, fields, header + footer, number)


def _framed_length(header: bytes, /) -> int | None:
    """Return the length of a record with its framing, by its header; None for a bad header."""
    if len(header) < HEADER:
        return None
    length, stored = _HEADER.unpack(header[:HEADER])
    return HEADER + int(length) + FOOTER if masked_crc32c(header[:8]) == stored else None


def _read_frames(
    file: BinaryIO, path: str, max_record_bytes: int
) -> Iterator[tuple[int, bytes, bytes, bytes]]:
    """Yield (offset, header, data, footer) of each record, whose header is checked.

    Raises:
        DataCorruptionError: a bad header, a record that is too long, or a truncated record.
    """
    size = os.fstat(file.fileno()).st_size
    offset = number = 0
    while offset < size:
        location: dict[str, Any] = {"path": path, "offset": offset, "record": number}
        header = file.read(HEADER)
        framed_length = _framed_length(header)
        if framed_length is None:
            raise _header_error(header, location)
        length = framed_length - HEADER - FOOTER
        if length > max_record_bytes:
            raise DataCorruptionError(
                f"record of {length} bytes at offset {offset}",
                **location,
                expected=f"at most max_record_bytes={max_record_bytes}",
                advice=TOO_LONG,
            )
        if offset + framed_length > size:
            raise _truncated_error(framed_length, size - offset, location)
        data, footer = file.read(length), file.read(FOOTER)
        if len(footer) < FOOTER:
            raise _truncated_error(framed_length, HEADER + len(data) + len(footer), location)
        yield offset, header, data, footer
        offset += framed_length
        number += 1


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
