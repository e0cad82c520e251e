"""Where the feature lists of a serialized `tf.train.Example` lie.

The message is `Example{1: Features{1: map<string, Feature{1: BytesList | 2: FloatList | 3:
Int64List}>}}`. Every writer lays it out in one way: each message exactly fills the message around
it. `canonical_spans` reads this layout in a single flat loop, and returns None for any other.
`general_spans` reads any layout by proto3's rules, slowly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain

from twinfeed.loaders.formats._protobuf import FIXED32, LEN, VARINT, WireError, fields, read_short
from twinfeed.loaders.support.limits import LIMITS

WIRE_TYPES = {"bytes_list": (LEN,), "float_list": (LEN, FIXED32), "int64_list": (LEN, VARINT)}
"""The kinds of lists, and the wire types their values may have: numbers are packed together, or one
by one."""

KINDS = {1: "bytes_list", 2: "float_list", 3: "int64_list"}
_KIND_OF_TAG = {number << 3 | LEN: kind for number, kind in KINDS.items()}
_OVERLONG = re.compile(rb"[\x80-\xff]{10}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_EMPTY = re.compile(rb"(?:[\x0a\x12]\x00)*")
_FIRST, _SECOND = 1 << 3 | LEN, 2 << 3 | LEN

Span = tuple[str, int, int]


def canonical_spans(data: bytes, /) -> dict[str, Span] | None:
    """Return the (kind, start, stop) of each feature's list; None for an unusual layout."""
    found: dict[str, Span] = {}
    size = len(data)
    try:
        length, at = read_short(data, 1, size)
        if data[0] != _FIRST or at + length != size:
            return None
        for _ in range(LIMITS.features):
            if at >= size:
                return found
            tag, length, at = data[at], data[at + 1], at + 2
            if length > 127:
                length, at = read_short(data, at - 1, size)
            end = at + length
            value = at + 2 + data[at + 1]
            if tag != _FIRST or data[at] != _FIRST or data[at + 1] > 127 or end > size:
                return None
            name = data[at + 2 : value].decode()
            if name in found:
                return None
            tag, length, at = data[value], data[value + 1], value + 2
            if length > 127:
                length, at = read_short(data, at - 1, size)
            if tag != _SECOND or at + length != end:
                return None
            kind, length, at = _KIND_OF_TAG[data[at]], data[at + 1], at + 2
            if length > 127:
                length, at = read_short(data, at - 1, size)
            if at + length != end:
                return None
            found[name] = (kind, at, end)
            at = end
    except (IndexError, KeyError, UnicodeDecodeError, WireError):
        return None
    return found if at == size else None


def list_items(kind: str, data: bytes, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the (wire type, start, stop) of each value field of one list message."""
    wire_types = WIRE_TYPES[kind]
    known = start == stop
    for count, (number, wire_type, at, end) in enumerate(fields(data, start, stop)):
        if count == LIMITS.values:
            raise WireError(f"a list of more than {LIMITS.values} values, stored one by one", at)
        if number == 1 and wire_type in wire_types:
            check_numbers(kind, data, wire_type, at, end)
            known = True
            yield wire_type, at, end
    if not known:
        raise WireError("a list of other fields than values", start)


def check_numbers(kind: str, data: bytes, wire_type: int, at: int, end: int) -> None:
    """Raise WireError unless the packed numbers of one value field are whole."""
    if kind == "float_list" and (end - at) % 4:
        raise WireError(f"{end - at} bytes are no float32 array", at)
    if kind == "int64_list" and wire_type == LEN and end > at:
        overlong = end - at > 10 and _OVERLONG.search(data, at, end)
        if overlong or data[end - 1] > 127:
            raise WireError("a varint does not end", at)


def general_spans(data: bytes, /, *, sequence: bool = False) -> dict[str, Span | None]:
    """Return the (kind, start, stop) of each feature's list, by proto3's rules; None without one.

    With `sequence` these are the features of a SequenceExample's context.
    """
    found: dict[str, Span | None] = {}
    for name, values in _map_entries(data, 1, sequence=sequence):
        span = None
        for at, end in values:
            span = _list(data, at, end, span)
        found.pop(name, None)  # the last feature of a name counts
        if values:
            found[name] = span
    return found


def feature_lists(data: bytes, /) -> dict[str, list[Span | None]]:
    """Return each step of each feature list of a `tf.train.SequenceExample`; None without a list.

    The message is `SequenceExample{1: Features, 2: FeatureLists{1: map<string, FeatureList{1:
    Feature}>}}`.
    """
    found: dict[str, list[Span | None]] = {}
    for name, values in _map_entries(data, 2, sequence=True):
        steps = [
            _list(data, at, end, None)
            for list_range in values
            for at, end in _messages(data, *list_range, 1)
        ]
        if len(steps) > LIMITS.values:
            raise WireError(f"a list of more than {LIMITS.values} steps", values[0][0])
        if not steps and any(end > at for at, end in values):
            raise WireError("a list of other fields than steps", values[0][0])
        if values:
            found[name] = steps
    return found


def check_is_example(data: bytes, *found: Mapping[str, object]) -> None:
    """Raise WireError if what is found in a message of unusual layout shows that it is another's.

    Nothing is found in a message that is not of empty maps alone, or a name is not printable.
    """
    if not any(found) and not _EMPTY.fullmatch(data):
        raise WireError("no feature is found in it", 0)
    for name in chain(*found):
        if _CONTROL.search(name):
            raise WireError(f"a feature's name is not printable: {name[:40]!r}", 0)


def _map_entries(
    data: bytes, map_field: int, *, sequence: bool
) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield the name of each entry of a map, and the ranges of its values."""
    feature_lists = () if sequence else list(_messages(data, 0, len(data), 2))
    if feature_lists:
        raise WireError(
            "it may be a tf.train.SequenceExample, for example=False and DecodeExample",
            feature_lists[0][0],
        )
    names = set[str]()
    for map_range in _messages(data, 0, len(data), map_field):
        for start, stop in _messages(data, *map_range, 1):
            name = ""
            for at, end in _messages(data, start, stop, 1):
                try:
                    name = data[at:end].decode()
                except UnicodeDecodeError:
                    raise WireError("a feature's name is not UTF-8", at) from None
            names.add(name)
            if len(names) > LIMITS.features:
                raise WireError(f"more than {LIMITS.features} features or lists", start)
            yield name, list(_messages(data, start, stop, 2))


def _messages(data: bytes, start: int, stop: int, number: int) -> Iterator[tuple[int, int]]:
    """Yield the range of each value of field `number` that is a message or a string."""
    for found, wire_type, at, end in fields(data, start, stop):
        if found == number and wire_type == LEN:
            yield at, end


def _list(data: bytes, at: int, end: int, found: Span | None) -> Span | None:
    """Return the list of one Feature, `found` if the Feature has none."""
    for number, wire_type, start, stop in fields(data, at, end):
        if number in KINDS and wire_type == LEN:
            if found is not None:
                raise WireError("a feature is stored in several pieces", start)
            found = KINDS[number], start, stop
            for _ in list_items(KINDS[number], data, start, stop):
                pass  # checked also where a later feature of the same name counts
    if found is None and end > at:
        raise WireError("a feature of other fields than lists", at)
    return found
