"""Bytes that are no Examples: other messages, and other files, are named and never read as data."""

import gzip
import random
from pathlib import Path

import pytest
from support.foreign import FOREIGN, sub
from support.inside import TarWriter, TFRecordWriter, encode
from support.shards import write_tfrecord

from twinfeed.loaders import (
    DataCorruptionError,
    DecodeExample,
    Feed,
    LoaderError,
    Reader,
    build_index,
    pack,
    verify,
)
from twinfeed.samplers import ExactOnceBatchSampler


def shard(path: Path, *records: bytes) -> Path:
    with TFRecordWriter(path) as writer:
        for record in records:
            writer.write(record)
    return path


@pytest.mark.parametrize("kind", FOREIGN)
def test_fault_115_other_messages_are_refused_as_examples(tmp_path: Path, kind: str) -> None:
    """Not for `index`, `verify` or `pack`; as raw bytes they are what they were."""
    records = [FOREIGN[kind](random.Random(n)) for n in range(20)]
    path = shard(tmp_path / "a.tfrecord", encode({"x": 1}), *records)
    assert [bad.record for bad in verify(path).findings] == [*range(1, 21)]
    with pytest.raises(DataCorruptionError, match="--raw") as caught:
        build_index(path, tmp_path / "a.index")
    assert caught.value.record == 1
    (tmp_path / "a.gz").write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(DataCorruptionError, match="--raw"):
        pack(tmp_path / "a.gz", tmp_path / "out")
    path = shard(tmp_path / "a.tfrecord", *records)
    with Reader(build_index(path, tmp_path / "a.index", example=False)) as reader:
        assert reader.read(range(20)) == {"data": records}


@pytest.mark.parametrize("kind", FOREIGN)
def test_fault_116_decode_example_refuses_other_messages(kind: str) -> None:
    for n in range(50):
        record = FOREIGN[kind](random.Random(n))
        with pytest.raises(DataCorruptionError, match=r"Example or SequenceExample.*\n.*\n.*own"):
            DecodeExample()({"data": record})


def test_fault_6_empty_record_is_read_as_record(tmp_path: Path) -> None:
    """It is a record, and what it lacks is said."""
    shard = write_tfrecord(tmp_path / "a.tfrecord", [{}, {"x": b"1"}])
    index = build_index(shard, tmp_path / "x.index")
    assert len(index) == 2
    with Reader(index) as reader:
        assert reader.read([0]) == {"x": [None]}
    feed = Feed(index, ExactOnceBatchSampler(2, batch_size=2), missing="late")
    with pytest.raises(LoaderError, match=r"record 0 .* lacks .*'x'"):
        feed[0, 0]


def test_empty_examples_are_read_beside_others(tmp_path: Path) -> None:
    """No bytes, an empty map, and a feature without a list, as writers write a missing value."""
    nothing = [b"", b"\x0a\x00", sub(1, sub(1, sub(1, b"x"), sub(2)))]
    path = shard(tmp_path / "a.tfrecord", encode({"x": 1}), *nothing)
    assert len(build_index(path, tmp_path / "a.index")) == 4
    lists = [b"\x0a\x00\x12\x00", sub(2, sub(1, sub(1, b"x"), sub(2)))]
    assert [DecodeExample()({"data": data}) for data in (*nothing, *lists)] == [{}] * 4 + [
        {"x": []}
    ]
    path = shard(tmp_path / "b.tfrecord", *nothing)
    with pytest.raises(ValueError, match=r"no field and no label.*--raw"):
        build_index(path, tmp_path / "b.index")


def test_names_with_control_characters_need_usual_layout(
    tmp_path: Path,
) -> None:
    """In another layout they are parts of another message, unlike the mark that begins a text."""
    unknown = b"\x78\x00"
    for name, tail in (("\n\x05query", b""), ("\ufeffid", unknown), ("\ufeffid", b"")):
        path = shard(tmp_path / "a.tfrecord", encode({name: 1}) + tail)
        assert list(build_index(path, tmp_path / "a.index").columns) == [name]
    path = shard(tmp_path / "a.tfrecord", encode({"\n\x05query": 1}) + unknown)
    with pytest.raises(DataCorruptionError, match=r"not printable: '\\n"):
        build_index(path, tmp_path / "b.index")


def test_tar_of_version_7_is_known_by_checksum(tmp_path: Path) -> None:
    """Whatever it is called. `index`, `pack` and the error of a TFRecord know it."""
    with TarWriter(tmp_path / "a.tar") as writer:
        writer.write("1", {"txt": b"one"})
    data = bytearray((tmp_path / "a.tar").read_bytes())
    data[257:265], data[148:156] = bytes(8), b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    (tmp_path / "a").write_bytes(data)
    packed = pack(tmp_path / "a", tmp_path / "out", container="tar")["data"]
    for index in (packed, build_index(tmp_path / "a", tmp_path / "a.index")):
        with Reader(index) as reader:
            assert (index.keys([0]), reader.read([0])) == (["1"], {"txt": [b"one"]})
    with pytest.raises(DataCorruptionError, match="a tar archive"):
        build_index(tmp_path / "a", tmp_path / "b.index", container="tfrecord")
