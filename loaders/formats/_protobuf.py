"""The protocol-buffer wire format: varints, tags and fields, bounded and without recursion.

Written from the encoding's public description (protobuf.dev, "Encoding"). Every function stays
inside `[at, end)`. For malformed bytes it raises `WireError` with their place.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

VARINT, FIXED64, LEN, FIXED32 = 0, 1, 2, 5
_WORD = (1 << 64) - 1
_CHUNK = 1 << 16
_SHIFTS = tuple(range(0, 70, 7))


class WireError(ValueError):
    """Say what is malformed and at which byte of the message."""

    def __init__(self, problem: str, at: int) -> None:
        super().__init__(problem)
        self.problem = problem
        self.at = at


def read_varint(data: bytes, at: int, end: int, /) -> tuple[int, int]:
    """Return (value, next place) of the varint at `at`: at most ten bytes, cut to 64 bits."""
    value = 0
    try:
        for shift in _SHIFTS:
            byte = data[at]
            at += 1
            if byte < 128:
                if at > end:
                    break
                return (value | byte << shift) & _WORD, at
            value |= (byte & 127) << shift
    except IndexError:
        pass
    raise WireError("a varint does not end", at)


def read_short(data: bytes, at: int, end: int, /) -> tuple[int, int]:
    """Return (value, next place) of a tag or a length: at most five bytes and 32 bits."""
    value, stop = read_varint(data, at, end)
    if stop - at > 5 or value >> 32:
        raise WireError("a tag or a length is longer than 32 bits", at)
    return value, stop


def read_varints(data: bytes, /) -> npt.NDArray[np.uint64]:
    """Return packed varints as uint64[n]: each at most ten bytes, and cut to 64 bits."""
    pieces, at = [], 0
    if len(data) < 32:
        short = []
        while at < len(data):
            value, at = read_varint(data, at, len(data))
            short.append(value)
        return np.array(short, np.uint64)
    while at < len(data):  # in chunks, so that numpy's temporary arrays stay small
        end = min(at + _CHUNK, len(data))
        while end < len(data) and end > at and data[end - 1] > 127:
            end -= 1
        pieces.append(_varint_array(data, at, end))
        at = end
    return np.concatenate(pieces)


def _varint_array(data: bytes, at: int, end: int) -> npt.NDArray[np.uint64]:
    """Decode whole varints at once: each byte shifted by its place in its varint, then joined."""
    octets = np.frombuffer(data, np.uint8, end - at, at)
    last = np.flatnonzero(octets < 128)
    first = np.concatenate([[0], last[:-1] + 1])
    sizes = last - first + 1
    if not len(last) or last[-1] != end - at - 1 or sizes.max() > 10:
        raise WireError("a varint does not end", at)
    shifts = 7 * (np.arange(end - at) - np.repeat(first, sizes))
    bits = (octets & 127).astype(np.uint64) << shifts.astype(np.uint64)
    return np.bitwise_or.reduceat(bits, first)


def varint(value: int, /) -> bytes:
    """Encode a value in `[0, 2**64)`."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def length_delimited(tag: int, payload: bytes, /) -> bytes:
    """Encode a field whose tag is the one byte `tag`."""
    return bytes((tag,)) + varint(len(payload)) + payload


def fields(data: bytes, at: int, end: int, /) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, wire type, start, stop) of each field of the message `data[at:end]`.

    `[start, stop)` is the field's payload: the varint's bytes, the fixed bytes, or the contents.
    Groups, which are deprecated, are an error.
    """
    while at < end:
        tag, start = read_short(data, at, end)
        number, wire = tag >> 3, tag & 7
        if not number:
            raise WireError("field number 0", at)
        if wire == LEN:
            length, start = read_short(data, start, end)
            stop = start + length
        elif wire == VARINT:
            stop = read_varint(data, start, end)[1]
        elif wire in (FIXED64, FIXED32):
            stop = start + (8 if wire == FIXED64 else 4)
        else:
            raise WireError(f"wire type {wire} is not supported", at)
        if stop > end:
            raise WireError(f"field {number} ends {stop - end} bytes after its message", at)
        yield number, wire, start, stop
        at = stop
