"""Records that are located together: the same records, errors and index as by the parser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.formats import write_records

from twinfeed.loaders import DataCorruptionError, FromFolder, FromJson, LoaderError, build_index
from twinfeed.loaders.formats import tfrecord
from twinfeed.loaders.formats.example import encode
from twinfeed.loaders.formats.records import RecordChunk

int64s = st.integers(-(2**63), 2**63 - 1)
labels = st.sampled_from([b"cat", b"dog", b"", b"\xff", b'{"a": "cat"}', b'{"a": 7}', b"7"])
VALUES = {
    "image": st.binary(max_size=300),
    "label": labels,
    "number": st.integers(0, 200) | int64s,
    "numbers": st.lists(int64s, min_size=1, max_size=3).map(np.array),
    "many": st.integers(0, 30).map(lambda n: np.arange(n) << n),
    "box": st.lists(st.floats(width=32), min_size=1, max_size=4),
    "words": st.lists(st.binary(max_size=3), min_size=1, max_size=2),
    "é": st.just(1.5),
}
layouts = st.lists(st.sampled_from(sorted(VALUES)), min_size=1, unique=True)
MUTATIONS = st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=2)), max_size=2)


@st.composite
def messages(draw: st.DrawFn) -> list[bytes]:
    """Draw Examples of one layout or of several, some with other bytes in a few places."""
    found = []
    for layout in draw(st.lists(layouts, min_size=1, max_size=2)):
        values = VALUES | ({"image": VALUES["number"]} if draw(st.booleans()) else {})
        samples = st.fixed_dictionaries({name: values[name] for name in layout})
        found += map(encode, draw(st.lists(samples, min_size=1, max_size=6)))
    if draw(st.booleans()):
        number = draw(st.integers(0, len(found) - 1))
        for position, new in draw(MUTATIONS):
            found[number] = found[number][:position] + new + found[number][position + 1 :]
    return found


@pytest.fixture(autouse=True, scope="module")
def chunks_of_few_records() -> Iterator[None]:
    """Have few records located together, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfrecord, "FEW_RECORDS", 1)
        yield


