"""Find the features of many serialized `tf.train.Example`s at once, if all have one layout.

The layout is that of `canonical_spans` in features.py. Besides, all messages have the same features
in the same order, and each list is a single value, or numbers that are packed together. Each step
reads a tag, a length or a name of all messages, by numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.formats._protobuf import LEN, WireError
from twinfeed.loaders.formats.features import KIND_OF_TAG, TAG_1, TAG_2, check_numbers
from twinfeed.loaders.formats.records import FieldRanges
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.support.limits import LIMITS

Bytes = npt.NDArray[np.uint8]


class _LayoutDiffersError(Exception):
    """A message has another layout than the usual one, or than the first message."""


def chunk_features(data: bytes, starts: Int64s, stops: Int64s, /) -> dict[str, FieldRanges] | None:
    """Return the byte ranges of each feature, by its name, in many serialized Examples at once.

    Message i is `data[starts[i]:stops[i]]`. The ranges are those that `example.locate` finds in a
    single message. None if a message is malformed, or has another layout than

        Features:                        tag 1, length, payload up to the end of the message
            entry, for each feature:     tag 1, length,
                name                         tag 1, length, UTF-8
                Feature                      tag 2, length, up to the end of the entry
                    list                         tag of its kind, length, up to the end of the entry
                        value or packed numbers      tag 1, length, up to the end of the entry

    All messages are read in parallel: an array of positions has a position for each message.
    """
    array = np.frombuffer(data, np.uint8)
    features: dict[str, FieldRanges] = {}
    try:
        positions = _last_payloads(array, starts, TAG_1, stops)  # in Features
        while (positions < stops).any():
            positions, entry_ends = _payloads(array, positions, TAG_1)
            name, positions = _read_name(array, positions)
            is_too_many = len(features) == LIMITS.features
            if name in features or is_too_many or (entry_ends > stops).any():
                return None
            positions = _last_payloads(array, positions, TAG_2, entry_ends)  # in Feature
            list_tag = array[positions[0]]
            list_starts = _last_payloads(array, positions, list_tag, entry_ends)
            value_starts = _last_payloads(array, list_starts, TAG_1, entry_ends)
            kind = KIND_OF_TAG[list_tag]
            if kind == "bytes_list":
                prefix_lengths = value_starts - list_starts
                features[name] = FieldRanges("bytes", value_starts, entry_ends, prefix_lengths)
            else:
                for start, stop in zip(value_starts.tolist(), entry_ends.tolist(), strict=True):
                    check_numbers(kind, data, LEN, start, stop)
                no_prefixes = np.zeros_like(list_starts)
                features[name] = FieldRanges(kind, list_starts, entry_ends, no_prefixes)
            positions = entry_ends
    except (IndexError, KeyError, UnicodeDecodeError, WireError, _LayoutDiffersError):
        return None
    return features


def _payloads(array: Bytes, positions: Int64s, tag: int) -> tuple[Int64s, Int64s]:
    """Return the (starts, ends) of the payloads of the fields that begin at `positions`.

    A field is the byte `tag`, the length of the payload as a varint, and the payload.
    """
    if (array[positions] != tag).any():
        raise _LayoutDiffersError
    lengths, continues = np.zeros_like(positions), np.ones_like(positions)
    positions = positions + 1
    for shift in range(0, 35, 7):  # a length has at most five bytes of seven bits
        byte = np.where(continues, array[positions], 0).astype(np.int64)
        lengths |= (byte & 127) << shift
        positions = positions + continues
        continues = byte >> 7  # the high bit is 1 if another byte of the varint follows
        if not continues.any():
            return positions, positions + lengths
    raise _LayoutDiffersError


def _last_payloads(array: Bytes, positions: Int64s, tag: int, ends: Int64s) -> Int64s:
    """Return the starts of the payloads of the fields at `positions`, which must end at `ends`."""
    starts, payload_ends = _payloads(array, positions, tag)
    if (payload_ends != ends).any():
        raise _LayoutDiffersError
    return starts


def _read_name(array: Bytes, positions: Int64s) -> tuple[str, Int64s]:
    """Return the name of a feature, and the position after the name in each message.

    The layout is the same in all messages if they have the same names in the same order. A name is
    preceded by its tag and its length, which must be a single byte.
    """
    length = int(array[positions[0] + 1])
    size = 2 + length  # with the tag and the length
    names = array[positions[:, None] + np.arange(size)]
    if names[0, 0] != TAG_1 or length > 127 or (names != names[0]).any():
        raise _LayoutDiffersError
    return names[0, 2:].tobytes().decode(), positions + size
