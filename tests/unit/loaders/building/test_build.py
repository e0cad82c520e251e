"""Building an index: what ends up in it, from every container and every source of labels."""

from __future__ import annotations

import os
import re
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.refusals import Call, Refused, check_refused
from support.shards import flip, numbered, tars, tfrecords, tree, write_tar, write_tfrecord

from twinfeed.loaders import (
    DataCorruptionError,
    DecodeError,
    FromFile,
    FromFolder,
    FromJson,
    FromTable,
    LoaderError,
    Reader,
    ShardWarning,
    UnsafeContentError,
    build_index,
    open_index,
    pack,
    verify,
)
from twinfeed.loaders.building import _merge, build
from twinfeed.loaders.building.bad_records import BadRecord, read_bad_records
from twinfeed.loaders.building.image_folder import list_images
from twinfeed.loaders.formats import tar, tfrecord
from twinfeed.loaders.formats.example import encode, parse_sequence
from twinfeed.loaders.formats.files import Entry
from twinfeed.loaders.formats.tfrecord import TFRecordWriter
from twinfeed.loaders.index.manifest import MANIFEST
from twinfeed.loaders.index.options import IndexOptions, ReadingOptions
from twinfeed.loaders.support.deletable import mark_deletable


def test_every_record_of_a_tfrecord_set_reads_as_it_was_written(tmp_path: Path) -> None:
    tfrecords(tmp_path)
    index = build_index(tmp_path / "*.tfrecord", tmp_path / "x.index")
    want = numbered(0, 30)
    assert len(index) == 30
    assert index.shard_lengths.tolist() == [10, 10, 10]
    assert index.labels.tolist() == [sample["label"] for sample in want]
    with Reader(index) as reader:
        got = reader.read(range(30))
    assert got["image"] == [sample["image"] for sample in want]
    assert got["key"] == [sample["key"].encode() for sample in want]


def test_every_record_of_a_tar_set_reads_as_it_was_written(tmp_path: Path) -> None:
    index = build_index(tars(tmp_path), tmp_path / "x.index", label="cls")
    assert index.keys(range(30)) == [f"k{n}" for n in range(30)]
    assert index.labels.tolist() == [n % 7 for n in range(30)]
    assert index.classes == ()
    with Reader(index) as reader:
        got = reader.read([29, 0, 7], ["png", "json"])
    assert got["png"] == [f"{n:06d}".encode() * (3 + n % 3) for n in (29, 0, 7)]
    assert list(index.fields) == ["json", "png"]


def test_image_folder_is_indexed_in_place(tmp_path: Path) -> None:
    for name in ("dog/1.png", "cat/1.png", "cat/2.jpg"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / name).write_bytes(name.encode())
    index = build_index(tmp_path / "images", tmp_path / "x.index")
    assert index.container == "files"
    assert index.classes == ("cat", "dog")
    assert index.labels.tolist() == [0, 0, 1]
    assert index.keys([0, 1, 2]) == ["cat/1", "cat/2", "dog/1"]
    with Reader(index) as reader:
        assert reader.read([2, 0])["image"] == [b"dog/1.png", b"cat/1.png"]
    assert verify(index).ok


def test_symlinked_image_folder_is_followed_within_its_root(tmp_path: Path) -> None:
    scratch, home = tmp_path / "scratch", tmp_path / "home"
    (scratch / "photos" / "cat").mkdir(parents=True)
    (scratch / "photos" / "cat" / "1.png").write_bytes(b"...")
    home.mkdir()
    link, path = home / "photos", home / "x.index"
    link.symlink_to(scratch / "photos")
    for built in (build_index(link, path, root=scratch), open_index(path, root=scratch)):
        with Reader(built) as reader:
            assert reader.read([0])["image"] == [b"..."]
    with Reader(open_index(path)) as reader, pytest.raises(UnsafeContentError) as caught:
        reader.read([0])
    assert f"found: {scratch}/photos/cat/1.png" in str(caught.value)
    for root in (None, home):
        with pytest.raises(ValueError, match=f"below the root {home}, not at {scratch}/photos"):
            build_index(link, path, root=root)
    assert verify(link).ok
    build_index(link, scratch / "x.index")
    assert verify(scratch / "x.index").ok  # beside the photos, no root is needed


def test_symlinked_shards_are_followed_beside_the_index(
    tmp_path: Path,
) -> None:
    scratch, home = tmp_path / "scratch", tmp_path / "home"
    scratch.mkdir()
    home.mkdir()
    tars(scratch, shards=2)
    (home / "data").symlink_to(scratch)
    shards = f"{home}/data/*.tar"
    with pytest.raises(UnsafeContentError, match=f"leaves its root(?s:.*)found: {scratch}/"):
        build_index(shards, home / "x.index")
    build_index(shards, scratch / "x.index")
    assert verify(scratch / "x.index").ok
    index = build_index(shards, home / "x.index", root=scratch)
    assert index.shard_paths[0] == sorted(scratch.glob("*.tar"))[0].name
    assert verify(home / "x.index", root=scratch).ok


def test_loose_files_of_one_key_share_a_record(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"image")
    (tmp_path / "a.xml").write_bytes(b"<xml/>")
    entries = [Entry("a", {"image": "a.jpg", "annotation": "a.xml"})]
    index = build_index(entries, tmp_path / "x.index")
    with Reader(index) as reader:
        assert reader.read([0]) == {"annotation": [b"<xml/>"], "image": [b"image"]}


def test_empty_class_folders_warn(tmp_path: Path) -> None:
    for name in ("cat", "dog", ".hidden"):
        (tmp_path / "images" / name).mkdir(parents=True)
    (tmp_path / "images" / "cat" / "1.jpg").write_bytes(b"...")
    with pytest.warns(ShardWarning, match=r"folders without images below .*images \(1: dog\)"):
        build_index(tmp_path / "images", tmp_path / "x.index")


def test_container_follows_file_name_not_folder_name(tmp_path: Path) -> None:
    (tmp_path / "my.tfrecords").mkdir()
    (shard,) = tars(tmp_path / "my.tfrecords", shards=1)
    plain = shard.rename(shard.with_suffix(""))
    assert build_index(plain, tmp_path / "x.index").container == "tar"


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


