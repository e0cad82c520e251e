"""Read the numbers in a tar header: octal text, and the checksum, which is a sum of bytes.

A field of digits after NULs is not a number, since GNU tar reads 0 and other programs the digits.
"""

from __future__ import annotations

import re
import zlib

_OCTAL = re.compile(rb" *([0-7]*)[ \x00]*")


def sum_of_bytes(block: bytes, /) -> int:
    """Return the sum of a header's bytes, with spaces in place of the checksum."""
    blank = block[:148] + b"        " + block[156:]
    # The low half of Adler-32 is 1 + the sum of the bytes modulo 65521, and computed in C. Half a
    # block has a smaller sum than that.
    return (zlib.adler32(blank[:256]) & 0xFFFF) + (zlib.adler32(blank[256:]) & 0xFFFF) - 2


def octal(field: bytes, /) -> int | None:
    """Return the number in an octal field; None if it is not octal."""
    match = _OCTAL.fullmatch(field)
    return int(match[1] or b"0", 8) if match else None
