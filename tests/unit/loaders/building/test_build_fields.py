"""Fields and columns of an index, and records that lack some."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.shards import tfrecords, write_tar, write_tfrecord

from twinfeed.loaders import (
    DataCorruptionError,
    Reader,
    build_index,
)
from twinfeed.loaders.formats.example import encode, parse_sequence
from twinfeed.loaders.formats.tfrecord import TFRecordWriter


def test_raw_records_have_one_field(tmp_path: Path) -> None:
    (shard,) = tfrecords(tmp_path, shards=1)
    index = build_index(shard, tmp_path / "x.index", example=False)
    with Reader(index) as reader:
        (data,) = reader.read([3])["data"]
    assert parse_sequence(data)[0]["label"].tolist() == [3]  # type: ignore[union-attr]


@pytest.mark.frameworks
def test_sequence_examples_are_refused_unless_raw(tmp_path: Path) -> None:
    import tensorflow as tf

    frame = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"..."]))
    message = tf.train.SequenceExample()
    message.feature_lists.feature_list["frames"].feature.extend([frame, frame])
    message.context.feature["id"].int64_list.value.append(7)
    shard = tmp_path / "a.tfrecord"
    with TFRecordWriter(shard) as writer:
        writer.write(encode({"id": 7}))
        writer.write(message.SerializeToString())
    with pytest.raises(DataCorruptionError, match=r"it may be a tf\.train\.SequenceEx") as caught:
        build_index(shard, tmp_path / "x.index")
    assert (caught.value.path, caught.value.record) == (str(shard), 1)
    assert "as raw bytes, use example=False" in str(caught.value)
    with Reader(build_index(shard, tmp_path / "x.index", example=False)) as reader:
        assert reader.read([1])["data"] == [message.SerializeToString()]


def test_field_may_join_several_extensions(tmp_path: Path) -> None:
    samples = [("a", {"jpg": b"1"}), ("b", {"png": b"2"}), ("c", {"jpeg": b"3", "png": b"4"})]
    write_tar(tmp_path / "a.tar", samples)
    fields = {"image": "jpg;jpeg;png"}
    index = build_index(tmp_path / "a.tar", tmp_path / "x.index", fields=fields)
    with Reader(index) as reader:
        assert reader.read([0, 1, 2]) == {"image": [b"1", b"2", b"3"]}


def test_single_value_features_join_a_list_field(tmp_path: Path) -> None:
    """Within a shard, and between shards."""
    one, two = {"caption": [b"a"]}, {"caption": [b"b", b"c"]}
    write_tfrecord(tmp_path / "0.tfrecord", [one, two])
    write_tfrecord(tmp_path / "1.tfrecord", [one])
    index = build_index(tmp_path / "*.tfrecord", tmp_path / "x.index")
    assert index.fields["caption"].kind == "bytes_list"
    with Reader(index) as reader:
        assert reader.read([2, 1, 0])["caption"] == [[b"a"], [b"b", b"c"], [b"a"]]


def test_small_features_become_columns_and_ragged_ones_fields(tmp_path: Path) -> None:
    samples = [
        {"box": [0.0, 1.0, float(n), 2.0], "id": n, "tokens": np.arange(n), "wide": [0.5] * 40}
        for n in range(4)
    ]
    write_tfrecord(tmp_path / "0.tfrecord", samples)
    index = build_index(tmp_path / "0.tfrecord", tmp_path / "x.index")
    assert list(index.columns) == ["box", "id"]
    assert not index.has_labels
    assert index.columns["box"].dtype == np.float32
    assert index.columns["box"][:, 2].tolist() == [0, 1, 2, 3]
    with Reader(index) as reader:
        got = reader.read([3, 0], ["tokens", "wide", "id"])
    assert [tokens.tolist() for tokens in got["tokens"]] == [[0, 1, 2], []]
    assert got["wide"][0].tolist() == [0.5] * 40
    assert got["id"] == [3, 0]


def test_records_without_a_field_are_skipped_or_empty(tmp_path: Path) -> None:
    samples = [("a", {"jpg": b"1", "txt": b"x"}), ("b", {"jpg": b"2"})]
    shard = write_tar(tmp_path / "a.tar", samples)
    path = tmp_path / "x.index"
    fields = ["jpg", "txt"]
    index = build_index(shard, path, fields=fields, missing="skip")
    assert index.keys(range(len(index))) == ["a"]
    assert index.options.left_out == 1
    index = build_index(shard, path, fields=fields, missing="empty")
    with Reader(index) as reader:
        assert reader.read([1, 0]) == {"jpg": [b"2", b"1"], "txt": [None, b"x"]}


def test_field_missing_from_whole_shard_may_be_empty(tmp_path: Path) -> None:
    samples = [("a", {"jpg": b"1"}), ("b", {"jpg": b"2", "txt": b"x"})]
    shards = [write_tar(tmp_path / "a.tar", samples), write_tar(tmp_path / "b.tar", samples[:1])]
    fields = ["jpg", "txt"]
    assert len(build_index(shards, tmp_path / "x.index", fields=fields, missing="empty")) == 3


def test_keys_come_from_a_feature(tmp_path: Path) -> None:
    index = build_index(tfrecords(tmp_path, shards=1), tmp_path / "x.index", key="key")
    assert index.keys([3, 0]) == ["k3", "k0"]
    assert "key" not in index.fields


def test_named_field_is_indexed_where_there_are_too_many_fields(tmp_path: Path) -> None:
    samples = [("a", {f"v{n}.txt": b"" for n in range(257)})]
    write_tar(tmp_path / "a.tar", samples)
    assert build_index(tmp_path / "a.tar", tmp_path / "x.index", fields=["v3.txt"])
