"""TFRecord framing: equal to TensorFlow's in both directions, in one bounded pass."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from support.formats import tensorflow_records, write_records

from twinfeed.loaders.formats import tfrecord
from twinfeed.loaders.formats.records import Record
from twinfeed.loaders.formats.tfrecord import scan
from twinfeed.loaders.support.checksum import crc32c, masked_crc32c

records_of_any_size = st.lists(st.binary(max_size=300), max_size=8)


def raw(path: Path) -> list[Record]:
    """Scan a shard of raw records."""
    return list(scan(path, example=False))


@settings(max_examples=30)
@given(records=records_of_any_size)
def test_reads_what_tensorflow_writes(
    records: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("tf") / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    assert [record.fields["data"].data for record in raw(path)] == records


@settings(max_examples=30)
@given(records=records_of_any_size)
def test_writes_same_bytes_as_tensorflow(
    records: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tf")
    ours = write_records(folder / "ours", *records)
    with tf.io.TFRecordWriter(str(folder / "theirs")) as writer:
        for record in records:
            writer.write(record)
    assert ours == (folder / "theirs").read_bytes()
    assert tensorflow_records(folder / "ours") == records


def test_records_cover_the_shard_and_offsets_are_right(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    shard = write_records(path, b"one", b"", b"three" * 1000)
    found = raw(path)
    ends = [record.offset + record.length for record in found]
    assert [0, *ends] == [*(record.offset for record in found), len(shard)]
    for record in found:
        part = record.fields["data"]
        assert shard[part.offset : part.offset + part.length] == part.data
        stop = record.offset + record.length
        whole = shard[record.offset : record.offset + 12] + shard[stop - 4 : stop]
        assert record.header == whole
    assert [record.number for record in found] == [0, 1, 2]


def test_records_longer_than_buffer_are_read(tmp_path: Path) -> None:
    data = [bytes([n]) * size for n, size in enumerate((3_000_000, 5, 1 << 20, (1 << 20) - 16))]
    write_records(tmp_path / "a", *data)
    assert [record.fields["data"].data for record in raw(tmp_path / "a")] == data


def test_memory_is_bounded_by_longest_record(tmp_path: Path) -> None:
    write_records(tmp_path / "a", *[bytes(100_000)] * 500)
    tracemalloc.start()
    try:
        assert sum(1 for _ in scan(tmp_path / "a", example=False)) == 500
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * tfrecord.CHUNK_BYTES


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_checksum_accepts_any_buffer(kind: type) -> None:
    assert crc32c(kind(b"123456789")) == 0xE3069283
    assert masked_crc32c(kind(b"")) == 0xA282EAD8
