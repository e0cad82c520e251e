"""Find the list message of each feature in a serialized `tf.train.Example`.

The message is `Example{1: Features{1: map<string, Feature{1: BytesList | 2: FloatList | 3:
Int64List}>}}`. All usual writers produce one layout, where each message exactly fills the message
around it. `canonical_ranges` parses this layout in one loop, and returns None for any other.
`any_layout_ranges` parses any layout by proto3's rules, slowly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from twinfeed.loaders.formats._protobuf import (
    FIXED32,
    LEN,
    VARINT,
    WireError,
    fields,
    read_varint32,
)
from twinfeed.loaders.support.limits import LIMITS

WIRE_TYPES = {"bytes_list": (LEN,), "float_list": (LEN, FIXED32), "int64_list": (LEN, VARINT)}
"""The kinds of lists, and the wire types their values may have: numbers are packed together, or one
by one."""

KINDS = {1: "bytes_list", 2: "float_list", 3: "int64_list"}
KIND_OF_TAG = {number << 3 | LEN: kind for number, kind in KINDS.items()}
_OVERLONG_VARINT = re.compile(rb"[\x80-\xff]{10}")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
_EMPTY_FIELDS = re.compile(rb"(?:[\x0a\x12]\x00)*")
TAG_1, TAG_2, TAG_3 = 1 << 3 | LEN, 2 << 3 | LEN, 3 << 3 | LEN  # of fields 1 to 3, of type LEN
_FEATURES, _FEATURE_LISTS, _ENTRY, _KEY, _VALUE, _FEATURE = 1, 2, 1, 1, 2, 1  # field numbers

ByteRange = tuple[int, int]  # a range of bytes: (start, stop)
ListRange = tuple[str, int, int]
"""The byte range of a feature's list of values: (kind, start, stop), as ("int64_list", 14, 17).

The bytes [start, stop) are the content of a BytesList, FloatList or Int64List message."""


def canonical_ranges(data: bytes, /) -> dict[str, ListRange] | None:
    """Map the name of each feature of an Example to its `ListRange`; None if the layout is unusual.

    All usual writers produce `Features` in which each map entry is a short key and a `Feature` of
    one list, and each message fills the message around it.
    """
    ranges: dict[str, ListRange] = {}
    size = len(data)
    try:
        length, at = read_varint32(data, 1, size)
        if data[0] != TAG_1 or at + length != size:
            return None
        for _ in range(LIMITS.features):
            if at >= size:
                return ranges
            tag, length, at = data[at], data[at + 1], at + 2  # of the map entry
            if length > 127:
                length, at = read_varint32(data, at - 1, size)
            end = at + length
            value = at + 2 + data[at + 1]  # where the entry's value begins, after its key
            if tag != TAG_1 or data[at] != TAG_1 or data[at + 1] > 127 or end > size:
                return None
            name = data[at + 2 : value].decode()
            if name in ranges:
                return None
            tag, length, at = data[value], data[value + 1], value + 2  # of the Feature
            if length > 127:
                length, at = read_varint32(data, at - 1, size)
            if tag != TAG_2 or at + length != end:
                return None
            kind, length, at = KIND_OF_TAG[data[at]], data[at + 1], at + 2  # of its list
            if length > 127:
                length, at = read_varint32(data, at - 1, size)
            if at + length != end:
                return None
            ranges[name] = (kind, at, end)
            at = end
    except (IndexError, KeyError, UnicodeDecodeError, WireError):
        return None
    return ranges if at == size else None


def list_values(kind: str, data: bytes, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Check and yield the byte range (start, stop) of each value in a list of this kind,
    data[start:stop].

    Packed numbers are yielded as one value. A malformed list raises WireError.
    """
    wire_types = WIRE_TYPES[kind]
    has_values = False
    for i, (number, wire_type, value_start, value_stop) in enumerate(fields(data, start, stop)):
        if i == LIMITS.values:
            problem = f"a list of more than {LIMITS.values} values, stored one by one"
            raise WireError(problem, value_start)
        if number == 1 and wire_type in wire_types:
            check_numbers(kind, data, wire_type, value_start, value_stop)
            has_values = True
            yield value_start, value_stop
    if start < stop and not has_values:
        raise WireError("a list has bytes but no value", start)


def check_numbers(kind: str, data: bytes, wire_type: int, start: int, stop: int) -> None:
    """Raise WireError unless data[start:stop] consists of whole numbers of a list.

    A float has 4 bytes. An integer is a varint, of 1 to 10 bytes: all its bytes but the last one
    are above 127. Only integers that are packed together (wire type LEN) are checked here: with any
    other wire type, a varint was read to its end already.
    """
    if kind == "float_list" and (stop - start) % 4:
        raise WireError(f"{stop - start} bytes are not a multiple of 4, as for float32", start)
    if kind == "int64_list" and wire_type == LEN and stop > start:
        # Ten bytes above 127 in a row: a varint of more than ten bytes.
        overlong = stop - start > 10 and _OVERLONG_VARINT.search(data, start, stop)
        if overlong or data[stop - 1] > 127:
            raise WireError("a varint does not end", start)


