"""The Example parser: equal to TensorFlow's message class on generated, odd and broken messages."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from support.formats import tensorflow_values

from twinfeed.loaders import DataCorruptionError
from twinfeed.loaders.formats import features as _features
from twinfeed.loaders.formats._protobuf import (
    WireError,
    fields,
    length_delimited,
    read_varint,
    read_varint32,
    read_varints,
    varint,
)
from twinfeed.loaders.formats.example import (
    decode_list,
    decode_lists,
    encode,
    locate,
    parse_sequence,
)
from twinfeed.loaders.support.limits import LIMITS

READ_BY_TENSORFLOW = re.compile(
    "wire type 3|several lists|printable|no feature|has bytes but no|SequenceExample"
)
"""Groups, a feature of several lists, and messages of another kind."""

names = st.text(max_size=20)
int64s = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(width=32, allow_nan=False)
binaries = st.binary(max_size=200)
feature = st.one_of(
    st.builds(lambda v: ("bytes_list", v), st.lists(binaries, max_size=5)),
    st.builds(lambda v: ("int64_list", v), st.lists(int64s, max_size=60)),
    st.builds(lambda v: ("float_list", v), st.lists(floats, max_size=60)),
)
examples = st.dictionaries(names, feature, max_size=6)


def message(values: dict[str, tuple[str, list[Any]]]) -> bytes:
    """Serialize an Example with TensorFlow's own class."""
    example = tf.train.Example()
    for name, (kind, items) in values.items():
        getattr(example.features.feature[name], kind).SetInParent()
        getattr(example.features.feature[name], kind).value.extend(items)
    return bytes(example.SerializeToString())


def plain(values: dict[str, Any]) -> dict[str, list[Any]]:
    """Return parsed values as lists."""
    return {name: np.asarray(value, object).tolist() for name, value in values.items()}


def context(data: bytes) -> dict[str, Any]:
    """Return the features of an Example."""
    return parse_sequence(data)[0]


def through_parts(data: bytes) -> dict[str, list[Any]]:
    """Read every feature by its part alone, from the place that the part gives."""
    base = 7
    stored, found = bytes(base) + data, {}
    for name, part in locate(data, base=base).items():
        span = stored[part.offset : part.offset + part.length]
        assert span == part.data
        if part.kind == "bytes":
            whole = stored[part.offset - part.prefix_length : part.offset + part.length]
            assert decode_list("bytes_list", whole) == [span]
            found[name] = [span]
        else:
            found[name] = decode_list(part.kind, span)
    return plain(found)


@given(values=examples)
def test_equals_tensorflow_on_generated_messages(
    values: dict[str, tuple[str, list[Any]]],
) -> None:
    data = message(values)
    expected = tensorflow_values(data)
    assert through_parts(data) == expected


def test_parsed_values_have_their_numpy_types() -> None:
    values, _ = parse_sequence(
        encode({"i": [1, -1], "f": [0.1], "b": b"x", "t": "é", "flag": [True, False]})
    )
    assert values["i"].dtype == np.int64
    assert values["f"].dtype == np.float32
    assert values["t"] == ["é".encode()]
    assert values["flag"].tolist() == [1, 0]


def odd_varint(rng: random.Random, value: int) -> bytes:
    """Encode a varint, at times longer than need be."""
    out = bytearray(varint(value))
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        if len(out) < 10:
            out[-1] |= 0x80
            out.append(0)
    return bytes(out)


def odd_field(rng: random.Random, number: int, payload: bytes) -> bytes:
    """Encode a length-delimited field."""
    return odd_varint(rng, number << 3 | 2) + odd_varint(rng, len(payload)) + payload


def unknown_field(rng: random.Random) -> bytes:
    """Encode a field that no Example has, of any wire type."""
    number = rng.randrange(4, 1000)
    bodies = [
        varint(number << 3) + varint(rng.getrandbits(40)),
        varint(number << 3 | 1) + rng.randbytes(8),
        varint(number << 3 | 2) + varint(3) + rng.randbytes(3),
        varint(number << 3 | 5) + rng.randbytes(4),
    ]
    return rng.choice(bodies)


def odd_message(rng: random.Random, *fields: bytes) -> bytes:
    """Join fields in any order, with unknown fields between them, but none where all would be."""
    others = rng.choice((0, 0, 1, 2)) if fields else 0
    pieces = list(fields) + [unknown_field(rng) for _ in range(others)]
    rng.shuffle(pieces)
    return b"".join(pieces)


