"""`Record`: what a scan of a container yields, with the byte range of each field.

The bytes of a `Record` include its framing. The records of a TFRecord shard lie end to end. A
record of a tar goes from the first header block of the sample to the padded end of its last member.
A `Range` lies inside a record: a reader fetches the range of a field, and not the rest.

The `number` of a record counts all records of its shard, with the bad records. So it does not
depend on whether a scan goes on after a bad record. Loose files have `paths`, which the
`file_number` of each field refers to, and the `label` that came with the listing.
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
"""Called with the error of one bad record after which the scan can go on."""


def raise_error(error: DataCorruptionError, /) -> None:
    """Raise the error of a bad record, which ends the scan."""
    raise error


TOO_LONG = "raise --max-record-bytes (in Python max_record_bytes=) if it is meant to be this long"
"""What to do about a record that is refused for its length."""


CHUNK_BYTES = 1 << 22
"""The bytes of a shard that are read at a time, unless a record is longer."""


class Range(NamedTuple):
    """A field of a record: the bytes `[offset, offset + length)` of its file.

    - `kind` says how the range is read. "bytes" is the value itself. "bytes_list", "int64_list" and
      "float_list" are the list message of an Example's feature, for `example.decode_list`.
    - `file_number` is the number of the file among the files of the record, 0 in a shard.
    - `head` is for a bytes feature of one value. Its list message begins `head` bytes before
      `offset`, so that `[offset - head, offset + length)` reads as "bytes_list".
    """

    kind: str
    file_number: int
    offset: int
    length: int
    data: bytes
    head: int


class Record(NamedTuple):
    """A record of a shard, or of loose files.

    `offset` and `length` are bytes of the shard, framing included. `header` is what the shard's
    checksum covers. In a tar it also has the CRC of each member, since the archive itself holds no
    CRC.
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

    The bytes are `[starts, stops)` of the chunk's data. `kind` and `heads` are those of `Range`.
    """

    kind: str
    starts: Int64s
    stops: Int64s
    heads: Int64s


class RecordChunk(NamedTuple):
    """Consecutive records of a shard that have the same fields, without an object for each record.

    `data` are the bytes of the shard from `offset` on, and `starts` and `stops` are those of each
    record in `data`. `number` is the number of the first record.
    """

    data: bytes
    offset: int
    number: int
    starts: Int64s
    stops: Int64s
    keys: Sequence[str | None]
    headers: Sequence[bytes]
    fields: dict[str, FieldRanges]

    def record(self, n: int) -> Record:
        """Return record `n` of the chunk."""
        fields = {}
        for name, (kind, starts, stops, heads) in self.fields.items():
            start, stop = int(starts[n]), int(stops[n])
            data = self.data[start:stop]
            fields[name] = Range(kind, 0, self.offset + start, stop - start, data, int(heads[n]))
        start, length = int(self.starts[n]), int(self.stops[n] - self.starts[n])
        number, header = self.number + n, self.headers[n]
        return Record(self.offset + start, length, self.keys[n], fields, header, number)

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
