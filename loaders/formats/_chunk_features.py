"""Find the features of many serialized `tf.train.Example`s at once, if all have one layout.

The layout is that of `canonical_ranges` in features.py. Besides, all messages have the same
features in the same order, and each list is a single value, or numbers that are packed together.
Each step reads a tag, a length or a name of all messages, by numpy.
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
    """A message has an unusual layout, or another layout than the first message.

    Then the messages are parsed one by one.
    """


def chunk_features(data: bytes, starts: Int64s, stops: Int64s, /) -> dict[str, FieldRanges] | None:
    """Return the byte ranges of each feature, by its name, in many serialized Examples at once.

    Message i is `data[starts[i]:stops[i]]`. None if a message is malformed, or has another layout
    than

        Features:                        tag 1, length, payload up to the end of the message
            entry, for each feature:     tag 1, length,
                name                         tag 1, length, UTF-8
                Feature                      tag 2, length, up to the end of the entry
                    list                         tag of its kind, length, up to the end of the entry
                        value or packed numbers      tag 1, length, up to the end of the entry
    """
    array = np.frombuffer(data, np.uint8)
    features: dict[str, FieldRanges] = {}
    try:
        positions = _payload_starts(array, starts, TAG_1, stops)  # in Features
        while (positions < stops).any():
            positions, entry_ends = _payload_ranges(array, positions, TAG_1)
            name, positions = _read_name(array, positions)
            is_too_many = len(features) == LIMITS.features
            if name in features or is_too_many or (entry_ends > stops).any():
                return None
            positions = _payload_starts(array, positions, TAG_2, entry_ends)  # in Feature
            list_tag = array[positions[0]]
            list_starts = _payload_starts(array, positions, list_tag, entry_ends)
            value_starts = _payload_starts(array, list_starts, TAG_1, entry_ends)
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


def _payload_ranges(array: Bytes, positions: Int64s, tag: int) -> tuple[Int64s, Int64s]:
    """Read a tag and a length at each position, and return the (starts, stops) of the payloads."""
    if (array[positions] != tag).any():
        raise _LayoutDiffersError
    positions = positions + 1
    lengths = np.zeros_like(positions)
    has_more_bytes = np.ones_like(positions)  # 1 for each length that is not complete yet, else 0
    for shift in range(0, 35, 7):  # a length has at most five bytes of seven bits
        byte = np.where(has_more_bytes, array[positions], 0).astype(np.int64)
        lengths |= (byte & 127) << shift
        positions = positions + has_more_bytes  # complete lengths stay at their end
        has_more_bytes = byte >> 7
        if not has_more_bytes.any():
            return positions, positions + lengths
    raise _LayoutDiffersError


def _payload_starts(array: Bytes, positions: Int64s, tag: int, ends: Int64s) -> Int64s:
    """Return the starts of the payloads of the fields with this tag at `positions`, which end at
    `ends`.
    """
    starts, payload_ends = _payload_ranges(array, positions, tag)
    if (payload_ends != ends).any():
        raise _LayoutDiffersError
    return starts


def _read_name(array: Bytes, positions: Int64s) -> tuple[str, Int64s]:
    """Return the name of the feature at each position, which is the same in all messages, and its
    end.
    """
    length = int(array[positions[0] + 1])
    size = 2 + length  # with the tag and the length
    stored_names = array[positions[:, None] + np.arange(size)]  # a row of bytes for each message
    first_name = stored_names[0]
    if first_name[0] != TAG_1 or length > 127 or (stored_names != first_name).any():
        raise _LayoutDiffersError
    return first_name[2:].tobytes().decode(), positions + size
