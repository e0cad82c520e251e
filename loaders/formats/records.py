"""`Record`: what a scan of a container yields, with the byte range of each field.

The bytes of a `Record` include its framing, so the records of a TFRecord shard are contiguous. A
record of a tar extends from the first header of the sample to the padded end of its last member. A
`Range` lies inside a record: a reader fetches only the ranges of the fields that it needs.

The `number` of a record is its index among all records of its shard, with the bad records. So it
does not depend on whether a scan continues after a bad record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

from twinfeed.loaders.errors import DataCorruptionError
from twinfeed.loaders.support.array_types import Int64s

Container = Literal["tar", "tfrecord", "files"]
CONTAINERS: tuple[Container, ...] = get_args(Container)

Sample = dict[str, Any]
"""A record's fields by name, as decode and transform take them."""

OnBad = Callable[[DataCorruptionError], None]
"""Called with the error of one bad record, after which the scan continues."""


def raise_error(error: DataCorruptionError, /) -> None:
    """Raise the error of a bad record, which ends the scan."""
    raise error


TOO_LONG = "raise --max-record-bytes (in Python max_record_bytes=) if it is meant to be this long"
"""Advice for a record that is longer than the limit."""


CHUNK_BYTES = 1 << 22
"""The bytes of a shard that are read at a time, unless a record is longer."""


class Range(NamedTuple):
    """A field of a record: the bytes `[offset, offset + length)` of its file.

    - `kind` says how the range is read. "bytes" is the value itself. "bytes_list", "int64_list" and
      "float_list" are the list message of an Example's feature, for `example.decode_list`.
    - `data` has these bytes.
    - `file_number` is the index of the file among the record's loose files, and 0 in a shard.
    - `prefix_length` is not 0 for a bytes feature of one value. It is the size of the tag and the
      length before the value: `[offset - prefix_length, offset + length)` is the list message, to
      be read as "bytes_list".
    """

    kind: str
    offset: int
    length: int
    data: bytes
    file_number: int = 0
    prefix_length: int = 0


class Record(NamedTuple):
    """A record of a shard, or of loose files.

    - `offset` and `length` are the range of bytes in the shard, with the framing of the container.
    - `header` has the bytes of the record that the index's checksum of the shard is computed from.
      In a tar it also has the CRC of each member, since the archive itself holds no CRC.
    - `number` is the record's index in its shard, with bad records counted.
    - `paths` are those of the record's loose files; `label` came with the listing of these files.
    """

    offset: int
    length: int
    key: str | None
    fields: dict[str, Range]
    header: bytes
    number: int
    paths: tuple[str, ...] = ()
    label: str | None = None


class FieldRanges(NamedTuple):
    """The ranges of a field in all records of a chunk; each array has an item for each record.

    The ranges are `[starts, stops)` in the chunk's data. `kind` says how they are read, and
    `prefix_lengths` has the size of the tag and length before each value, as in `Range`.
    """

    kind: str
    starts: Int64s
    stops: Int64s
    prefix_lengths: Int64s


class RecordChunk(NamedTuple):
    """Consecutive records of a shard that have the same fields, without an object for each record.

    `data` has the bytes of the shard from `offset` on. Record i of the chunk is
    `data[starts[i]:stops[i]]`, with the key `keys[i]` and, for the checksum of the shard,
    `headers[i]`. `first_number` is the index of the first record in its shard.
    """

    data: bytes
    offset: int
    first_number: int
    starts: Int64s
    stops: Int64s
    keys: Sequence[str | None]
    headers: Sequence[bytes]
    fields: dict[str, FieldRanges]

    def record(self, i: int) -> Record:
        """Return record `i` of the chunk as a `Record`, with offsets in the shard.

        Each field becomes a `Range`. For example, the value b"cat" is stored in an Example as
        `0a 03 63 61 74`. The range is the last three bytes, the value. Its `prefix_length` is 2,
        for the tag 0a and the length 03: with this prefix, the value can also be read as a list of
        one value.
        """
        fields = {}
        for name, (kind, starts, stops, prefix_lengths) in self.fields.items():
            start, stop, prefix_length = int(starts[i]), int(stops[i]), int(prefix_lengths[i])
            offset, data = self.offset + start, self.data[start:stop]
            fields[name] = Range(kind, offset, len(data), data, prefix_length=prefix_length)
        offset, length = self.offset + int(self.starts[i]), int(self.stops[i] - self.starts[i])
        key, header, number = self.keys[i], self.headers[i], self.first_number + i
        return Record(offset, length, key, fields, header, number)

    def records(self) -> Iterator[Record]:
        """Yield the records one by one."""
        return map(self.record, range(len(self.headers)))

    def values(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a field of each record."""
        ranges = self.fields[name]
        return slices(self.data, ranges.starts, ranges.stops)


def slices(data: bytes, starts: Int64s, stops: Int64s) -> Iterator[bytes]:
    """Return the bytes of each range `[starts, stops)` of `data`."""
    return map(data.__getitem__, map(slice, starts.tolist(), stops.tolist()))


def one_by_one(scanned: Iterable[Record | RecordChunk]) -> Iterator[Record]:
    """Yield each record, and the records of each chunk."""
    for item in scanned:
        if isinstance(item, RecordChunk):
            yield from item.records()
        else:
            yield item
