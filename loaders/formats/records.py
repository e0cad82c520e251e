"""`Record`: what a scan of a container yields, with the byte range of each field.

The `number` of a record is its index among all records of its shard, with the bad ones, so it does
not depend on whether a scan continues after these.
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
    """A field of a record: the bytes `[offset, offset + length)`, which are `data`, of its file.

    `kind` is "bytes", or that of a list message of an Example. `file_number` is the index among the
    loose files of the record. To be read as a "bytes_list", a bytes feature of one value begins
    `prefix_length` bytes before.
    """

    kind: str
    offset: int
    length: int
    data: bytes
    file_number: int = 0
    prefix_length: int = 0


class Record(NamedTuple):
    """A record of a shard, or of loose files.

    `header` has the bytes that the checksum of the shard is computed from. `number` counts the bad
    records too. `label` came with the listing of the loose files in `paths`.
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
        """Return record `i` of the chunk as a `Record`, with offsets in the shard."""
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