@contextmanager
def one_by_one() -> Iterator[None]:
    """Have the parser locate every record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfrecord, "_chunk_fields", lambda chunk, example: None)
        yield


@contextmanager
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfrecord, "CHUNK_RECORDS", 3)
        patch.setattr(tfrecord, "CHUNK_BYTES", 2000)
        yield


def scanned(path: Path) -> list[Any]:
    """Everything that a scan gives: records, errors of records, and the last error."""
    found: list[Any] = []
    try:
        found.extend(tfrecord.scan(path, on_bad=lambda error: found.append(str(error))))
    except DataCorruptionError as error:
        found.append((type(error), str(error), error.offset, error.record))
    return found


def indexed(path: Path, options: dict[str, Any]) -> dict[str, bytes] | str:
    """Every file of the index of a shard, or the error."""
    out = path.with_name("x.index")
    try:
        build_index(path, out, **options)
    except (LoaderError, ValueError, KeyError) as error:
        return f"{type(error)} {error}"
    return {file.name: file.read_bytes() for file in out.rglob("*") if file.is_file()}


@settings(max_examples=60)
@given(messages=messages(), damage=st.none() | st.tuples(st.integers(0), st.integers(1, 255)))
def test_chunk_gives_same_records_and_errors_as_parser(
    messages: list[bytes],
    damage: tuple[int, int] | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("a") / "a.tfrecord"
    data = bytearray(write_records(path, *messages))
    if damage is not None:
        data[damage[0] % len(data)] ^= damage[1]
        path.write_bytes(data)
    found = scanned(path)
    with small_chunks():
        assert repr(scanned(path)) == repr(found)
    with one_by_one():
        assert repr(scanned(path)) == repr(found)


WHOLE = encode({"a": bytes(20)})
CUT = WHOLE[:1] + bytes([WHOLE[1] - 3]) + WHOLE[2:-3]


def test_feature_that_ends_after_its_record_is_an_error(tmp_path: Path) -> None:
    write_records(tmp_path / "a", CUT, CUT)
    first, second = scanned(tmp_path / "a")
    assert "ends 3 bytes after its message" in first
    assert "record: 1" in second


@pytest.mark.parametrize("changed", [slice(1, 2), slice(0, 3)])
def test_chunk_equals_parser_for_any_changed_byte(changed: slice, tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    values = {"b": b"xy", "bb": 300, "c": np.arange(3) << 40, "f": [0.5, 2.5], "xy": b""}
    message = encode(values)
    for position, byte in enumerate(message):
        for new in {0, 10, 128, 255, byte ^ 1}:
            other = message[:position] + bytes([new]) + message[position + 1 :]
            messages = [message] * 3
            messages[changed] = [other] * len(messages[changed])
            write_records(path, *messages)
            found = scanned(path)
            with one_by_one():
                assert repr(scanned(path)) == repr(found), (position, new)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"label": "label"},
    {"label": "number", "key": "image"},
    {"label": "label", "missing": "skip", "lists": ["image"]},
    {"label": "number", "background": 3, "fields": {"x": "image;label", "label": "number"}},
    {"label": FromJson("label", "a"), "missing": "skip", "fields": ["many", "numbers"]},
    {"label": FromFolder(), "key": "image", "missing": "empty", "fields": ["box", "image"]},
    {"label": FromFolder(), "fields": ["number", "box"], "missing": "skip"},
    {"label": lambda sample: sample.get("number", 0) and 1},
]


@settings(max_examples=30)
@given(messages=messages(), options=st.sampled_from(OPTIONS))
def test_chunk_gives_same_index_as_parser(
    messages: list[bytes], options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("a") / "a.tfrecord"
    write_records(path, *messages)
    with one_by_one():
        expected = indexed(path, options)
    assert indexed(path, options) == expected
    with small_chunks():
        assert indexed(path, options) == expected


CAT, NONE, OTHER = b'{"a": "cat"}', b"{}", b'{"a": []}'
BY_JSON: dict[str, Any] = {"label": FromJson("json", "a"), "missing": "skip"}
SHARDS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "two kinds of labels": (
        [{"label": 7, "x": b"a"}] * 3 + [{"label": b"\n\x01\x07", "x": b"a"}] * 3,
        {"label": "label"},
        "record 3",
    ),
    "lists": ([{"x": b"abc", "y": b"d", "z": n} for n in range(7)], {"lists": ["x"]}, ""),
    "records without a label": (
        [{"x": bytes(n), "json": CAT if n % 4 else NONE} for n in range(9)],
        BY_JSON,
        "",
    ),
    "records without a field": (
        [{"x": b"a"}] * 4 + [{"y": b"a"}] * 5,
        {"fields": ["x"], "missing": "skip"},
        "",
    ),
    "two kinds after records without a label": (
        [{"x": 1, "json": CAT}] * 3 + [{"x": b"a", "json": text} for text in (NONE, CAT)],
        BY_JSON,
        "bytes in record 4",
    ),
    "two kinds before a bad label": (
        [{"x": 1, "json": CAT}] * 3 + [{"x": b"a", "json": text} for text in (CAT, OTHER)],
        BY_JSON,
        "bytes in record 3",
    ),
    "a bad label": (
        [{"x": b"key", "json": text} for text in (CAT, NONE, CAT, CAT, OTHER)],
        BY_JSON | {"key": "x"},
        "record: 4",
    ),
}


@pytest.mark.parametrize("shard", SHARDS)
def test_unusual_records_give_same_index_as_parser(shard: str, tmp_path: Path) -> None:
    samples, options, words = SHARDS[shard]
    write_records(tmp_path / "a.tfrecord", *map(encode, samples))
    with one_by_one():
        expected = indexed(tmp_path / "a.tfrecord", options)
    assert words in expected if words else isinstance(expected, dict), expected
    with small_chunks():
        assert indexed(tmp_path / "a.tfrecord", options) == expected


def test_records_of_one_layout_are_a_chunk(tmp_path: Path) -> None:
    sample = {"image": bytes(300), "label": 7, "many": np.arange(40.0), "text": "a"}
    write_records(tmp_path / "a", *[encode(sample)] * 9)
    options: dict[str, Any] = {"example": True, "max_record_bytes": 1 << 20, "on_bad": print}
    (chunk,) = tfrecord.scan_chunks(tmp_path / "a", **options)
    assert isinstance(chunk, RecordChunk)
    assert len(chunk.headers) == 9