def odd_list(rng: random.Random, kind: int) -> bytes:
    """Encode a list message, packed, unpacked or both."""
    count = rng.randrange(4)
    if kind == 1:
        return odd_message(rng, *[odd_field(rng, 1, rng.randbytes(3)) for _ in range(count)])
    if kind == 2:
        packed = odd_field(rng, 1, np.float32(rng.sample(range(99), count)).tobytes())
        return odd_message(rng, packed, *[b"\x0d" + np.float32(n).tobytes() for n in range(count)])
    packed = odd_field(rng, 1, b"".join(odd_varint(rng, rng.getrandbits(64)) for _ in range(count)))
    return odd_message(rng, packed, *[b"\x08" + odd_varint(rng, n) for n in range(count)])


def odd_feature(rng: random.Random) -> bytes:
    """Encode a Feature of no list, one list, or several lists."""
    kinds = [rng.choice((1, 2, 3)) for _ in range(rng.choice((0, 1, 1, 1, 2, 3)))]
    return odd_message(rng, *[odd_field(rng, kind, odd_list(rng, kind)) for kind in kinds])


def odd_example(rng: random.Random) -> bytes:
    """Encode an Example in ways that proto3 allows and no writer uses."""
    maps = []
    for _ in range(rng.choice((1, 1, 2))):
        entries = []
        for _ in range(rng.randrange(4)):
            name = odd_field(rng, 1, rng.choice((b"a", b"b", b"", "é".encode())))
            value = odd_field(rng, 2, odd_feature(rng))
            twice = odd_field(rng, 2, odd_feature(rng)) if rng.random() < 0.1 else b""
            entry = [piece for piece in (name, value, twice) if rng.random() < 0.9]
            rng.shuffle(entry)
            entries.append(odd_field(rng, 1, b"".join(entry)))
        maps.append(odd_field(rng, 1, odd_message(rng, *entries)))
    return odd_message(rng, *maps)


def has_unknown_in_map_entry(data: bytes) -> bool:
    """Return whether upb, the parser below TensorFlow's Python class, drops from a message a whole
    feature.

    Protocol Buffers in C++ pass over the unknown field alone, and so does this library.
    """
    try:
        return any(
            field[:2] not in ((1, 2), (2, 2))
            for top in fields(data, 0, len(data))
            if top[:2] == (1, 2)
            for entry in fields(data, *top[2:])
            if entry[:2] == (1, 2)
            for field in fields(data, *entry[2:])
        )
    except WireError:
        return False


