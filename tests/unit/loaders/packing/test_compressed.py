"""Compressed shards are converted one after the other, as their writers wrote them."""

import bz2
import gzip
import lzma
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from support.formats import write_records
from support.servers import RangeServer
from support.shards import write_tar, write_tfrecord

from twinfeed.loaders import (
    DataCorruptionError,
    Reader,
    ShardWarning,
    build_index,
    pack,
)
from twinfeed.loaders.command_line import main
from twinfeed.loaders.packing import ShardContainer, _compressed
from twinfeed.loaders.support.limits import Limits

COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zlib": zlib.compress,
}
ROWS: list[dict[str, Any]] = [
    {
        "image/encoded": bytes([n]) * 50,
        "image/class/label": n % 3,
        "box": np.arange(n % 2 + 1, dtype=np.float32),
        "texts": [b"a", b"b"],
    }
    for n in range(20)
]


def tfrecord(path: Path, how: str, rows: list[dict[str, Any]] = ROWS) -> Path:
    plain = write_tfrecord(path.with_name("plain"), rows)
    path.write_bytes(COMPRESSIONS[how](plain.read_bytes()))
    return path


@pytest.mark.parametrize("how", COMPRESSIONS)
def test_compressed_shards_are_packed_unchanged(tmp_path: Path, how: str) -> None:
    """By its first bytes, whatever the name of the file says."""
    index = pack(tfrecord(tmp_path / "a.tfrecord", how), tmp_path / "out")["data"]
    with Reader(index) as reader:
        found = reader.read(range(20))
    assert found["image/encoded"] == [row["image/encoded"] for row in ROWS]
    assert [box.tolist() for box in found["box"]] == [row["box"].tolist() for row in ROWS]
    assert found["texts"] == [row["texts"] for row in ROWS]
    assert index.columns["image/class/label"].tolist() == [n % 3 for n in range(20)]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "data.index",
        "data-00000-of-00001.tfrecord",
    }


@pytest.mark.parametrize("container", ["tar", "tfrecord"])
def test_several_compressed_tars_keep_key_order(tmp_path: Path, container: Any) -> None:
    """A pattern, a list, and the command line; a split, which writes everything twice."""
    for shard in range(2):
        samples = [(f"{shard}{n}", {"jpg": b"x" * n, "cls": b"%d" % n}) for n in range(1, 9)]
        plain = write_tar(tmp_path / f"{shard}.tar", samples)
        (tmp_path / f"{shard}.tar.gz").write_bytes(gzip.compress(plain.read_bytes()))
    pattern, paths = f"{tmp_path}/*.tar.gz", [tmp_path / "0.tar.gz", tmp_path / "1.tar.gz"]
    keys = [f"{shard}{n}" for shard in range(2) for n in range(1, 9)]
    for number, source in enumerate((pattern, paths)):
        index = pack(source, tmp_path / f"out{number}", container=container)["data"]
        assert index.keys(range(16)) == keys
    words = ["pack", *map(str, paths), f"{tmp_path}/cli", "--container", container, "-q"]
    assert main([*words, "--seed", "1", "--split", "a=0.5", "--split", "b=0.5"]) == 0
    split = pack(pattern, tmp_path / "split", seed=1, split={"a": 0.5, "b": 0.5})
    found = [key for index in split.values() for key in index.keys(range(len(index)))]
    assert sorted(found) == keys
    assert len(list((tmp_path / "cli").iterdir())) == 4


@pytest.mark.frameworks
def test_files_written_by_webdataset_and_tensorflow_are_packed(tmp_path: Path) -> None:
    import tensorflow as tf
    import webdataset

    with webdataset.TarWriter(str(tmp_path / "a.tar.gz"), compress=True) as tar:
        for n in range(5):
            tar.write({"__key__": f"{n}", "jpg": b"...", "cls": n, "json": {"n": n}})
    index = pack(tmp_path / "a.tar.gz", tmp_path / "tar", container="tar")["data"]
    assert (len(index), list(index.fields)) == (5, ["cls", "jpg", "json"])
    for kind in ("GZIP", "ZLIB"):
        with tf.io.TFRecordWriter(str(tmp_path / kind), tf.io.TFRecordOptions(kind)) as writer:
            for n in range(5):
                value = tf.train.Feature(int64_list=tf.train.Int64List(value=[n]))
                features = tf.train.Features(feature={"label": value})
                writer.write(tf.train.Example(features=features).SerializeToString())
        index = pack(tmp_path / kind, tmp_path / f"{kind}.out")["data"]
        assert index.labels.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("how", COMPRESSIONS)
