"""The numbers in a tar header: octal text, and the sum that is its checksum.

A field of digits after NULs is no number, since GNU tar reads 0 and other programs the digits.
"""

from __future__ import annotations

import re
import zlib

_OCTAL = re.compile(rb" *([0-7]*)[ \x00]*")


def sum_of_bytes(block: bytes, /) -> int:
    """Return the sum of a header's bytes, with spaces in place of the checksum."""
    blank = block[:148] + b"        " + block[156:]
    # Adler-32's low half is 1 + the sum of the bytes modulo 65521. Half a block's sum is smaller.
    return (zlib.adler32(blank[:256]) & 0xFFFF) + (zlib.adler32(blank[256:]) & 0xFFFF) - 2


def octal(field: bytes, /) -> int | None:
    """Return the value of an octal field; None for a field that is not octal."""
    match = _OCTAL.fullmatch(field)
    return int(match[1] or b"0", 8) if match else None