def test_equals_tensorflow_on_odd_messages() -> None:
    split = whole = 0
    for seed in range(3000):
        data = odd_example(random.Random(seed))
        expected = tensorflow_values(data)
        try:
            assert through_parts(data) == expected, (seed, data.hex())
            whole += 1
        except DataCorruptionError as error:
            is_empty = not expected and "no feature" in error.problem
            if not is_empty and "several lists" not in error.problem:
                raise
            split += 1
    assert whole > 1000
    assert split > 100


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Change, drop or add a few bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(out) + 1)
        out[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
    return bytes(out)


def test_broken_messages_are_accepted_where_tensorflow_accepts() -> None:
    """Mutated messages are read as TensorFlow reads them, or refused where it refuses them."""
    agreed = 0
    for seed in range(3000):
        rng = random.Random(seed)
        usual = message({"image": ("bytes_list", [b"abc"]), "x": ("int64_list", [5, 1 << 40])})
        data = mutated(rng, usual if seed % 2 else odd_example(rng))
        if has_unknown_in_map_entry(data):
            continue
        try:
            expected: Any = sorted(tensorflow_values(data).items())
        except DecodeError:
            expected = None
        try:
            found: Any = sorted(through_parts(data).items())
        except DataCorruptionError as error:
            if READ_BY_TENSORFLOW.search(error.problem):
                continue
            found = None
        same = repr(found) == repr(expected)  # as text, for NaN is not equal to itself
        assert same, (seed, data.hex(), found, expected)
        agreed += expected is not None
    assert agreed > 150


def test_canonical_ranges_equal_any_layout_ranges() -> None:
    taken = 0
    for seed in range(2000):
        rng = random.Random(seed)
        data = message({"image": ("bytes_list", [rng.randbytes(200)]), "x": ("int64_list", [5])})
        data = mutated(rng, data) if seed % 4 else data
        found = _features.canonical_ranges(data)
        if found is not None:
            taken += 1
            try:
                expected = _features.any_layout_ranges(data)
            except WireError:  # in the numbers, which are looked at later on the fast path
                with pytest.raises(DataCorruptionError):
                    locate(data)
            else:
                assert found == expected, data.hex()
    assert taken > 500


def entry(name: bytes, kind: int, payload: bytes) -> bytes:
    """Serialize an Example of one feature with one packed value."""
    value = length_delimited(0x12, length_delimited(kind, length_delimited(0x0A, payload)))
    return length_delimited(0x0A, length_delimited(0x0A, length_delimited(0x0A, name) + value))


def test_last_of_two_equal_features_wins_and_both_are_checked() -> None:
    one, two, broken = (entry(b"x", 0x1A, payload) for payload in (b"\x01", b"\x02", b"\xff"))
    merged = length_delimited(0x0A, one[2:] + two[2:])
    assert tensorflow_values(merged) == through_parts(merged) == {"x": [2]}
    merged = length_delimited(0x0A, broken[2:] + two[2:])
    with pytest.raises(DecodeError):
        tensorflow_values(merged)
    for read in (locate, parse_sequence):
        with pytest.raises(DataCorruptionError):
            read(merged)


@given(values=st.lists(st.integers(0, 2**64 - 1), max_size=300))
def test_vectorized_varints_equal_scalar_varints(values: list[int]) -> None:
    data = b"".join(map(varint, values))
    assert read_varints(data).tolist() == values


@pytest.mark.parametrize("read", [read_varint, read_varint32])
def test_varints_end_inside_their_message(read: Callable[..., object]) -> None:
    assert read(b"\x80\x01", 0, 2) == (128, 2)
    for data, end in ((b"\x80\x01", 1), (b"\x80", 1), (b"\x01", 0), (b"", 0)):
        with pytest.raises(WireError):
            read(data, 0, end)


def test_varints_are_decoded_across_chunk_boundaries() -> None:
    mixed = [(n * 7919) % (1 << (n % 64 + 1)) for n in range(30_000)]
    for values in (mixed, [1] + [300] * 40_000):  # a chunk ends within a value
        assert read_varints(b"".join(map(varint, values))).tolist() == values


@pytest.mark.parametrize("size", [11, 40, 70_000])
def test_unterminated_varint_is_refused(size: int) -> None:
    with pytest.raises(WireError):
        read_varint(b"\xff" * size, 0, size)
    with pytest.raises(WireError):
        read_varints(b"\xff" * size)
    with pytest.raises(WireError):
        read_varints(b"\x01" * size + b"\xff")
    bad = length_delimited(0x0A, b"\x01" * size + b"\xff" * 10 + b"\x01")
    with pytest.raises(DataCorruptionError):
        decode_list("int64_list", bad)


def packed(numbers: bytes) -> bytes:
    """Serialize a list of numbers as all writers do."""
    return length_delimited(0x0A, numbers)


def unpacked(numbers: bytes) -> bytes:
    """Serialize a float list with a tag before each number."""
    return b"".join(b"\x0d" + numbers[at : at + 4] for at in range(0, len(numbers), 4))


LAYOUTS = (packed, unpacked, lambda numbers: b"\x78\x00" + packed(numbers))
packed_floats = st.lists(floats, max_size=40).map(lambda values: np.float32(values).tobytes())
packed_integers = st.lists(st.integers(0, 2**64 - 1), max_size=40).map(
    lambda values: b"".join(map(varint, values))
)


@given(
    kind=st.sampled_from(("float_list", "int64_list")),
    lists=st.lists(
        st.one_of(packed_floats, packed_integers, st.binary(max_size=160)), min_size=1, max_size=4
    ),
    same=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
    flip=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 255)),
)
def test_lists_decoded_together_equal_lists_decoded_alone(
    kind: str,
    lists: list[bytes],
    same: bool,
    layout: Callable[[bytes], bytes],
    flip: tuple[int, int, int] | None,
) -> None:
    """For canonical and odd messages, whole numbers and others, and with one byte changed."""
    messages = [layout(lists[0] if same else numbers) for numbers in lists]
    if flip is not None:
        number, at, mask = flip
        for item in messages[number : number + 1]:
            changed = bytes(byte ^ mask for byte in item[at : at + 1])
            messages[number] = item[:at] + changed + item[at + 1 :]

    def outcome(decode: Callable[[list[bytes]], Any]) -> Any:
        try:
            return [(array.dtype, array.tobytes()) for array in decode(messages)]
        except DataCorruptionError as error:
            return str(error)

    one_by_one = outcome(lambda items: [decode_list(kind, item) for item in items])
    assert outcome(lambda items: list(decode_lists(kind, items))) == one_by_one


