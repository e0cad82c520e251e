"""`tf.train.Example` without TensorFlow: find features, parse values, and encode.

The parser is bounded, does not recurse, and accepts what proto3 accepts; only two lists of one
feature, whose values would have to be joined, are an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.errors import DataCorruptionError
from twinfeed.loaders.formats._protobuf import (
    LEN,
    WireError,
    length_delimited,
    read_varint32,
    read_varints,
    varint,
)
from twinfeed.loaders.formats.features import (
    TAG_1,
    TAG_2,
    TAG_3,
    WIRE_TYPES,
    ListRange,
    any_layout_ranges,
    canonical_ranges,
    check_is_example,
    check_numbers,
    feature_list_ranges,
    list_values,
)
from twinfeed.loaders.formats.records import Range, Record, Sample
from twinfeed.loaders.support.array_types import Int64s, as_array
from twinfeed.loaders.support.limits import LIMITS

Values = list[bytes] | npt.NDArray[np.int64] | npt.NDArray[np.float32]

_ADVICE = (
    "check that the shard holds tf.train.Example messages; to read records of another kind "
    "as raw bytes, use example=False (--raw) when they are indexed, and parse them in decode="
)
_TEXT = (bytes, bytearray, memoryview, str)


def locate(data: bytes, /, *, base: int = 0) -> dict[str, Range]:
    """Map the name of each feature of a serialized Example to its byte range, beyond `base`.

    A bytes feature of one value has the kind "bytes", any other that of its list message. A feature
    without a list is skipped, which TensorFlow counts as missing. DataCorruptionError if it is
    malformed.
    """
    try:
        ranges = _list_ranges(data)
        if len(data) > LIMITS.name_bytes and max(map(len, ranges), default=0) > LIMITS.name_bytes:
            raise WireError(f"a feature's name of more than {LIMITS.name_bytes} characters", 0)
        return {name: _feature_range(data, base, *range_) for name, range_ in ranges.items()}
    except WireError as error:
        raise _corrupt(error, base) from None


def parse_sequence(data: bytes, /) -> tuple[dict[str, Values], dict[str, list[Values]]]:
    """Parse a `tf.train.SequenceExample` into its context and its feature lists, of values by step.

    A feature without a list is skipped. An Example is a context without feature lists.
    DataCorruptionError if the message is malformed.
    """
    try:
        context: Mapping[str, ListRange | None] | None = canonical_ranges(data)
        lists: dict[str, list[ListRange | None]] = {}
        if context is None:
            context, lists = any_layout_ranges(data, sequence=True), feature_list_ranges(data)
            check_is_example(data, context, lists)
        return (
            {name: _values_at(data, range_) for name, range_ in context.items() if range_},
            {name: [_values_at(data, range_) for range_ in steps] for name, steps in lists.items()},
        )
    except WireError as error:
        raise DataCorruptionError(
            f"not a valid tf.train.Example or SequenceExample: {error.problem}",
            offset=error.offset,
            advice="parse records of another kind with a decode= of your own",
        ) from None


def decode_list(kind: str, data: bytes | memoryview, /) -> Values:
    """Return the values of one list message: a list of bytes, int64[n] or float32[n] by `kind`.

    Raises:
        DataCorruptionError: the message is malformed.
        ValueError: `kind` is not the kind of a list.
    """
    if kind not in WIRE_TYPES:
        raise ValueError(f"kind must be one of {sorted(WIRE_TYPES)}, got {kind!r}")
    try:
        return _parse_list(kind, bytes(data))
    except WireError as error:
        raise _corrupt(error, 0) from None


def sample_of(record: Record, /) -> Sample:
    """Return the fields of a scanned record by name: their bytes, or the values of a list."""
    return {
        name: field.data if field.kind == "bytes" else decode_list(field.kind, field.data)
        for name, field in record.fields.items()
    }


def decode_lists(kind: str, lists: Sequence[bytes], /) -> Sequence[Values]:
    """Return the values of each list message: one array with a row for each message, if all have
    equally many numbers, and else a sequence of lists or arrays.

    Packed numbers, which all usual writers produce, are decoded in one call.

    Raises:
        DataCorruptionError: a message is malformed.

    >>> decode_lists("float_list", [bytes.fromhex("0a040000803f"), bytes.fromhex("0a0400000040")])
    array([[1.],
           [2.]], dtype=float32)
    """
    values = None
    if lists and kind != "bytes_list":
        with suppress(WireError):  # decode_list raises the error, and says which message it is
            values = _decode_packed_lists(kind, lists)
    return [decode_list(kind, item) for item in lists] if values is None else values


def encode(features: Mapping[str, Any], /) -> bytes:
    """Serialize one Example. The same features give the same bytes, whatever their order.

    A value is bytes, str (as UTF-8), a number, or a sequence or array of one of these. Integers and
    booleans make an int64_list. Floats are rounded to float32 and make a float_list. An empty
    feature must be an array, since the dtype says which list to make.

    Raises:
        TypeError: a value has another type; the error names the feature.
        ValueError: a value has several dimensions, numbers beyond int64 or float32, or is an empty
            list; the error names the feature.

    >>> encode({"label": 7}).hex()
    '0a100a0e0a056c6162656c12051a030a0107'
    """
    entries = []
    for name in sorted(features):
        feature = length_delimited(TAG_2, _feature(name, features[name]))
        entries.append(length_delimited(TAG_1, length_delimited(TAG_1, name.encode()) + feature))
    return length_delimited(TAG_1, b"".join(entries))


def _feature_range(data: bytes, base: int, kind: str, start: int, stop: int) -> Range:
    """Check the values of a feature, and return the `Range` of bytes to read it from.

    The list of the single value b"cat" is `0a 03 63 61 74`, whose range is that of the value alone,
    to be read without parsing. Any other list has the range of the whole list.
    """
    num_values = 0
    # The fast path is for a list of one value. All numbers of a list are usually one value too,
    # since they are packed together.
    if stop - start > 1 and data[start] == TAG_1:  # 0a
        length, value_start = data[start + 1], start + 2  # 3
        if length > 127:  # not a length, but the first byte of a varint, a longer integer
            length, value_start = read_varint32(data, start + 1, stop)
        if value_start + length == stop:  # nothing follows the value
            check_numbers(kind, data, LEN, value_start, stop)
            num_values, value_stop = 1, stop
    if num_values == 0:  # no value, several values, or an unusual layout: parse the list
        for value_range in list_values(kind, data, start, stop):  # checks each value
            num_values += 1
            value_start, value_stop = value_range
    if kind == "bytes_list" and num_values == 1:
        offset, value = base + value_start, data[value_start:value_stop]
        prefix_length = value_start - start  # of the tag and the length before the value
        return Range("bytes", offset, len(value), value, prefix_length=prefix_length)
    return Range(kind, base + start, stop - start, data[start:stop])


def _list_ranges(data: bytes) -> dict[str, ListRange]:
    """Map each feature that has a list to its kind and bytes, such as ("int64_list", 14, 17)."""
    # The fast path parses the one layout that all usual writers produce.
    ranges = canonical_ranges(data)
    if ranges is None:  # another layout: the slow path parses any layout that protobuf allows
        # The range of a feature without a list is None, and is left out below.
        ranges_or_none = any_layout_ranges(data)
        check_is_example(data, ranges_or_none)
        ranges = {name: range_ for name, range_ in ranges_or_none.items() if range_}
    return ranges


def _values_at(data: bytes, range_: ListRange | None) -> Values:
    """Return the values of the list message at a range (kind, start, stop); [] without a list."""
    return [] if range_ is None else _parse_list(range_[0], data[range_[1] : range_[2]])


def _parse_list(kind: str, data: bytes) -> Values:
    """Return the values of a list message: a list of bytes, float32[n] or int64[n]."""
    values = [data[start:stop] for start, stop in list_values(kind, data, 0, len(data))]
    if kind == "bytes_list":
        return values
    return _decode_packed(kind, b"".join(values))


def _decode_packed(kind: str, packed: bytes) -> npt.NDArray[Any]:
    """Return packed numbers as an array: int64[n] or float32[n] by `kind`."""
    if kind == "float_list":
        return np.frombuffer(packed, "<f4").astype(np.float32)
    return read_varints(packed).view(np.int64)


def _decode_packed_lists(kind: str, lists: Sequence[bytes]) -> Sequence[Values] | None:
    """Decode many lists of packed numbers by one call of numpy; None if one has another layout.

    As int64_lists, `0a 02 07 08` is [7, 8], and `0a 02 ac 02` is [300].
    """
    # The headers that messages of these sizes must have in this layout: 0a 02 and 0a 02.
    headers = [_packed_header(len(message)) for message in lists]
    if not (all(headers) and all(map(bytes.startswith, lists, headers))):
        return None
    payloads = list(map(bytes.removeprefix, lists, headers))  # 07 08 and ac 02
    packed = b"".join(payloads)
    number_stops = _number_stops(kind, packed, np.cumsum(list(map(len, payloads))))  # [2, 3]
    if number_stops is None:  # a message is malformed
        return None
    values = _decode_packed(kind, packed)  # [7, 8, 300]
    equal_stops = number_stops[0] * np.arange(1, len(lists) + 1)  # [2, 4]
    if (number_stops == equal_stops).all():  # all messages have equally many numbers
        return cast(Sequence[Values], values.reshape(len(lists), -1))
    return np.split(values, number_stops[:-1])  # [7, 8] and [300]


def _number_stops(kind: str, packed: bytes, byte_stops: Int64s) -> Int64s | None:
    """Return how many packed numbers are before each byte stop; None if a stop is within a number.

    Of an integer, only the last byte is below 128: of 7 8 172 2, two are before byte 2, three
    before 4.
    """
    if kind == "float_list":
        stops, remainders = np.divmod(byte_stops, 4)
        return None if remainders.any() else stops
    is_last_byte = np.frombuffer(packed, np.uint8) < 128  # True, True, False, True
    if not is_last_byte[byte_stops[byte_stops > 0] - 1].all():  # a stop after another byte
        return None
    return np.flatnonzero(is_last_byte).searchsorted(byte_stops)


@lru_cache(1 << 12)
def _packed_header(message_size: int) -> bytes:
    """Return the first bytes of a list of packed numbers of this size, or b"" if there is none.

    The numbers [5, 6] are `0a 02 05 06`. No list has 130 bytes: with a length of 127 it has 129,
    and with 128, which takes 2 bytes, 131.

    >>> _packed_header(4).hex(), _packed_header(130).hex(), _packed_header(131).hex()
    ('0a02', '', '0a8001')
    """
    # The size of the length depends on the length, so try each size of the header.
    for header_size in range(2, min(message_size, 6) + 1):
        header = bytes([TAG_1]) + varint(message_size - header_size)
        if len(header) == header_size:
            return header
    return b""


def _feature(name: str, value: Any) -> bytes:
    """Serialize a feature as the list message that suits the type of its values."""
    values = [value] if isinstance(value, _TEXT) or np.ndim(value) == 0 else value
    if len(values) == 0 and not isinstance(values, np.ndarray):
        raise ValueError(
            f"feature {name!r} is empty, so its kind is not known: give an empty array, such as "
            "np.zeros(0, np.float32), or np.array([], bytes) where others have bytes or text"
        )
    if len(values) and isinstance(values[0], _TEXT):
        return length_delimited(TAG_1, b"".join(_text_item(name, item) for item in values))
    array = np.asarray(values) if isinstance(values, Sequence) else as_array(values)
    if array.ndim != 1:
        raise ValueError(f"feature {name!r} must be one-dimensional, not of shape {array.shape}")
    if array.dtype.kind in "SUO" and len(array) == 0:
        return length_delimited(TAG_1, b"")
    array = _exact_integers(name, values, array)
    if array.dtype.kind == "f":
        return _packed(TAG_2, _float32(name, array).tobytes())
    if array.dtype.kind not in "iub":
        raise TypeError(f"feature {name!r} must hold bytes, str, integers or floats, got {value!r}")
    # a negative number is encoded as its two's complement
    return _packed(TAG_3, b"".join(varint(item & (1 << 64) - 1) for item in map(int, array)))


def _exact_integers(name: str, values: Any, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return integers, which numpy may make floats or objects, exactly; else the values."""
    is_converted = array.dtype.kind in "fO" and not isinstance(values, np.ndarray)
    if is_converted and all(isinstance(value, (int, np.integer)) for value in values):
        array = np.array([int(value) for value in values], object)
    elif array.dtype.kind != "u":
        return array
    limits = np.iinfo(np.int64)
    beyond = array[(array < limits.min) | (array > limits.max)]
    if len(beyond):
        raise ValueError(f"feature {name!r} must fit into int64, got {beyond[0]}")
    return array.astype(np.int64)


def _float32(name: str, array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return floats rounded to float32; raise ValueError for a number that is too large."""
    with np.errstate(over="ignore"):
        rounded = array.astype("<f4")
    overflows = np.isinf(rounded) & np.isfinite(array)
    if overflows.any():
        raise ValueError(f"feature {name!r} must fit into float32, got {array[overflows][0]}")
    return rounded


def _text_item(name: str, item: Any) -> bytes:
    """Serialize a value of a bytes list; raise TypeError for another type."""
    if not isinstance(item, _TEXT):
        raise TypeError(f"feature {name!r} must hold values of one type, not also {item!r}")
    return length_delimited(TAG_1, item.encode() if isinstance(item, str) else bytes(item))


def _packed(tag: int, payload: bytes) -> bytes:
    """Serialize a list message, whose field has this tag, of packed numbers."""
    return length_delimited(tag, length_delimited(TAG_1, payload) if payload else b"")


def _corrupt(error: WireError, base: int) -> DataCorruptionError:
    """Return the DataCorruptionError for a malformed message, which begins at offset `base`."""
    return DataCorruptionError(
        f"not a valid tf.train.Example: {error.problem}", offset=base + error.offset, advice=_ADVICE
    )