def test_small_numeric_features_become_columns_and_ragged_ones_fields(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("label", "classes", "numbers"),
    [
        ("cls", (), [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]),
        (FromJson("json", "object.name"), ("name0", "name1", "name2"), [0, 1, 2] * 3 + [0]),
        (FromJson("json", "object.id"), (), list(range(10))),
        (FromTable({f"k{n}": f"t{n % 2}" for n in range(10)}), ("t0", "t1"), [0, 1] * 5),
        (lambda sample: len(sample["png"]), (), [(3 + n % 3) * 6 for n in range(10)]),
        (lambda sample: [np.int64(0), 1][sample["__number__"] % 2], (), [0, 1] * 5),
    ],
)
def test_label_sources_give_classes_and_numbers(
    tmp_path: Path, label: Any, classes: tuple[str, ...], numbers: list[int]
) -> None:
    index = build_index(tars(tmp_path, shards=1), tmp_path / "x.index", label=label)
    assert index.classes == classes
    assert index.labels.tolist() == numbers


def test_record_missing_from_label_table_is_skipped_or_background(
    tmp_path: Path,
) -> None:
    """Over two shards, the second of which the table knows nothing of."""
    shards, out = tars(tmp_path, shards=2, each=5), tmp_path / "x.index"
    table = FromTable({"k1": "b", "k3": "a", "k4": "b"})
    with pytest.warns(ShardWarning, match="1 of 2 shards have no records"):
        index = build_index(shards, out, label=table, missing="skip")
    assert (index.keys(range(3)), index.shard_lengths.tolist()) == (["k1", "k3", "k4"], [3, 0])
    assert (index.columns["label"].tolist(), index.classes) == ([1, 0, 1], ("a", "b"))
    assert index.options.left_out == 7
    with Reader(index) as reader:
        assert reader.read([2, 1], ["png"])["png"] == [b"000004" * 4, b"000003" * 3]
    assert verify(index).ok
    index = build_index(shards, out, label=table, background="none", missing="skip")
    assert index.classes == ("a", "b", "none")
    assert index.columns["label"].tolist() == [2, 1, 2, 0, 1, 2, 2, 2, 2, 2]


def test_loose_files_missing_from_label_table_are_skipped(tmp_path: Path) -> None:
    for n in range(4):
        (tmp_path / f"{n}.png").write_bytes(b"image %d" % n)
    entries = [Entry(str(n), {"image": f"{n}.png"}) for n in range(4)]
    table = FromTable({"1": 7, "3": 5})
    index = build_index(entries, tmp_path / "x.index", label=table, missing="skip")
    with Reader(index) as reader:
        assert reader.read([0, 1]) == {"image": [b"image 1", b"image 3"]}
    assert index.columns["label"].tolist() == [7, 5]
    assert verify(index).ok


def test_labels_come_from_folders_in_tar_keys(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("dog/1", {"jpg": b"1"}), ("cat/1", {"jpg": b"2"})])
    index = build_index(tmp_path / "a.tar", tmp_path / "x.index", label=FromFolder())
    assert index.classes == ("cat", "dog")


FILES = {
    ("class_2.tar", "class_10.tar"): (r"class_(\d+)", (), [10, 2]),
    ("class_02.tar", "class_10.tar"): (r"class_(\d+)", ("02", "10"), [0, 1]),
    ("n01_7.tfrecord", "n02_1.tfrecord", "n01_8.tfrecord"): (
        r"^(n\d+)_",
        ("n01", "n02"),
        [0, 0, 1],
    ),
    ("7.png", "7-b.png", "8.png"): (r"^(?P<name>\d)(?:-b)?", (), [7, 7, 8]),
}


