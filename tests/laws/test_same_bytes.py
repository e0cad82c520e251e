"""Records read through an index are what TensorFlow and webdataset themselves read, and back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import webdataset as wds
from hypothesis import given, settings
from hypothesis import strategies as st

from twinfeed.loaders import Index, Reader, build_index, pack

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6)
values = st.one_of(
    st.lists(st.binary(max_size=20), min_size=1, max_size=3),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=3),
)


leaking = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
"""webdataset leaves its files to the garbage collector."""


def tf_feature(value: list[Any]) -> Any:
    if isinstance(value[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=value))
    if isinstance(value[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=value))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=value))


def tf_values(example: Any) -> dict[str, list[Any]]:
    """The part of TensorFlow's own message that is compared."""
    out = {}
    for name, feature in example.features.feature.items():
        kind = feature.WhichOneof("kind")
        out[name] = list(getattr(feature, kind).value)
    return out


def index_values(index: Index, record: int) -> dict[str, list[Any]]:
    """What the index and its reader say of one record."""
    out = {name: np.atleast_1d(column[record]).tolist() for name, column in index.columns.items()}
    with Reader(index) as reader:
        for name in index.fields:
            if index.table(name)["length"][record] >= 0:
                (value,) = reader.read([record], [name])[name]
                out[name] = [value] if isinstance(value, bytes) else list(value)
    return {
        name: [v.item() if isinstance(v, np.generic) else v for v in value]
        for name, value in out.items()
    }


@settings(max_examples=25)
@given(
    kinds=st.dictionaries(names, values, min_size=1, max_size=4),
    more=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), max_size=4),
)
def test_examples_written_by_tensorflow_read_the_same(
    kinds: dict[str, list[Any]], more: list[list[bool]]
) -> None:
    """Features of any kind and number of values, missing in some records, repeated in others."""
    rows = [kinds]
    for keep in more:
        row = {}
        for (name, value), kept in zip(kinds.items(), keep, strict=False):
            if kept:
                row[name] = value + value[:1]
        rows.append(row)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/a.tfrecord"
        with tf.io.TFRecordWriter(path) as writer:
            for row in rows:
                features = {name: tf_feature(value) for name, value in row.items()}
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
        index = build_index(path, f"{folder}/x.index")
        records = tf.data.TFRecordDataset(path).as_numpy_iterator()
        want = [tf_values(tf.train.Example.FromString(record)) for record in records]
        assert len(index) == len(want)
        assert [index_values(index, record) for record in range(len(index))] == want


parts = st.dictionaries(
    st.sampled_from(["jpg", "seg.png", "txt", "cls", "x"]), st.binary(max_size=1500), min_size=1
)


@leaking
@settings(max_examples=20)
@given(samples=st.lists(parts, min_size=1, max_size=5), long=st.booleans())
def test_shards_written_by_webdataset_read_the_same(
    samples: list[dict[str, bytes]], long: bool
) -> None:
    """Keys that need a long-name header included."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/a.tar"
        with wds.TarWriter(path) as writer:
            for number, sample in enumerate(samples):
                key = f"{'deep/' * 40 if long else ''}{number:04d}"
                writer.write({"__key__": key} | sample)
        index = build_index(path, f"{folder}/x.index")
        want = list(wds.WebDataset(path, shardshuffle=False, empty_check=False))
        assert index.keys(range(len(index))) == [sample["__key__"] for sample in want]
        for record, sample in enumerate(want):
            held = {name: value for name, value in sample.items() if not name.startswith("__")}
            assert index_values(index, record) == {name: [value] for name, value in held.items()}


@pytest.fixture
def samples() -> list[dict[str, Any]]:
    return [
        {
            "__key__": f"c{n % 3}/{n:03d}",
            "image": b"\x89PNG\r\n\x1a\n" + bytes([n]) * (n * 37),
            "label": n % 3,
            "note": f"née {n}",
        }
        for n in range(25)
    ]


def test_tensorflow_reads_what_is_packed(tmp_path: Path, samples: list[dict[str, Any]]) -> None:
    index = pack(samples, tmp_path, shards=3)["data"]
    paths = [f"{index.root}/{path}" for path in index.shard_paths.tolist()]
    spec = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
        "note": tf.io.FixedLenFeature([], tf.string),
        "key": tf.io.FixedLenFeature([], tf.string),
    }
    dataset = tf.data.TFRecordDataset(paths).map(
        lambda data: tf.io.parse_single_example(data, spec)
    )
    for got, want in zip(dataset.as_numpy_iterator(), samples, strict=True):
        assert got["image"] == want["image"]
        assert got["label"] == want["label"]
        assert got["note"].decode() == want["note"]
        assert got["key"].decode() == want["__key__"]


@leaking
def test_webdataset_reads_what_is_packed(tmp_path: Path, samples: list[dict[str, Any]]) -> None:
    index = pack(samples, tmp_path, container="tar", shards=3)["data"]
    assert len(index.shards) == 3
    dataset = wds.WebDataset(f"{tmp_path}/data-{{00000..00002}}-of-00003.tar", shardshuffle=False)
    for got, want in zip(dataset, samples, strict=True):
        assert got["__key__"] == want["__key__"]
        assert got["png"] == want["image"]
        assert got["cls"] == str(want["label"]).encode()
        assert got["note"].decode() == want["note"]
