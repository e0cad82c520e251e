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


class _OtherLayoutError(Exception):
    """A message has another layout than the usual one, or than the first message."""


def chunk_features(data: bytes, starts: Int64s, stops: Int64s, /) -> dict[str, FieldRanges] | None:
    """Return by name the ranges of each feature of the messages `[starts, stops)` in `data`.

    They are the ranges that `example.locate` finds in each message. None: a message is malformed,
    or has another layout.
    """
    array = np.frombuffer(data, np.uint8)
    features: dict[str, FieldRanges] = {}
    try:
        at = _enter_last(array, starts, TAG_1, stops)
        while (at < stops).any():
            at, ends = _enter(array, at, TAG_1)  # the entry of the map
            name, at = _read_name(array, at)
            if name in features or len(features) == LIMITS.features or (ends > stops).any():
                return None
            at = _enter_last(array, at, TAG_2, ends)  # the Feature
            tag = array[at[0]]
            lists = _enter_last(array, at, tag, ends)
            values = _enter_last(array, lists, TAG_1, ends)
            kind = KIND_OF_TAG[tag]
            if kind == "bytes_list":
                features[name] = FieldRanges("bytes", values, ends, values - lists)
            else:
                for start, stop in zip(values.tolist(), ends.tolist(), strict=True):
                    check_numbers(kind, data, LEN, start, stop)
                features[name] = FieldRanges(kind, lists, ends, np.zeros_like(lists))
            at = ends
    except (IndexError, KeyError, UnicodeDecodeError, WireError, _OtherLayoutError):
        return None
    return features


def _enter(array: Bytes, at: Int64s, tag: int) -> tuple[Int64s, Int64s]:
    """Read a tag and a length in each message; return (start, end) of the payload."""
    if (array[at] != tag).any():
        raise _OtherLayoutError
    lengths, unfinished = np.zeros_like(at), np.ones_like(at)
    at = at + 1
    for shift in range(0, 35, 7):
        byte = np.where(unfinished, array[at], 0).astype(np.int64)
        lengths |= (byte & 127) << shift
        at = at + unfinished
        unfinished = byte >> 7
        if not unfinished.any():
            break
    if unfinished.any():
        raise _OtherLayoutError
    return at, at + lengths


def _enter_last(array: Bytes, at: Int64s, tag: int, ends: Int64s) -> Int64s:
    """Read a tag and a length in each message; return the start of the payload, which must end at
    `ends`.
    """
    at, payload_ends = _enter(array, at, tag)
    if (payload_ends != ends).any():
        raise _OtherLayoutError
    return at


def _read_name(array: Bytes, at: Int64s) -> tuple[str, Int64s]:
    """Return a name that is the same in all messages, and the position after it in each."""
    size = 2 + int(array[at[0] + 1])  # with the tag and the length
    names = array[at[:, None] + np.arange(size)]
    if names[0, 0] != TAG_1 or size > 2 + 127 or (names != names[0]).any():
        raise _OtherLayoutError
    return names[0, 2:].tobytes().decode(), at + size
