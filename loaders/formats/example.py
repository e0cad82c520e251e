"""`tf.train.Example` without TensorFlow: find features, parse values, and encode.

The parser is bounded and does not recurse. The parser accepts what proto3 accepts:

- fields in any order, and unknown fields, which are ignored;
- packed and unpacked lists;
- messages in pieces, which are merged, but for the pieces of one list, which are an error;
- two features of one name, of which the last counts.

The values are those of `tensorflow.train.Example`.
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
    read_short,
    read_varints,
    varint,
)
from twinfeed.loaders.formats.features import (
    WIRE_TYPES,
    Span,
    canonical_spans,
    check_is_example,
    check_numbers,
    feature_lists,
    general_spans,
    list_values,
)
from twinfeed.loaders.formats.records import Range
from twinfeed.loaders.support.limits import LIMITS

Values = list[bytes] | npt.NDArray[np.int64] | npt.NDArray[np.float32]

_ADVICE = (
    "check that the shard holds tf.train.Example messages; records of another kind are taken as "
    "raw bytes with example=False (--raw), for a decode= of your own to parse"
)
_TEXT = (bytes, bytearray, memoryview, str)


def locate(data: bytes, /, *, base: int = 0) -> dict[str, Range]:
    """Return by name the byte range of each feature of a serialized Example.

    `base` is the offset of `data` in its file, and is added to the offsets. A bytes feature with
    one value has the kind "bytes", and the range of this value. Any other feature has the range of
    its list message. A feature without a list is skipped: TensorFlow's parsers count it as missing.

    Raises:
        DataCorruptionError: a malformed message.
    """
    try:
        spans = _feature_spans(data)
        if len(data) > LIMITS.name_bytes and max(map(len, spans), default=0) > LIMITS.name_bytes:
            raise WireError(f"a feature's name of more than {LIMITS.name_bytes} characters", 0)
        return {name: _feature_range(data, base, *span) for name, span in spans.items()}
    except WireError as error:
        raise _corrupt(error, base) from None


def parse_sequence(data: bytes, /) -> tuple[dict[str, Values], dict[str, list[Values]]]:
    """Parse a `tf.train.SequenceExample` into its context and its feature lists.

    The context has the values of each feature: a list of bytes, int64[n] or float32[n]. A feature
    without a list is skipped. A feature list has the values of each step. An Example is parsed as a
    context without feature lists.

    Raises:
        DataCorruptionError: a malformed message.
    """
    try:
        context: Mapping[str, Span | None] | None = canonical_spans(data)
        lists: dict[str, list[Span | None]] = {}
        if context is None:
            context, lists = general_spans(data, sequence=True), feature_lists(data)
            check_is_example(data, context, lists)
        return (
            {name: _values_at(data, span) for name, span in context.items() if span},
            {name: [_values_at(data, span) for span in steps] for name, steps in lists.items()},
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
        DataCorruptionError: a malformed message.
        ValueError: a `kind` that is no list.
    """
    if kind not in WIRE_TYPES:
        raise ValueError(f"kind must be one of {sorted(WIRE_TYPES)}, got {kind!r}")
    try:
        return _list_values(kind, bytes(data))
    except WireError as error:
        raise _corrupt(error, 0) from None


def decode_lists(kind: str, lists: Sequence[bytes], /) -> Sequence[Values]:
    """Return the values of each list message, as rows of one array if all have as many numbers.

    Numbers that are packed, as by all usual writers, are decoded together.

    Raises:
        DataCorruptionError: a malformed message.

    >>> decode_lists("float_list", [bytes.fromhex("0a040000803f"), bytes.fromhex("0a0400000040")])
    array([[1.],
           [2.]], dtype=float32)
    """
    together = None
    if lists and kind != "bytes_list":
        with suppress(WireError):  # decode_list raises the error of a message
            together = _numbers_together(kind, lists)
    return [decode_list(kind, item) for item in lists] if together is None else together


def encode(features: Mapping[str, Any], /) -> bytes:
    """Serialize one Example. The same features give the same bytes, whatever their order.

    A value is bytes, str (as UTF-8), a number, or a sequence or array of one of these. Integers and
    booleans make an int64_list. Floats are rounded to float32 and make a float_list. An empty
    feature must be an array, since the dtype says which list to make.

    Raises:
        TypeError: values of another type; the error names the feature.
        ValueError: several dimensions, numbers beyond int64 or float32, and an empty list; the
            error names the feature.

    >>> encode({"label": 7}).hex()
    '0a100a0e0a056c6162656c12051a030a0107'
    """
    entries = []
    for name in sorted(features):
        feature = length_delimited(0x12, _feature(name, features[name]))
        entries.append(length_delimited(0x0A, length_delimited(0x0A, name.encode()) + feature))
    return length_delimited(0x0A, b"".join(entries))


def _feature_range(data: bytes, base: int, kind: str, start: int, stop: int) -> Range:
    """Check the list message data[start:stop], and return its range, or that of its single value.

    Only bytes have a range of the value; `single` is (start, stop) of the value if there is one.
    """
    single = None
    if stop - start > 1 and data[start] == 0x0A:
        length, low = data[start + 1], start + 2
        if length > 127:
            length, low = read_short(data, start + 1, stop)
        if low + length == stop:  # the usual case: one value, or all numbers packed together
            check_numbers(kind, data, LEN, low, stop)
            single = low, stop
    if single is None:
        values = list_values(kind, data, start, stop)
        single = next(values, None)
        if sum(1 for _ in values):  # the iterator checks each value
            single = None
    if kind == "bytes_list" and single is not None:
        low, high = single
        return Range("bytes", 0, base + low, high - low, data[low:high], low - start)
    return Range(kind, 0, base + start, stop - start, data[start:stop], 0)