def any_layout_ranges(data: bytes, /, *, sequence: bool = False) -> dict[str, ListRange | None]:
    """Map the name of each feature of an Example, of any layout that proto3 allows, to its
    `ListRange`.

    It is None for an empty Feature. With `sequence`, `data` is a SequenceExample, and the features
    are those of its context.
    """
    ranges: dict[str, ListRange | None] = {}
    for name, feature_ranges in _map_entries(data, _FEATURES, sequence=sequence):
        list_range = None
        for start, stop in feature_ranges:  # usually one; proto3 merges several
            list_range = _list_range(data, start, stop, merge_with=list_range)
        ranges.pop(name, None)  # if a name occurs twice, the last feature counts
        if feature_ranges:  # empty if the map has the name alone: this is not a feature
            ranges[name] = list_range
    return ranges


def feature_list_ranges(data: bytes, /) -> dict[str, list[ListRange | None]]:
    """Map the name of each feature list of a `tf.train.SequenceExample` to its steps.

    A step, for example a frame of a video, is a Feature. Its range is (kind, start, stop), such as
    ("bytes_list", 14, 90), for the bytes [start, stop) of its list of values. It is None for an
    empty Feature. The layout of the message is `SequenceExample{1: Features context, 2:
    FeatureLists{1: map<string, FeatureList{1: repeated Feature}>}}`.
    """
    lists: dict[str, list[ListRange | None]] = {}
    for name, message_ranges in _map_entries(data, _FEATURE_LISTS, sequence=True):
        # usually one FeatureList; proto3 merges several
        step_ranges = _field_ranges(data, message_ranges, _FEATURE)
        steps = [_list_range(data, start, stop) for start, stop in step_ranges]
        if len(steps) > LIMITS.values:
            raise WireError(f"a list of more than {LIMITS.values} steps", message_ranges[0][0])
        if not steps and any(stop > start for start, stop in message_ranges):
            raise WireError("a feature list has bytes but no Feature", message_ranges[0][0])
        if message_ranges:  # empty for a name without a FeatureList, which is ignored
            lists[name] = steps
    return lists


def check_is_example(data: bytes, *features: Mapping[str, object]) -> None:
    """Raise WireError if `data` was parsed without an error, but is probably not a
    tf.train.Example.

    Its `features` (of a SequenceExample also its feature lists) are none, or have control
    characters in their names.
    """
    # An Example without features is valid if it is b"", or a sequence of empty fields 1 and 2: the
    # tag 0x0a or 0x12, and the length 0.
    if not any(features) and not _EMPTY_FIELDS.fullmatch(data):
        raise WireError("it contains no feature", 0)
    for name in chain(*features):
        if _CONTROL_CHARACTER.search(name):
            raise WireError(f"a feature's name is not printable: {name[:40]!r}", 0)


def _map_entries(
    data: bytes, map_field: int, *, sequence: bool
) -> Iterator[tuple[str, list[ByteRange]]]:
    """Yield the name of each entry of a protobuf map, and the byte ranges of the entry's values.

    The map is in field `map_field`. proto3 allows no or several values of an entry, which are
    merged.
    """
    whole = [(0, len(data))]
    # Only a SequenceExample has the field of feature lists. If it is found in an Example, the loop
    # raises an error at once; if not, the loop has no iteration.
    feature_lists = () if sequence else _field_ranges(data, whole, _FEATURE_LISTS)
    for start, _ in feature_lists:
        problem = "it may be a tf.train.SequenceExample: use example=False and DecodeExample"
        raise WireError(problem, start)
    names = set[str]()
    map_ranges = _field_ranges(data, whole, map_field)
    for entry_range in _field_ranges(data, map_ranges, _ENTRY):
        name = ""  # of an entry without a key
        for start, stop in _field_ranges(data, [entry_range], _KEY):
            try:
                name = data[start:stop].decode()
            except UnicodeDecodeError:
                raise WireError("a feature's name is not UTF-8", start) from None
        names.add(name)
        if len(names) > LIMITS.features:
            raise WireError(f"more than {LIMITS.features} features or lists", entry_range[0])
        yield name, list(_field_ranges(data, [entry_range], _VALUE))


def _field_ranges(data: bytes, messages: Iterable[ByteRange], number: int) -> Iterator[ByteRange]:
    """Yield the byte range (start, stop) of each value of the field `number` in several messages.

    `messages` are the byte ranges of the messages in `data`. Only values that are messages or
    strings are yielded.
    """
    for start, stop in messages:
        for field_number, wire_type, value_start, value_stop in fields(data, start, stop):
            if field_number == number and wire_type == LEN:
                yield value_start, value_stop


def _list_range(
    data: bytes, start: int, stop: int, merge_with: ListRange | None = None
) -> ListRange | None:
    """Return where the list of values in the Feature data[start:stop] is; None if it is empty.

    proto3 merges a Feature that is stored as several messages: `merge_with` is the list of those
    before.
    """
    list_range = merge_with
    for number, wire_type, list_start, list_stop in fields(data, start, stop):
        if number in KINDS and wire_type == LEN:
            if list_range is not None:
                raise WireError("a feature has several lists", list_start)
            list_range = KINDS[number], list_start, list_stop
            for _ in list_values(KINDS[number], data, list_start, list_stop):
                pass  # the iterator checks each value
    if list_range is None and stop > start:
        raise WireError("a feature has bytes but no list", start)
    return list_range