def test_equal_length_lists_become_rows_of_one_writable_array() -> None:
    for kind, values in (("float_list", np.float32([[0, 2], [1, 2]])), ("int64_list", [[7, -1]])):
        encoded = [encode({"x": np.array(row)}) for row in values]
        lists = [part.data for data in encoded for part in locate(data).values()]
        rows = decode_lists(kind, lists)
        assert isinstance(rows, np.ndarray)
        assert rows.tolist() == np.array(values).tolist()
        assert rows.flags.writeable
    assert [row.tolist() for row in decode_lists("int64_list", [packed(b"\1\2"), b""])] == [
        [1, 2],
        [],
    ]


def test_locate_refuses_truncated_packed_numbers() -> None:
    for kind, payload in ((0x12, b"abc"), (0x1A, b"\x01\xff"), (0x1A, b"\xff" * 11 + b"\x01")):
        for read in (locate, parse_sequence):
            with pytest.raises(DataCorruptionError):
                read(entry(b"x", kind, payload))


@given(values=examples)
def test_tensorflow_reads_encoded_features(
    values: dict[str, tuple[str, list[Any]]],
) -> None:
    typed = {"bytes_list": object, "int64_list": np.int64, "float_list": np.float32}
    given_values = {name: np.array(v, typed[kind]) for name, (kind, v) in values.items()}
    data = encode(given_values)
    assert tensorflow_values(data) == {name: v for name, (_, v) in values.items()}
    assert encode(dict(reversed(given_values.items()))) == data


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, "must hold bytes, str, integers or floats, got None"),
    ([b"a", 1], TypeError, "must hold values of one type, not also 1"),
    ([1, "a"], TypeError, "must hold bytes, str, integers or floats"),
    ([], ValueError, "is empty"),
    (np.zeros((2, 2)), ValueError, "must be one-dimensional"),
    (1 << 63, ValueError, "must fit into int64"),
    ([1 << 63, -1], ValueError, "must fit into int64"),
    (1 << 70, ValueError, "must fit into int64, got 1180591620717411303424"),
    ([5, -(1 << 70)], ValueError, "must fit into int64, got -1180591620717411303424"),
    (np.uint64([5, 1 << 63]), ValueError, "must fit into int64, got 9223372036854775808"),
    ([1 << 64, np.int64(1)], ValueError, "must fit into int64, got 18446744073709551616"),
    (np.array([5, 6], object), TypeError, "must hold bytes, str, integers or floats"),
    ([1e300], ValueError, "must fit into float32, got 1e"),
]


def test_encode_refuses_values_that_are_no_feature() -> None:
    for value, kind, word in REFUSED:
        with pytest.raises(kind, match=f"'x' {word}"):
            encode({"x": value})
    with pytest.raises(ValueError, match="'bytes'"):
        decode_list("bytes", b"")


@pytest.mark.parametrize("read", [locate, context])
def test_fault_79_number_of_features_is_limited(read: Callable[[bytes], Any]) -> None:
    """Each takes forty times its bytes, in the usual layout and in any other."""
    features = {f"{n}": n for n in range(LIMITS.features + 1)}
    unusual = b"\x78\x00"  # an unknown field, which is passed over
    fewer = encode(dict(list(features.items())[1:]))
    for tail in (b"", unusual):
        assert len(read(fewer + tail)) == LIMITS.features
        with pytest.raises(DataCorruptionError, match="more than 16384 features"):
            read(encode(features) + tail)
    lists = length_delimited(0x12, b"\x1a\x00" * 2)
    entry = length_delimited(0x0A, length_delimited(0x0A, b"x") + lists)
    with pytest.raises(DataCorruptionError, match="has several lists"):
        read(length_delimited(0x0A, entry))
    steps = [length_delimited(0x0A, length_delimited(0x0A, name.encode())) for name in features]
    with pytest.raises(DataCorruptionError, match="more than 16384 features or lists"):
        parse_sequence(length_delimited(0x12, b"".join(steps)))