def test_fault_28_every_concatenated_stream_is_read(tmp_path: Path, how: str) -> None:
    """Streams follow each other as `cat a.gz b.gz` makes them."""
    compress, path = COMPRESSIONS[how], tmp_path / "a.tfrecord"
    plain = write_tfrecord(tmp_path / "plain", ROWS).read_bytes()
    first, second = compress(plain), compress(plain[: len(plain) // 2])
    rest = compress(plain[len(plain) // 2 :])
    path.write_bytes(first + second + rest + compress(b""))
    with Reader(pack(path, tmp_path / "out")["data"]) as reader:
        found = reader.read(range(40))["image/encoded"]
    assert found == [row["image/encoded"] for row in ROWS] * 2


@pytest.mark.parametrize("zeros", [1, 512, 3 << 20])
def test_zeros_after_a_stream_are_passed_over(tmp_path: Path, zeros: int) -> None:
    """As gzip does: tapes and block devices fill up the last block."""
    path = tfrecord(tmp_path / "a.gz", "gz")
    stream = path.read_bytes()
    path.write_bytes(stream + bytes(zeros) + stream + bytes(zeros))
    assert len(pack(path, tmp_path / "out")["data"]) == 2 * len(ROWS)
    path.write_bytes(stream + bytes(zeros) + b"x")
    with pytest.raises(DataCorruptionError, match="cannot be decompressed"):
        pack(path, tmp_path / "more")


def test_lists_without_bytes_are_packed(tmp_path: Path) -> None:
    """Images without objects, from compressed shards, and from an index, in any order."""
    empty = np.array([], bytes)
    rows = [{"x": b"1", "boxes": empty}, {"x": b"2", "boxes": [b"a"]}, {"x": b"3", "boxes": empty}]
    path = tfrecord(tmp_path / "a.gz", "gz", rows)
    index = pack(path, tmp_path / "one", shards=2)["data"]
    for again in (index, pack(index, tmp_path / "two", seed=1)["data"]):
        with Reader(again) as reader:
            read = reader.read(range(3), ["x", "boxes"])
        boxes = dict(zip(read["x"], read["boxes"], strict=True))
        assert boxes == {b"1": [], b"2": [b"a"], b"3": []}
    with pytest.raises(ValueError, match=r"np.array\(\[\], bytes\)"):
        pack([{"boxes": []}], tmp_path / "user")


def test_lists_of_an_index_stay_lists(tmp_path: Path) -> None:
    """Though each record has one value, which else would be a column, or one text."""
    pack([{"x": b"a", "n": [1], "b": [b"one"]} for _ in range(4)], tmp_path / "a")
    shards, path = tmp_path / "a/*.tfrecord", tmp_path / "a.index"
    index = build_index(shards, path, lists=["n", "b"])
    split = {"one": 0.5, "two": 0.5}
    for again in pack(index, tmp_path / "b", split=split, seed=0).values():
        assert again.fields == index.fields
    assert pack(tmp_path / "a.index", tmp_path / "c")["data"].fields == index.fields


def test_lists_are_lists_in_each_split(tmp_path: Path) -> None:
    """Of an iterable in which one record has two values."""
    rows = ({"x": b"a", "n": [1, 2] if number == 3 else [1]} for number in range(8))
    splits = pack(rows, tmp_path / "a", split={"one": 0.5, "two": 0.5}, seed=0)
    assert [[*index.fields] for index in splits.values()] == [["n", "x"]] * 2


def test_empty_compressed_shard_warns(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    tar = write_tar(tmp_path / "plain", [("1", {"txt": b"one"})]).read_bytes()
    path.write_bytes(gzip.compress(tar))
    for number, nothing in enumerate((b"", gzip.compress(b""))):
        (tmp_path / "b.gz").write_bytes(nothing)
        with pytest.warns(ShardWarning) as heard:
            pack([path, tmp_path / "b.gz"], tmp_path / f"{number}")
        assert any(str(one.message) == f"{tmp_path / 'b.gz'} has no records" for one in heard)


@pytest.mark.filterwarnings("ignore:fields that some")
@pytest.mark.parametrize("container", get_args(ShardContainer))
def test_label_feature_and_members_of_a_tar_are_packed(tmp_path: Path, container: Any) -> None:
    """As they are: an index of the new shards says where labels are."""
    rows = [{"label": n % 3, "x": b"1"} | ({"note": b"a"} if n % 2 else {}) for n in range(6)]
    path = tfrecord(tmp_path / "a.gz", "gz", rows)
    index = pack(path, tmp_path / "out", container=container)["data"]
    assert index.labels.tolist() == [0, 1, 2] * 2
    with Reader(index) as reader:
        assert reader.read([0, 1], ["note"]) == {"note": [None, b"a"]}
    tar = write_tar(tmp_path / "plain.tar", [(f"{n}", {"cls": b"%d" % n}) for n in range(2)])
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(tar.read_bytes()))
    pack(tmp_path / "a.tar.gz", tmp_path / "tar", container=container)
    shards = tmp_path / "tar" / f"*.{container}"
    assert build_index(shards, tmp_path / "x.index", label="cls").labels.tolist() == [0, 1]


def test_records_that_are_no_examples_are_refused(tmp_path: Path) -> None:
    write_records(tmp_path / "plain", b"\x00\xffany bytes")
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress((tmp_path / "plain").read_bytes()))
    with pytest.raises(DataCorruptionError, match=r"example=False \(--raw\)"):
        pack(path, tmp_path / "out")


def test_plain_shards_are_packed_too(tmp_path: Path) -> None:
    write_tfrecord(tmp_path / "a.tfrecord", ROWS)
    for n, source in enumerate((f"{tmp_path}/*.tfrecord", [tmp_path / "a.tfrecord"])):
        assert len(pack(source, tmp_path / f"out{n}")["data"]) == len(ROWS)


def test_compression_at_url_is_detected_by_bytes(tmp_path: Path) -> None:
    """TensorFlow gives a compressed file no other name."""
    tfrecord(tmp_path / "a-00000-of-00001", "gz")
    with RangeServer(tmp_path) as server:
        packed = pack(f"{server.url}/a-00000-of-00001", tmp_path / "out")["data"]
        assert len(packed) == len(ROWS)


CONVERT = """
import resource, sys
from twinfeed.loaders import pack
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pack(sys.argv[1], sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_fault_101_decompression_bomb_does_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 MB of zeros in 100 bytes, no more is written than the limit, and nothing stays."""
    monkeypatch.setattr(_compressed, "LIMITS", Limits(record_bytes=1 << 20))
    with bz2.open(tmp_path / "a.tar.bz2", "wb") as packed:
        for _ in range(64):
            packed.write(bytes(1 << 20))
    with pytest.raises(DataCorruptionError, match="becomes too large") as caught:
        pack(tmp_path / "a.tar.bz2", tmp_path / "out")
    assert int(str(caught.value.found).split()[0]) < 4 << 20
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.tar.bz2"]


def test_memory_does_not_grow_with_shard_size(tmp_path: Path) -> None:
    """64 MB of records in a file of 64 kB take a few MB, as a record of 1 MB does."""
    write_tfrecord(tmp_path / "plain", ({"x": bytes(1 << 20)} for _ in range(64)))
    with gzip.open(tmp_path / "a.gz", "wb") as packed, (tmp_path / "plain").open("rb") as plain:
        shutil.copyfileobj(plain, packed)
    paths = [str(tmp_path / "a.gz"), str(tmp_path / "out")]
    ran = subprocess.run([sys.executable, "-c", CONVERT, *paths], capture_output=True, check=True)
    assert int(ran.stdout) < 32 << 10  # KiB