@pytest.mark.parametrize("names", FILES)
def test_labels_come_from_file_names(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Of tar and TFRecord shards and of loose files: all integers, or all names."""
    pattern, classes, labels = FILES[names]
    for name in names:
        path = tmp_path / "class_1" / name  # of the file's own name alone
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".tar":
            write_tar(path, [("class_3", {"txt": b"a"})])
        elif path.suffix == ".tfrecord":
            write_tfrecord(path, [{"x": [1]}])
        else:
            path.write_bytes(b"image")
    loose = names[0].endswith(".png")
    shards = tmp_path / "class_1" if loose else tmp_path / "class_1" / "*.t*"
    index = build_index(shards, tmp_path / "x.index", label=FromFile(pattern))
    assert index.classes == classes
    assert index.labels.tolist() == labels
    assert (index.options.label_from, index.options.label) == ("file", pattern)
    other = FromFile("z(.)")
    with pytest.raises(
        DataCorruptionError, match=r"lacks a label: label=FromFile.* \(--label-file 'z"
    ):
        build_index(shards, tmp_path / "x.index", label=other)
    index = build_index(shards, tmp_path / "x.index", label=other, background=3)
    assert set(index.labels) == {3}


@pytest.mark.parametrize("pattern", [r"\d+", r"(\d)(\d)", "(", "", None, b"(a)", re.compile("(a)")])
def test_from_file_pattern_must_have_one_group(pattern: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^pattern must be a (regular expression: |str with one g)"
    ):
        FromFile(pattern)


def test_label_function_returning_none_gives_background_or_skip(tmp_path: Path) -> None:
    samples = [("a", {"xml": b"<name>dog</name>"}), ("b", {"xml": b""})]
    write_tar(tmp_path / "a.tar", samples)

    def named(sample: dict[str, Any]) -> str | None:
        return "dog" if b"dog" in sample["xml"] else None

    path = tmp_path / "x.index"
    index = build_index(tmp_path / "a.tar", path, label=named, background="background")
    assert index.classes == ("background", "dog")
    assert build_index(tmp_path / "a.tar", path, label=named, missing="skip").keys([0]) == ["a"]


def test_num_classes_counts_names_or_is_largest_label_plus_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.index"
    shard = cls_tar(tmp_path / "a.tar", "1", "5", "3")
    assert build_index(shard, path, label="cls").num_classes == 6
    assert build_index(shard, path).num_classes == 0
    shard = cls_tar(tmp_path / "a.tar", "cat", "dog")
    index = build_index(shard, path, label="cls", classes=["ant", "cat", "dog"])
    assert index.num_classes == 3


def test_labels_are_positions_in_given_classes(tmp_path: Path) -> None:
    write_tfrecord(tmp_path / "0.tfrecord", [{"name": "dog"}, {"name": "cat"}])
    path = tmp_path / "x.index"
    shard = tmp_path / "0.tfrecord"
    index = build_index(shard, path, label="name", classes=["dog", "emu", "cat"])
    assert index.classes == ("dog", "emu", "cat")
    assert index.labels.tolist() == [0, 2]


def test_zero_padded_class_names_stay_names(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("a", {"cls": b"0002"}), ("b", {"cls": b"0010"})])
    index = build_index(tmp_path / "a.tar", tmp_path / "x.index", label="cls")
    assert index.classes == ("0002", "0010")


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
        assert reader.read([1, 0]) == {"jpg": [b"2", b"1"], "txt": [b"", b"x"]}


def test_field_missing_from_whole_shard_may_be_empty(tmp_path: Path) -> None:
    samples = [("a", {"jpg": b"1"}), ("b", {"jpg": b"2", "txt": b"x"})]
    shards = [write_tar(tmp_path / "a.tar", samples), write_tar(tmp_path / "b.tar", samples[:1])]
    fields = ["jpg", "txt"]
    assert len(build_index(shards, tmp_path / "x.index", fields=fields, missing="empty")) == 3


def test_verify_names_missing_loose_file(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    for number in range(3):
        (tmp_path / "x" / f"{number}.png").write_bytes(b"...")
    entries = list_images(tmp_path)
    (tmp_path / "x" / "1.png").unlink()
    (entry,) = verify(entries, root=tmp_path).findings
    assert entry.shard == f"{tmp_path}/x/1.png"


def test_keys_come_from_a_feature(tmp_path: Path) -> None:
    index = build_index(tfrecords(tmp_path, shards=1), tmp_path / "x.index", key="key")
    assert index.keys([3, 0]) == ["k3", "k0"]
    assert "key" not in index.fields


@pytest.mark.parametrize("kind", ["threads", "spawned processes"])
def test_build_with_executor_writes_same_bytes(tmp_path: Path, kind: str) -> None:
    shards = tfrecords(tmp_path)
    build_index(shards, tmp_path / "a.index", label="label")
    pool = (
        ThreadPoolExecutor(2)
        if kind == "threads"
        else ProcessPoolExecutor(2, mp_context=get_context("spawn"))
    )
    with pool as executor:
        build_index(shards, tmp_path / "b.index", label="label", executor=executor)
    assert tree(tmp_path / "a.index") == tree(tmp_path / "b.index")


def test_shard_error_is_raised_while_other_shards_are_scanned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another worker writes may get its final name while the build removes what it made."""
    failed = threading.Event()

    def label(record: dict[str, Any]) -> int:
        if record["__shard__"].endswith("0.tar"):
            raise RuntimeError("no label")
        assert failed.wait(60)
        return 1

    def finish(file: Path) -> bool:
        failed.set()
        while file.exists():
            time.sleep(0.01)
        return True

    monkeypatch.setattr(build, "_is_small_part", finish)
    shards = [write_tar(tmp_path / f"{n}.tar", [("a", {"txt": b"."})]) for n in range(2)]
    with ThreadPoolExecutor(2) as executor, pytest.raises(DecodeError, match="no label"):
        build_index(shards, tmp_path / "x.index", label=label, executor=executor)


def test_index_bytes_do_not_depend_on_folder_or_time(tmp_path: Path) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        build_index(tars(tmp_path / place), tmp_path / place / "x.index", label="cls")
    assert tree(tmp_path / "one" / "x.index") == tree(tmp_path / "two" / "x.index")


@pytest.mark.usefixtures("kept_parts")
def test_kept_parts_are_not_reused_for_a_label_function(tmp_path: Path) -> None:
    """Its code is the same, and what it uses is not."""
    shards = tars(tmp_path, shards=2)
    now = {"label": 1}

    def label(sample: dict[str, Any]) -> int:
        return now["label"]

    flip(shards[1], 0)
    with pytest.raises(DataCorruptionError):
        build_index(shards, tmp_path / "x.index", label=label)
    flip(shards[1], 0)
    assert list((tmp_path / "x.index" / "parts").glob("*.part"))
    now["label"] = 2
    index = build_index(shards, tmp_path / "x.index", label=label)
    assert index.columns["label"].tolist() == [2] * 20


def test_bad_records_are_listed_and_excluded(tmp_path: Path) -> None:
    shards = tfrecords(tmp_path, shards=2)
    clean = build_index(shards, tmp_path / "clean.index")
    where = int(clean.table("image")["offset"][13])
    flip(shards[1], where)
    with pytest.raises(DataCorruptionError, match="corrupted data"):
        build_index(shards, tmp_path / "x.index")
    report = verify(shards, root=tmp_path, bad_list=tmp_path / "bad.jsonl")
    assert [(bad.shard, bad.record) for bad in report.findings] == [(shards[1].name, 3)]
    index = build_index(shards, tmp_path / "x.index", exclude=tmp_path / "bad.jsonl")
    assert len(index) == 19
    assert index.options.left_out == 1
    with (tmp_path / "bad.jsonl").open("a") as listed:
        listed.write(" \n\n")
    assert read_bad_records(tmp_path / "bad.jsonl") == report.findings
    with Reader(index) as reader:
        images = reader.read(range(19))["image"]
    want = [sample["image"] for sample in numbered(0, 20)]
    assert images == want[:13] + want[14:]
    assert verify(index).ok


@pytest.mark.parametrize("place", [0, 4, 9])
@pytest.mark.parametrize("how", ["header", "cut"])
@pytest.mark.parametrize("container", ["tfrecord", "tar"])
def test_rest_of_broken_shard_is_listed_and_excluded(
    tmp_path: Path, container: str, how: str, place: int
) -> None:
    """Listed by verify, of the shards or of their index; all is well with the index of the rest."""
    shards = (tfrecords if container == "tfrecord" else tars)(tmp_path, shards=2)
    scan = tfrecord.scan if container == "tfrecord" else tar.scan
    offset = [record.offset for record in scan(shards[1])][place]
    build_index(shards, tmp_path / "whole.index")
    if how == "header":
        flip(shards[1], offset + 2)
    else:
        os.truncate(shards[1], offset + 15)
    # A tar's last sample before a header is known to be whole only once that header is read.
    first = max(place - 1, 0) if container == "tar" else place
    listed = tmp_path / "bad.jsonl"
    for source in [shards] if how == "cut" else [shards, tmp_path / "whole.index"]:
        (bad,) = verify(source, root=tmp_path, bad_list=listed).findings
        assert (bad.shard, bad.record, bad.rest) == (shards[1].name, first, True)
        with pytest.raises(DataCorruptionError, match=r"what to do: .* --bad-list FILE, then"):
            build_index(shards, tmp_path / "x.index", exclude=[(bad.shard, bad.record)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardWarning)  # of a shard without records
            index = build_index(shards, tmp_path / "x.index", exclude=listed)
        assert len(index) == 10 + first
        assert index.options.broken == 1
        with Reader(index) as reader:
            reader.read(range(len(index)))
        assert verify(index).ok
    if first > 0:  # another break, before that break
        flip(shards[1], 2)
        assert [(bad.record, bad.rest) for bad in verify(index).findings] == [(0, True)]


def test_bad_loose_file_is_excluded(tmp_path: Path) -> None:
    folder = tmp_path / "images" / "c"
    folder.mkdir(parents=True)
    for n in range(5):
        (folder / f"{n}.png").write_bytes(b"12345")
    index, listed = build_index(tmp_path / "images", tmp_path / "x.index"), tmp_path / "bad.jsonl"
    (folder / "3.png").write_bytes(b"54321")
    verify(index, bad_list=listed)
    index = build_index(tmp_path / "images", index.path, exclude=listed)
    assert index.keys(range(4)) == ["c/0", "c/1", "c/2", "c/4"]
    assert verify(index).ok


def test_index_options_record_how_it_was_built(tmp_path: Path) -> None:
    reading: ReadingOptions = {"key": "key", "lists": ["image"], "missing": "skip"}
    built = build_index(
        tfrecords(tmp_path), tmp_path / "x.index", label="label", fields=["image"], **reading
    )
    told = open_index(built.path).options
    assert told == IndexOptions(
        container="tfrecord",
        key="key",
        lists=["image"],
        missing="skip",
        label_from="field",
        label="label",
        fields={"image": "image"},
    )


@pytest.mark.filterwarnings("ignore:fields that some")
def test_digests_are_equal_in_every_container_for_equal_content(tmp_path: Path) -> None:
    """And another class, of that name alone, where a record, its place or a value differs."""

    def digests(container: str, samples: list[dict[str, Any]]) -> dict[str, str]:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        return dict(pack(samples, out, container=container)["data"].digests)

    samples: list[dict[str, Any]] = [
        {"__key__": f"k{n}", "image": bytes([n]) * n, "label": n % 3} for n in range(7)
    ]
    one = digests("tar", samples)
    assert set(one) == {"image", "label"}
    assert digests("tfrecord", samples) == one
    changed = [*samples[:6], samples[6] | {"image": b"other"}]
    assert digests("tfrecord", changed)["image"] != one["image"]
    assert digests("tfrecord", changed)["label"] == one["label"]
    assert digests("tar", [*samples[1:], samples[0]])["image"] != one["image"]
    missing_error = [{name: v for name, v in samples[0].items() if name != "image"}, *samples[1:]]
    assert digests("tar", missing_error)["image"] != digests("tfrecord", samples)["image"]
    assert digests("tar", missing_error)["image"] == digests("tfrecord", missing_error)["image"]
    assert digests("tar", samples[:6])["label"] != one["label"]


def test_digest_tells_integer_zero_from_float_zero(tmp_path: Path) -> None:
    """Their bytes are the same."""
    found = [pack([{"x": zero}] * 3, tmp_path / f"{zero}")["data"].digests for zero in (0, 0.0)]
    assert found[0]["x"] != found[1]["x"]


def test_lists_of_numbers_have_no_digest(tmp_path: Path) -> None:
    samples: list[dict[str, Any]] = [
        {"x": np.arange(n + 1), "y": float(n), "z": b"z"} for n in range(3)
    ]
    index = pack(samples, tmp_path / "a", container="tfrecord")["data"]
    assert index.fields["x"].kind == "int64_list"
    assert set(index.digests) == {"y", "z"}


def test_class_numbers_are_looked_up_once_for_all_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dictionary of all names for each shard took 20 seconds at 100,000 classes."""
    found, numbers = [], _merge.class_numbers
    monkeypatch.setattr(
        _merge,
        "class_numbers",
        lambda *names, **rest: (found.append(1), numbers(*names, **rest))[1],
    )
    shards = [
        write_tar(tmp_path / f"{n:02}.tar", [(f"k{n}", {"cls": b"c%02d" % (n * 7 % 20)})])
        for n in range(20)
    ]
    index = build_index(shards, tmp_path / "x.index", label="cls")
    assert index.columns["label"].tolist() == [n * 7 % 20 for n in range(20)]
    assert index.classes == tuple(f"c{n:02}" for n in range(20))
    assert len(found) == 1


def test_empty_shard_warns(tmp_path: Path) -> None:
    shards = tfrecords(tmp_path, shards=2)
    shards[0].write_bytes(b"")
    with pytest.warns(ShardWarning, match="1 of 2 shards have no records"):
        index = build_index(shards, tmp_path / "x.index")
    assert index.shard_lengths.tolist() == [0, 10]
    assert index.describe(0).startswith("record 0 (d-00001-of-00002.tfrecord, number 0")
    with Reader(index) as reader:
        assert reader.read([0])["key"] == [b"k10"]


def test_sound_data_do_not_warn(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_index(tars(tmp_path), tmp_path / "x.index")


def test_advice_for_list_of_labels_works_as_printed(tmp_path: Path) -> None:
    """The advice is followed word by word."""
    shard = write_tfrecord(tmp_path / "0.tfrecord", [{"labels": [n % 3, 7]} for n in range(6)])
    with pytest.raises(DataCorruptionError, match="gives a value that is not a label") as caught:
        build_index(shard, tmp_path / "x.index", label="labels")
    label = str(caught.value.advice).rpartition("label=")[2].partition(", or")[0]
    index = build_index(shard, tmp_path / "x.index", label=eval(label))
    assert index.labels.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("text", ["{", "{ant}", "[1]", '"ant"'])
def test_class_name_that_looks_like_json_stays_a_name(tmp_path: Path, text: str) -> None:
    shard = write_tar(tmp_path / "a.tar", [("a", {"cls": text.encode()})])
    assert build_index(shard, tmp_path / "x.index", label="cls").classes == (text,)


def cls_tar(path: Path, *texts: str | None) -> Path:
    """A tar of a sample for each text, those of None without a label."""
    samples = []
    for n, text in enumerate(texts):
        parts = {"png": b"..."} | ({} if text is None else {"cls": text.encode()})
        samples.append((f"{path.stem}{n}", parts))
    return write_tar(path, samples)


@pytest.mark.parametrize(
    ("texts", "background", "labels", "classes"),
    [
        (["3", None, "5"], -1, [3, -1, 5], ()),
        (["3", None, "5"], "-1", [3, -1, 5], ()),
        (["3", None, "5"], "none", [0, 2, 1], ("3", "5", "none")),
        (["b", None, "a"], "none", [1, 2, 0], ("a", "b", "none")),
        (["b", None, "a"], "a", [1, 0, 0], ("a", "b")),
        ([None, None, "5"], -1, [-1, -1, 5], ()),
        ([None, None, None], -1, [-1, -1, -1], ()),
        ([None, None, None], "none", [0, 0, 0], ("none",)),
    ],
)
@pytest.mark.parametrize("way", ["member", "two shards", "table", "function"])
def test_background_takes_the_kind_of_the_labels(
    tmp_path: Path, texts: list[Any], background: Any, labels: Any, classes: Any, way: str
) -> None:
    shards = [cls_tar(tmp_path / "a.tar", *texts)]
    options: dict[str, Any] = {"label": "cls", "background": background}
    if way == "two shards":
        shards = [cls_tar(tmp_path / "a.tar", *texts[:2]), cls_tar(tmp_path / "b.tar", texts[2])]
    if way == "table":
        rows = [f"a{n},{text}\n" for n, text in enumerate(texts) if text is not None]
        (tmp_path / "t.csv").write_text("".join(rows))
        options["label"] = FromTable(tmp_path / "t.csv")
    if way == "function":
        options["label"] = lambda sample: sample["cls"].decode() if "cls" in sample else None
    if way == "function" and isinstance(background, int) and any(texts):
        with pytest.raises(ValueError, match=r"background=-1 is an integer, and labels are names"):
            build_index(shards, tmp_path / "x.index", **options)
        return
    index = build_index(shards, tmp_path / "x.index", **options)
    if way == "function" and background == "-1":
        assert index.classes == ("-1", "3", "5")
        return
    assert index.columns["label"].tolist() == labels
    assert index.classes == classes


def test_background_text_is_a_number_among_integer_labels(tmp_path: Path) -> None:
    shard = cls_tar(tmp_path / "a.tar", "3", None, "5")
    index = build_index(shard, tmp_path / "x.index", label=FromJson("cls"), background="-1")
    assert index.columns["label"].tolist() == [3, -1, 5]


@pytest.mark.parametrize("label", ["cls", FromTable({"a": 1}), FromFolder(), len])
def test_field_named_label_is_kept_apart_from_labels(tmp_path: Path, label: Any) -> None:
    parts = {"cls": b"1", "label": b"a long text", "png": b"..."}
    shard, path = write_tar(tmp_path / "a.tar", [("a", parts)]), tmp_path / "x.index"
    if isinstance(label, FromFolder):
        write_tar(shard, [("d/a", parts)])
    index = build_index(shard, path, label=label, fields={"text": "label"})
    with Reader(index) as reader:
        assert reader.read([0], ["text"])["text"] == [b"a long text"]
    for fields in (None, ["label", "png"], {"label": "label"}):
        index = build_index(shard, path, label="label", fields=fields)
        assert "label" not in index.fields
        assert index.classes == ("a long text",)
    index = build_index(shard, path, label="cls", fields={"label": "cls"})
    assert index.columns["label"].tolist() == [1]


def test_label_table_may_be_a_spreadsheet_export(tmp_path: Path) -> None:
    """With a byte order mark, names in capitals, and more columns, if they are named."""
    file = tmp_path / "t.csv"
    file.write_text("\ufeffLabel,Notes, Key\r\ncat,fat,a\r\n", encoding="utf-8")
    assert FromTable(file).labels == {"a": "cat"}
    file.write_text("\ufeffa,cat\r\n", encoding="utf-8")
    assert FromTable(file).labels == {"a": "cat"}


def test_named_field_is_indexed_where_there_are_too_many_fields(tmp_path: Path) -> None:
    samples = [("a", {f"v{n}.txt": b"" for n in range(257)})]
    write_tar(tmp_path / "a.tar", samples)
    assert build_index(tmp_path / "a.tar", tmp_path / "x.index", fields=["v3.txt"])


def test_index_inside_image_folder_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(b"...")
    index = build_index(tmp_path, tmp_path / "x.index")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = build_index(tmp_path, tmp_path / "x.index")
        pack(tmp_path, tmp_path / "out", container="tar")
    assert again.fingerprint == index.fingerprint


def test_index_folder_may_hold_own_leftovers_and_notes(tmp_path: Path) -> None:
    shards = tars(tmp_path)
    for name in ("parts", ".hidden", "columns-0123456789abcdef"):
        out = tmp_path / f"{name}.index"
        (out / name).mkdir(parents=True)
        if name.startswith("columns"):
            mark_deletable(out / name)  # as an interrupted build does
        build_index(shards, out)
    (out / "notes.txt").write_text("mine")
    assert len(build_index(shards, out)) == 30


@pytest.mark.parametrize("name", ["parts", "columns-2024", "columns-0123456789abcdef"])
def test_build_keeps_folders_of_others(tmp_path: Path, name: str) -> None:
    """A folder of the same name that was there before is somebody's work."""
    shards = tars(tmp_path)
    mine = tmp_path / "project" / name / "thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(FileExistsError, match=f"it holds other files .{name}."):
        build_index(shards, mine.parent.parent)
    assert mine.read_text() == "mine"
    mine.unlink()
    mine.parent.rmdir()
    index = build_index(shards[:1], mine.parent.parent)
    mine.parent.mkdir()
    mine.write_text("mine")
    assert len(build_index(shards, index.path)) == 30
    assert mine.read_text() == "mine"
    assert not open_index(index.path).has_labels


def of(*shards: Any, out: str = "x.index", **options: Any) -> Call:
    """A call that indexes shards of the world, or of these samples. A dict is loose files."""

    def call(world: Path) -> object:
        made: list[Any] = []
        for number, shard in enumerate(shards):
            path = world / "made" / f"{number}"
            if isinstance(shard, str):
                made.append(world / shard)
            elif isinstance(shard, dict):
                for name, data in shard.items():
                    (world / "made" / f"{name}.x").write_bytes(data or b"")
                    made.append(Entry(name, {"x": f"made/{name}.x"} if data is not None else {}))
            elif isinstance(shard[0], dict):
                made.append(write_tfrecord(path.with_suffix(".tfrecord"), shard))
            else:
                made.append(write_tar(path.with_suffix(".tar"), shard))
        source = made[0] if len(made) == 1 and isinstance(made[0], Path) else made
        return build_index(source, world / out, **{"root": world} | options)

    return call


def classed(*texts: str | None) -> list[tuple[str, dict[str, bytes]]]:
    """Samples of keys a, b and so on, those of None without a label."""
    return [
        (key, {"png": b"..."} | ({} if text is None else {"cls": text.encode()}))
        for key, text in zip("abcdef", texts, strict=False)
    ]


def given(read: Callable[[Path], object], text: str) -> Call:
    """A call that reads a file of this text."""

    def call(world: Path) -> object:
        file = world / "made" / "given"
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
        return read(file)

    return call


def matched(file: Path) -> object:
    return FromTable(file).match(["a"])


def fails(sample: dict[str, Any]) -> int:
    value: int = {}[sample["__number__"]]
    return value


def second(value: Any) -> Any:
    """A function of labels that gives this value to the second record."""
    return lambda sample: value if sample["__number__"] else 1


TAR, RECORDS = "tar/*.tar", "records/*.tfrecord"
KEYS = {f"k{n}": n % 2 for n in range(10)}
LABELLED = [("a", {"cls": b"1", "label": b"a long text", "png": b"..."})]
CLASH = r"0\.tar is called 'label' .*fields=\{'text': 'label'\}"
PLAIN = {"cls": b"1", "png": b"..."}
WHOLE = PLAIN | {"clas": b"1", "jsn": b'{"a": 1}', "jpg": b"", "name": b"k"}
IN_FIELD = "label='.* gives a value that is not a label"
IN_JSON = r"label=FromJson.* gives a value that is not a label"
BY_FUNCTION = "function of label= gives a value that is not a label"
A_LABEL = r"labels must be all integers or all names, got an integer \("
FOREIGN = "a folder or a file of an index, .*give a pattern that matches only shards"

# What is wrong, the class of the error, and a word that names the place or what to do.
REFUSED: Refused = [
    # Which shards
    (of("none/*.tar"), FileNotFoundError, "no shard matches .*none"),
    (lambda _: build_index("memory://none/*.tar", "x.index"), FileNotFoundError, "no shard match"),
    (of(), ValueError, "at least one file"),
    *(
        (of(f"tar/{odd}"), ValueError, "unbalanced or nested braces in the shard pattern")
        for odd in ("a-{0..9.tar", "a}", "{a{b,c}")
    ),
    *(
        (of(f"tar/{many}"), ValueError, "more than 1000000")
        for many in ("{0..999999999}", "{0..1000000}", "{a,b}" * 60)
    ),
    (of("gaps/*"), ValueError, "3 of 10 missing, first: 00002, 00005, 00009.*complete=False"),
    (of("gaps/b-000000000-of-999999999"), ValueError, "first: 000000001, 000000002"),
    (of("beyond/*"), ValueError, "shard number 2 .* not below 2"),
    *(
        (of("tar/d-000000.tar", again), ValueError, r"named twice \(1: .*0\.tar and .*\.tar\)$")
        for again in ("tar/*.tar", "tar/../tar/d-000000.tar", "link.tar", "linked/d-000000.tar")
    ),
    (of("a.tar.gz"), DataCorruptionError, "compressed shards.*twinfeed pack"),
    (of("tar/gone.tar"), FileNotFoundError, r"gone\.tar"),
    *((of(*caught), LoaderError, FOREIGN) for caught in (["old*"], ["old.index", TAR], ["[t]ar"])),
    (lambda _: build_index("memory://none/", "x.index"), LoaderError, FOREIGN),
    (of({"a": None}), ValueError, "no Entry has a file"),
    (of("no images"), FileNotFoundError, "no image .*below the folder .*no images"),
    (of(TAR, root="/elsewhere"), ValueError, "must lie below the root /elsewhere.* give root="),
    # Where the index goes
    (of(TAR, out="tar"), FileExistsError, r"other files \(d-000000.*such as .*/tar/train\.index"),
    (of(TAR, out="tar/d-000000.tar"), FileExistsError, "a file; .*such as .*/tar/d-000000.index"),
    (lambda _: build_index("none", "https://127.0.0.1/x.index"), LoaderError, "web server"),
    (of(TAR, out="application"), FileExistsError, r"\(manifest.json\).*/application/train\.index"),
    # Options
    (of(TAR, reading=3), TypeError, "build_index takes no reading=: its options are "),
    (of(TAR, key="name"), ValueError, "are for tfrecord, got tar"),
    (of(RECORDS, join=True), ValueError, "join= is for tar, got tfrecord"),
    (of({"a": b""}, digest=True), ValueError, "digest= is for shards"),
    (of(TAR, fields="jpg"), TypeError, "fields must be .* a list of names, got 'jpg'"),
    (of(TAR, fields={"x": ["png"]}), TypeError, r"fields must map .*, got 'x' to \['png'\]"),
    (of(TAR, fields=[1]), TypeError, "got 1 to 1"),
    (of(TAR, fields={"": "png"}), TypeError, "got '' to 'png'"),
    (of(TAR, label=5), TypeError, "label must be a field's name, .* or a function, got 5"),
    (of(TAR, label=FromFolder), TypeError, r"FromFolder\(\), .*, got <class"),
    (of(TAR, classes="cd"), TypeError, "classes must be a list of names, got 'cd'"),
    (of(TAR, classes=[1, 2]), TypeError, r"classes must be a list of names, got \[1, 2\]"),
    (of(TAR, classes=["a", "b", "a"]), ValueError, r"classes must be different .* got \['a'\]"),
    (of(TAR, classes=["a", ""]), ValueError, r"not empty, got \[''\]"),
    (of(TAR, classes=["a"]), ValueError, "the index has no labels: say with label="),
    (of(RECORDS, label="label", classes=["a"]), ValueError, r"outside \[0, 1\) of .*first: \[1,"),
    (of(classed("dog", "cat"), label="cls", classes=["dog"]), ValueError, r"not among .*\['cat'"),
    # Bad records
    (of(TAR, exclude=["d-000000.tar"]), TypeError, "exclude must be .* pairs .*, got 'd-000000"),
    (of(TAR, exclude=[7]), TypeError, "exclude must be .*, got 7"),
    (of(TAR, exclude=[("nowhere", 0)]), ValueError, "names shards that are not indexed .*verify"),
    (of(TAR, exclude=[("tar/d-000000.tar", 5)]), ValueError, "1 record .* and 0 of them exist"),
    (
        of({"a": b"", "b": b""}, exclude=[BadRecord("files-00000", 1, key="c")]),
        ValueError,
        "names 'c', which is not record 1 of files-00000: remove the file, or",
    ),
    *(
        (
            given(read_bad_records, f"{good}\n{line}"),
            ValueError,
            f"given, line 2: .*{word}.* verify",
        )
        for good in ['{"shard": "b.tar", "record": 2}']
        for line, word in {
            '{"shard": "a.tar"}': "'record'",
            '{"shard": "a.tar", "record": 1, "x": 1}': "'x'",
            '{"shard": 7, "record": 1}': "got",
            '{"shard": "a.tar", "record": -1}': "got",
            '{"shard": "a.tar", "record": "1"}': "got",
            '{"shard": "a.tar", "record": 1, "rest": "no"}': "got",
            '["a.tar", 1]': "must be a mapping",
            "\udcff": "Expecting value",
            "[" * 200_000: "recursion",
        }.items()
    ),
    # What records lack
    (of("empty/*"), ValueError, "no records: all 2 shards are empty"),
    (of(TAR, fields=["jpg"], missing="skip"), ValueError, "no records: .*--missing skip"),
    (of(TAR, label=FromTable({}), missing="skip"), ValueError, "or every record is left out"),
    (of(TAR, fields={"x": "y;z"}, missing="empty"), KeyError, r"no record has the fields \['x'\]"),
    (of(RECORDS, lists=["nope"]), KeyError, r"\['nope'\] of fields= or lists=; .*'image'"),
    *(
        (
            of([WHOLE, PLAIN], **options),
            DataCorruptionError,
            rf"a record lacks {lacked}.*0\.tfrecord.*record: 1\n.*\['cls', 'png'\]\n.*{todo}",
        )
        for options, lacked, todo in (
            ({"label": "clas"}, "a label: label='clas' gives none", "--missing skip"),
            (
                {"label": FromJson("jsn", "a")},
                "a label: label=FromJson.* gives none",
                "--missing skip",
            ),
            ({"fields": {"image": "jpg;jpeg"}}, r"the field 'image' \(jpg or jpeg\)", "empty"),
            ({"key": "name"}, "the bytes feature 'name' of key=", "name another"),
        )
    ),
    (
        of([("img", {f"{n:05}.txt": b"x" for n in range(100)})], fields=["txt"]),
        DataCorruptionError,
        r"found: the fields .{,200}\n.*ends at the first dot of its members' names",
    ),
    (of("photos"), DataCorruptionError, "lacks a label.*a.png.*put a file into a folder"),
    (of(classed("3"), label=lambda _: None), DataCorruptionError, "have a function return a label"),
    # Fields
    (of(LABELLED, label="cls"), ValueError, CLASH),
    (of(LABELLED, label="cls", fields=["label", "png"]), ValueError, CLASH),
    (of(LABELLED, label=FromTable({"a": 1})), ValueError, CLASH),
    (of([("a", {f"v{n}": b"" for n in range(257)})]), ValueError, "more than 256 .*with fields="),
    (
        of(*([("k", {f"x{n}-{m}": b"" for m in range(100)})] for n in range(3))),
        ValueError,
        "more than 256 different fields",
    ),
    (of([{"x": 1}, {"x": b"a"}]), ValueError, "'x' .* int64_list in record 0 and bytes"),
    (
        of([{"x": b"a"}], [{"x": 7}]),
        ValueError,
        r"'x' is bytes in .*0\.tfrecord and int64_list in .*1\.tfrecord: .*--field",
    ),
    # What is no label
    *(
        (
            of([("a", {"x": good}), ("b", {"x": text})], label=label),
            DecodeError if callable(label) else DataCorruptionError,
            rf"{problem}.*0\.tar.*record: 1\n.*key: b\n.*{re.escape(found)}.*what to do: ",
        )
        for good, text, label, problem, found in (
            (b"7", b"", "x", IN_FIELD, "''"),
            (b"7", b" \n", "x", IN_FIELD, "''"),
            (b"7", b"caf\xe9", "x", IN_FIELD, r"'caf\udce9'"),
            (b"7", b"\xff" * 999, "x", IN_FIELD, r"'\udcff\udcff...f\udcff\udcff'"),
            (b"7", b"[" * 100_000, FromJson("x"), "'x' is not JSON: maximum recursion", ""),
            (b"7", b"0.5", FromJson("x"), IN_JSON, "0.5"),
            (b"7", b"true", FromJson("x"), IN_JSON, "True"),
            (b"7", b'""', FromJson("x"), IN_JSON, "''"),
            (
                b'{"a": {"b": 7}}',
                b'{"a": {"b": %d}}' % 2**63,
                FromJson("x", "a.b"),
                IN_JSON,
                "9223",
            ),
            (b"7", rb'"\ud800"', FromJson("x"), IN_JSON, r"'\ud800'"),
            (b"7", b"", second(2**80), BY_FUNCTION, str(2**80)),
            (b"7", b"", second(float("nan")), BY_FUNCTION, "nan"),
        )
    ),
    *(
        (of({"a": b"7", "b": b"no"}, label=label), kind, rf"{problem}.*made/b\.x\n +record: 1\n")
        for label, kind, problem in (
            (FromJson("x"), DataCorruptionError, "is not JSON: Expecting value"),
            (second(0.5), DecodeError, BY_FUNCTION),
        )
    ),
    (of(TAR, label=fails), DecodeError, "the function of label= failed: KeyError: 0"),
    *(
        (of([{"x": 1}, {"x": v}], label="x"), DataCorruptionError, f"{IN_FIELD}.*record: 1")
        for v in ([1.0], [1, 2], [b"a", b"b"])
    ),
    *(
        (of(TAR, label=label), DataCorruptionError, "name one of its keys with FromJson")
        for label in ("json", FromJson("json"), FromJson("json", "object"))
    ),
    # Labels of two kinds
    (
        of(classed("3", None, "cat"), label="cls", background=-1),
        ValueError,
        r"background=-1 is an integer, .* names \('cat'\)",
    ),
    (
        of(classed("3", "4"), label=lambda s: s["__number__"] or None, background="none"),
        ValueError,
        "background='none' is a name, and labels are integers",
    ),
    (
        of(classed("3", "4", "5"), label=lambda s: [0, None, "cat"][s["__number__"]], background=1),
        ValueError,
        rf"{A_LABEL}.*0\.tar, record 0, key 'a': 0\) and .*record 2, key 'c': 'cat'",
    ),
    (
        of(classed("3"), [("b", {"cls": b"x"})], label=lambda s: "x" if s["__key__"] == "b" else 1),
        ValueError,
        rf"{A_LABEL}.*0\.tar, .*: 1\) and a name \(.*1\.tar, .*: 'x'\)",
    ),
    # Tables
    (of(RECORDS, label=FromTable({"k0": 1})), ValueError, "joined by key, .* no keys: name a feat"),
    *(
        (of("tar/d-000000.tar", label=FromTable(rows), **options), ValueError, word)
        for rows, options, word in (
            ({"k1": 0, "k2": 1, "k4": 0}, {}, r"2 records .*'k0', 'k3'\); .* background="),
            (KEYS | {"x": 0}, {"missing": "skip"}, r"6 rows .* no record \(first: 'k5'"),
            (KEYS | {"x": 0}, {"background": "y"}, "6 rows of the table have no record"),
            (KEYS | {"k4": float("nan")}, {}, r"1 labels are not a name .*first: \('k4', nan\)"),
            (KEYS | {"k4": None}, {}, "1 labels are not a name or an integer"),
            ({"k0": 1, "k1": "cat", "k2": 2, "k3": 2, "k4": 2}, {}, f"{A_LABEL}the table, 'k0': 1"),
        )
    ),
    *(
        (
            lambda _, partial=partial: FromTable({"caf\u00e9": "x", 3: "y"}).match(  # type: ignore[dict-item,misc]
                ["cafe\u0301"], partial=partial
            ),
            ValueError,
            r"\(first: 'caf\u00e9', 3\); some keys differ only in how Unicode .*normalize",
        )
        for partial in (False, True)
    ),
    (given(matched, "k1,a\nk2,b\nk1,c\n"), ValueError, r"keys occur twice \(1: \['k1'\]"),
    (given(matched, "k1,a\nk2\n"), ValueError, r"rows lack a column \(1, first: row 2\)"),
    (given(matched, "a,nan\n"), ValueError, r"not a name or an integer \(first: \('a', nan\)"),
    (given(matched, "a,fat,cat\n"), ValueError, r"has 3 columns: .* first line, got \['a', 'fat'"),
    (given(matched, "a," + "x" * 200_000), ValueError, "given is not a table"),
    (given(matched, "a,caf\udce9\n"), ValueError, "given is not a table"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of both kinds, sets of shards with gaps, folders of images, an index, other files."""
    world = tmp_path_factory.mktemp("world")
    for name in ("tar", "records", "gaps", "beyond", "empty", "made", "application", "no images"):
        (world / name).mkdir()
    tars(world / "tar", shards=2, each=5)
    tfrecords(world / "records", shards=2, each=5)
    build_index(world / TAR, world / "old.index")
    (world / "photos" / "cat").mkdir(parents=True)
    names = [f"gaps/a-{n:05d}-of-00010" for n in (0, 1, 3, 4, 6, 7, 8)]
    names += [f"beyond/a-0000{n}-of-00002" for n in range(3)]
    for name in (*names, "gaps/b-000000000-of-999999999", "empty/a.tfrecord", "empty/b.tfrecord"):
        (world / name).touch()
    for name in ("photos/a.png", "photos/cat/b.png", "a.tar.gz"):
        (world / name).write_bytes(b"...")
    (world / "application" / MANIFEST).write_text('{"name": "an application"}')
    (world / "link.tar").symlink_to("tar/d-000000.tar")
    (world / "linked").symlink_to("tar")
    return world


@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_build_index_refuses_bad_arguments(
    world: Path, call: Call, kind: type[Exception], word: str
) -> None:
    check_refused(world, call, kind, word)