def _feature_spans(data: bytes) -> dict[str, Span]:
    """Return by name (kind, start, stop) of the list message of each feature in `data`."""
    spans = canonical_spans(data)
    if spans is None:
        spans_or_none = general_spans(data)
        check_is_example(data, spans_or_none)
        spans = {name: span for name, span in spans_or_none.items() if span}
    return spans


def _values_at(data: bytes, span: Span | None) -> Values:
    """Return the values of the list message at a span; [] if there is no list."""
    return [] if span is None else _list_values(span[0], data[span[1] : span[2]])


def _list_values(kind: str, data: bytes) -> Values:
    """Return the values of a list message of this kind."""
    values = [data[start:stop] for start, stop in list_values(kind, data, 0, len(data))]
    if kind == "bytes_list":
        return values
    return _numbers(kind, b"".join(values))


def _numbers(kind: str, packed: bytes) -> npt.NDArray[Any]:
    """Return packed numbers as an array: int64[n] or float32[n] by `kind`."""
    if kind == "float_list":
        return np.frombuffer(packed, "<f4").astype(np.float32)
    return read_varints(packed).view(np.int64)


def _numbers_together(kind: str, lists: Sequence[bytes]) -> Sequence[Values] | None:
    """Return the numbers of each list message; None unless each message is packed numbers alone."""
    sizes = list(map(len, lists))
    headers = list(map(_packed_header, sizes))
    if not (all(headers) and all(map(bytes.startswith, lists, headers))):
        return None
    joined = b"".join(map(bytes.removeprefix, lists, headers))
    byte_stops = np.cumsum(sizes) - np.cumsum(list(map(len, headers)))  # of each message's numbers
    if kind == "float_list":
        stops, remainders = np.divmod(byte_stops, 4)
        is_whole = not remainders.any()
    else:
        is_last = np.frombuffer(joined, np.uint8) < 128  # whether a byte ends its number
        stops = np.flatnonzero(is_last).searchsorted(byte_stops)
        is_whole = is_last[byte_stops[byte_stops > 0] - 1].all()
    if not is_whole:
        return None
    values = _numbers(kind, joined)
    if (stops == stops[0] * np.arange(1, len(lists) + 1)).all():
        return cast(Sequence[Values], values.reshape(len(lists), -1))
    return np.split(values, stops[:-1])


@lru_cache(1 << 12)
def _packed_header(size: int) -> bytes:
    """Return the tag and the length that begin a list message of packed numbers of `size` bytes.

    Empty if no such message has this size: 130 bytes would be 127 and a header of two, or 128 and a
    header of three.

    >>> _packed_header(4).hex(), _packed_header(130).hex(), _packed_header(131).hex()
    ('0a02', '', '0a8001')
    """
    for taken in range(2, min(size, 6) + 1):
        header = b"\x0a" + varint(size - taken)
        if len(header) == taken:
            return header
    return b""


def _feature(name: str, value: Any) -> bytes:
    """Serialize a feature as the list message that suits the type of its values.

    Raises:
        TypeError: values of another type.
        ValueError: an array of several dimensions, numbers that do not fit, an empty list.
    """
    values = [value] if isinstance(value, _TEXT) or np.ndim(value) == 0 else value
    if len(values) == 0 and not isinstance(values, np.ndarray):
        raise ValueError(f"feature {name!r} is empty: give an array, so that its kind is known")
    if len(values) and isinstance(values[0], _TEXT):
        return length_delimited(0x0A, b"".join(_text_item(name, item) for item in values))
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"feature {name!r} must be one-dimensional, not of shape {array.shape}")
    if array.dtype.kind in "SUO" and len(array) == 0:
        return length_delimited(0x0A, b"")
    if array.dtype.kind == "f":
        return _packed(0x12, _float32(name, values, array).tobytes())
    if array.dtype.kind not in "iub":
        raise TypeError(f"feature {name!r} must hold bytes, str, integers or floats, got {value!r}")
    if array.dtype.kind == "u" and len(array) and int(array.max()) >> 63:
        raise ValueError(f"feature {name!r} must fit into int64, got {array.max()}")
    return _packed(0x1A, b"".join(varint(item & (1 << 64) - 1) for item in map(int, array)))


def _float32(name: str, values: Any, array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return floats rounded to float32; raise ValueError for a number that is too large."""
    if not isinstance(values, np.ndarray) and all(isinstance(item, int) for item in values):
        # numpy makes floats of integers that do not fit into any integer type
        raise ValueError(f"feature {name!r} must fit into int64, got {max(values, key=abs)}")
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
    return length_delimited(0x0A, item.encode() if isinstance(item, str) else bytes(item))


def _packed(tag: int, payload: bytes) -> bytes:
    """Serialize a list message of packed numbers."""
    return length_delimited(tag, length_delimited(0x0A, payload) if payload else b"")


def _corrupt(error: WireError, base: int) -> DataCorruptionError:
    """Return the DataCorruptionError for a malformed message, which begins at offset `base`."""
    return DataCorruptionError(
        f"not a valid tf.train.Example: {error.problem}", offset=base + error.offset, advice=_ADVICE
    )
