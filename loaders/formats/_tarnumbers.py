"""Read the numbers in a tar header: octal text, and the checksum, which is a sum of bytes.

A field of digits after NULs is not a number, since GNU tar reads 0 and other programs the digits.
"""

from __future__ import annotations

import re
import zlib

_OCTAL = re.compile(rb" *([0-7]*)[ \x00]*")


def sum_of_bytes(block: bytes, /) -> int:
    """Return the checksum of a tar header, a block of 512 bytes: the sum of its bytes.

    The field that stores the checksum, which is bytes 148 to 155, counts as 8 spaces.
    """
    blank = block[:148] + b"        " + block[156:]
    # `zlib.adler32` is fast, since it is computed in C. The low 16 bits of its result are
    # (1 + the sum of the bytes) % 65521. The modulo changes nothing for 256 bytes, whose sum is at
    # most 256 * 255 = 65280. So add the sums of two halves, and subtract the 1 of each.
    return (zlib.adler32(blank[:256]) & 0xFFFF) + (zlib.adler32(blank[256:]) & 0xFFFF) - 2


def octal(field: bytes, /) -> int | None:
    """Return the number in an octal field; None if it is not octal."""
    match = _OCTAL.fullmatch(field)
    return int(match[1] or b"0", 8) if match else None
