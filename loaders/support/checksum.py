"""CRC-32C (Castagnoli, RFC 3720 B.4), computed by google-crc32c.

Measured with google-crc32c 1.9:

- Its C functions take `bytes` only. So anything else is copied here first.
- They release the GIL: a second thread went on with gaps under 1 ms while 1 GiB took 80 ms.
- 10 KB take about 0.5 µs, and one large block at about 14 GB/s.
- Without the C extension the package warns at import, and is some 3,000 times slower.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import repeat
from typing import TypeVar

import numpy as np
from google_crc32c import extend as _extend

from twinfeed.loaders.support.array_types import Int64s

Buffer = bytes | bytearray | memoryview
Checksum = TypeVar("Checksum", int, Int64s)


def crc32c(data: Buffer, before: int = 0, /) -> int:
    """Return the CRC-32C of `data`, in `[0, 2**32)`; anything but `bytes` is copied once.

    `before` is the checksum of the bytes before `data`, if the bytes come in several parts.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    checksum: int = _extend(before, data if type(data) is bytes else bytes(data))
    return checksum


def crc32c_of_each(data: Iterable[bytes], /) -> list[int]:
    """Return the CRC-32C of each item, without a Python call for each.

    >>> [hex(each) for each in crc32c_of_each([b"123456789", b""])]
    ['0xe3069283', '0x0']
    """
    return list(map(_extend, repeat(0), data))


class WrongBytes(Exception):  # noqa: N818, caught and turned into the errors of this library
    """Bytes have another length or checksum than they should; `row` is their number in a batch."""

    def __init__(self, row: int, found: bytes) -> None:
        super().__init__(row, found)  # both arguments, so that the error can be pickled
        self.row = row
        self.found = found


def check_each(data: list[bytes], lengths: list[int], checksums: list[int] | None, /) -> None:
    """Compare the length of each item, and its CRC-32C unless `checksums` is None.

    Raises:
        WrongBytes: they differ; it has the first item with a wrong length, or else checksum.
    """
    expected, found = lengths, list(map(len, data))
    if found == expected and checksums is not None:
        expected, found = checksums, crc32c_of_each(data)
    if found != expected:
        row = [*map(operator.eq, found, expected)].index(False)
        raise WrongBytes(row, data[row])


def masked_crc32c(data: Buffer, /) -> int:
    """Return the masked CRC-32C that TFRecord files store."""
    return _masked(crc32c(data))


def masked_crc32c_of_each(data: Iterable[bytes], /) -> Int64s:
    """Return the masked CRC-32C of each item."""
    return _masked(np.array(crc32c_of_each(data), np.int64))


def _masked(checksum: Checksum) -> Checksum:
    """Return a checksum rotated right by 15 bits, plus a constant, as in TensorFlow.

    See `tensorflow/core/lib/hash/crc32c.h`. `checksum` is a number or an array.
    """
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF
