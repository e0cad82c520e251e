"""Parse the protocol-buffer wire format: varints, tags and fields, bounded, without recursion.

Written from the encoding's public description (protobuf.dev, "Encoding"). No function reads
at or after `end`. Malformed bytes raise `WireError`, with their offset.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

VARINT, FIXED64, LEN, FIXED32 = 0, 1, 2, 5
_MASK_64_BITS = (1 << 64) - 1
_CHUNK_BYTES = 1 << 16
_VARINT_SHIFTS = tuple(range(0, 70, 7))  # ten bytes of seven bits hold 64 bits
_VARINT32_SHIFTS = _VARINT_SHIFTS[:5]  # five bytes hold 32 bits


class WireError(ValueError):
    """A malformed message: the problem, and its offset in the message."""

    def __init__(self, problem: str, offset: int) -> None:
        super().__init__(problem)
        self.problem = problem
        self.offset = offset


def read_varint(data: bytes, position: int, end: int, /) -> tuple[int, int]:
    """Return the value of the varint at `position` (at most ten bytes, truncated to 64 bits), and
    the position after it. The data of the message end at `end`.
    """
    value = 0
    try:
        for shift in _VARINT_SHIFTS:
            byte = data[position]
            position += 1
            if byte < 128:
                if position > end:
                    break
                return (value | byte << shift) & _MASK_64_BITS, position
            value |= (byte & 127) << shift
    except IndexError:
        pass
    raise WireError("a varint does not end", position)


def read_varint32(data: bytes, position: int, end: int, /) -> tuple[int, int]:
    """Return the value of the varint at `position`, a tag or a length (at most five bytes and 32
    bits), and the position after it. The data of the message end at `end`.
    """
    value = 0
    try:
        for shift in _VARINT32_SHIFTS:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            if byte < 128:
                if position > end or value >> 32:
                    break
                return value, position
    except IndexError:
        pass
    raise WireError("a tag or a length does not end, or is longer than 32 bits", position)


def read_varints(data: bytes, /) -> npt.NDArray[np.uint64]:
    """Return the values of packed varints, uint64[n], each truncated to 64 bits."""
    chunks, position = [], 0
    if len(data) < 32:
        values = []
        while position < len(data):
            value, position = read_varint(data, position, len(data))
            values.append(value)
        return np.array(values, np.uint64)
    while position < len(data):  # in chunks, so that numpy's temporary arrays stay small
        end = min(position + _CHUNK_BYTES, len(data))
        while end < len(data) and end > position and data[end - 1] > 127:
            end -= 1  # do not split a varint
        chunks.append(_varint_array(data, position, end))
        position = end
    return np.concatenate(chunks)


def _varint_array(data: bytes, position: int, end: int) -> npt.NDArray[np.uint64]:
    """Decode the varints in data[position:end], without a loop over them, to uint64[n].

    The seven bits of each byte are shifted by its index in its varint, and then joined by "or".
    """
    encoded = np.frombuffer(data, np.uint8, end - position, position)
    last = np.flatnonzero(encoded < 128)  # the last byte of each varint
    first = np.concatenate([[0], last[:-1] + 1])
    sizes = last - first + 1
    if not len(last) or last[-1] != end - position - 1 or sizes.max() > 10:
        raise WireError("a varint does not end", position)
    index_in_varint = np.arange(end - position) - np.repeat(first, sizes)
    bits = (encoded & 127).astype(np.uint64) << (7 * index_in_varint).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, first)


def varint(value: int, /) -> bytes:
    """Encode a value in `[0, 2**64)` as a varint."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def length_delimited(tag: int, payload: bytes, /) -> bytes:
    """Encode a field of wire type LEN, whose tag is the single byte `tag`."""
    return bytes((tag,)) + varint(len(payload)) + payload


def fields(data: bytes, position: int, end: int, /) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, wire type, start, stop) of each field of the message data[position:end].

    `[start, stop)` is the field's payload: the bytes of the varint, the fixed-size number, or the
    contents of a length-delimited field. Groups, which are deprecated, are an error.
    """
    while position < end:
        tag, start = read_varint32(data, position, end)
        number, wire_type = tag >> 3, tag & 7
        if number == 0:
            raise WireError("field number 0", position)
        if wire_type == LEN:
            length, start = read_varint32(data, start, end)
            stop = start + length
        elif wire_type == VARINT:
            stop = read_varint(data, start, end)[1]
        elif wire_type in (FIXED64, FIXED32):
            stop = start + (8 if wire_type == FIXED64 else 4)
        else:
            raise WireError(f"wire type {wire_type} is not supported", position)
        if stop > end:
            raise WireError(f"field {number} ends {stop - end} bytes after its message", position)
        yield number, wire_type, start, stop
        position = stop
