"""`Record`: what a scan of a container yields, with the byte range of each field.

The bytes of a `Record` include its framing. The records of a TFRecord shard lie end to end. A
record of a tar goes from the first header block of the sample to the padded end of its last member.
A `Range` lies inside a record: a reader fetches the range of a field, and not the rest.

The `number` of a record counts all records of its shard, with the bad records. So it does not
depend on whether a scan goes on after a bad record. Loose files have `paths`, which the
`file_number` of each field refers to, and the `label` that came with the listing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

from twinfeed.loaders.errors import DataCorruptionError

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
