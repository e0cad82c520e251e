"""Building an index: what ends up in it, from every container and every source of labels."""

from __future__ import annotations

import os
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside import (
    MANIFEST,
    BadRecord,
    Entry,
    IndexOptions,
    Reading,
    ReadingOptions,
    TFRecordWriter,
    _merge,
    build,
    encode,
    folder,
    mark,
    parse,
    read_bad_records,
    tar,
    tfrecord,
)
from making_shards import flip, numbered, tars, tfrecords, tree, write_tar, write_tfrecord

from twinfeed.loaders import (
    DataCorruptionError,
    DecodeError,
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


def test_a_folder_of_images_is_indexed_as_it_is(tmp_path: Path) -> None:
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


def test_a_link_to_a_folder_of_images_is_followed_where_the_user_named_it(tmp_path: Path) -> None:
    scratch, home = tmp_path / "scratch", tmp_path / "home"
    (scratch / "photos" / "cat").mkdir(parents=True)
    (scratch / "photos" / "cat" / "1.png").write_bytes(b"...")
    home.mkdir()
    link, path = home / "photos", home / "x.index"
    link.symlink_to(scratch / "photos")
    with pytest.warns(ShardWarning, match=f"leads to {scratch}/photos: .* root='{scratch}'"):
        index = build_index(link, path)
    again = build_index(link, path, root=scratch)
    for each in (index, again, open_index(path, root=scratch)):
        with Reader(each) as reader:
            assert reader.read([0])["image"] == [b"..."]
    with Reader(open_index(path)) as reader, pytest.raises(UnsafeContentError) as caught:
        reader.read([0])
    assert f"found: {scratch}/photos/cat/1.png" in str(caught.value)
    with pytest.raises(ValueError, match=f"below the root {home}, not at {scratch}/photos"):
        build_index(link, path, root=home)
    assert verify(link).ok
    build_index(link, scratch / "x.index")
    assert verify(scratch / "x.index").ok  # beside the photos, no root is needed


def test_links_to_shards_are_followed_where_the_index_lies_beside_the_shards(
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


def test_pairs_of_loose_files_share_a_record(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"image")
    (tmp_path / "a.xml").write_bytes(b"<xml/>")
    entries = [Entry("a", {"image": "a.jpg", "annotation": "a.xml"})]
    index = build_index(entries, tmp_path / "x.index")
    with Reader(index) as reader:
        assert reader.read([0]) == {"annotation": [b"<xml/>"], "image": [b"image"]}


def test_folders_without_images_are_warned_of(tmp_path: Path) -> None:
    for name in ("cat", "dog", ".hidden"):
        (tmp_path / "images" / name).mkdir(parents=True)
    (tmp_path / "images" / "cat" / "1.jpg").write_bytes(b"...")
    with pytest.warns(ShardWarning, match=r"folders without images below .*images \(1: dog\)"):
        build_index(tmp_path / "images", tmp_path / "x.index")


def test_the_container_is_told_by_the_name_of_the_file_not_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "my.tfrecords").mkdir()
    (shard,) = tars(tmp_path / "my.tfrecords", shards=1)
    plain = shard.rename(shard.with_suffix(""))
    assert build_index(plain, tmp_path / "x.index").container == "tar"


def test_an_option_that_is_none_is_refused(tmp_path: Path) -> None:
    for read in (
        lambda: build_index("*.tar", tmp_path / "x.index", reading=3),  # type: ignore[call-arg]
        lambda: verify("*.tar", reading=3),  # type: ignore[call-arg]
    ):
        with pytest.raises(TypeError, match="takes no reading=: its options are "):
            read()
    assert not list(tmp_path.iterdir())


def test_raw_records_have_one_field(tmp_path: Path) -> None:
    (shard,) = tfrecords(tmp_path, shards=1)
    index = build_index(shard, tmp_path / "x.index", example=False)
    with Reader(index) as reader:
        (data,) = reader.read([3])["data"]
    assert parse(data)["label"].tolist() == [3]  # type: ignore[union-attr]


@pytest.mark.frameworks
def test_sequence_examples_are_refused_and_indexed_as_raw_bytes(tmp_path: Path) -> None:
    import tensorflow as tf

    frame = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"..."]))
    message = tf.train.SequenceExample()
    message.feature_lists.feature_list["frames"].feature.extend([frame, frame])
    message.context.feature["id"].int64_list.value.append(7)
    shard = tmp_path / "a.tfrecord"
    with TFRecordWriter(shard) as writer:
        writer.write(encode({"id": 7}))
        writer.write(message.SerializeToString())
    with pytest.raises(DataCorruptionError, match=r"it is a tf\.train\.SequenceExample") as caught:
        build_index(shard, tmp_path / "x.index")
    assert (caught.value.path, caught.value.record) == (str(shard), 1)
    assert "as raw bytes with example=False" in str(caught.value)
    with Reader(build_index(shard, tmp_path / "x.index", example=False)) as reader:
        assert reader.read([1])["data"] == [message.SerializeToString()]


def test_a_field_goes_by_one_name_over_several_extensions(tmp_path: Path) -> None:
    samples = [("a", {"jpg": b"1"}), ("b", {"png": b"2"}), ("c", {"jpeg": b"3", "png": b"4"})]
    write_tar(tmp_path / "a.tar", samples)
    fields = {"image": "jpg;jpeg;png"}
    index = build_index(tmp_path / "a.tar", tmp_path / "x.index", fields=fields)
    with Reader(index) as reader:
        assert reader.read([0, 1, 2]) == {"image": [b"1", b"2", b"3"]}


def test_features_of_one_and_of_several_values_mix(tmp_path: Path) -> None:
    """Within a shard, and between shards."""
    one, two = {"caption": [b"a"]}, {"caption": [b"b", b"c"]}
    write_tfrecord(tmp_path / "0.tfrecord", [one, two])
    write_tfrecord(tmp_path / "1.tfrecord", [one])
    index = build_index(tmp_path / "*.tfrecord", tmp_path / "x.index")
    assert index.fields["caption"].kind == "bytes_list"
    with Reader(index) as reader:
        assert reader.read([2, 1, 0])["caption"] == [[b"a"], [b"b", b"c"], [b"a"]]


def test_small_numeric_features_are_columns_and_ragged_ones_are_fields(tmp_path: Path) -> None:
    samples = [
        {"box": [0.0, 1.0, float(n), 2.0], "id": n, "tokens": np.arange(n), "wide": [0.5] * 40}
        for n in range(4)
    ]
    write_tfrecord(tmp_path / "0.tfrecord", samples)
    index = build_index(tmp_path / "0.tfrecord", tmp_path / "x.index")
    assert list(index.columns) == ["box", "id"]
    assert not index.has_labels
    with pytest.raises(LoaderError, match="the index has no labels") as caught:
        _ = index.labels
    assert "build it with label=, of the fields" in str(caught.value)
    assert "images get their labels from a folder for each class" in str(caught.value)
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
def test_labels_come_from_anywhere(
    tmp_path: Path, label: Any, classes: tuple[str, ...], numbers: list[int]
) -> None:
    index = build_index(tars(tmp_path, shards=1), tmp_path / "x.index", label=label)
    assert index.classes == classes
    assert index.labels.tolist() == numbers


def test_a_record_that_a_label_table_lacks_is_an_error_or_left_out_or_background(
    tmp_path: Path,
) -> None:
    """Over two shards, the second of which the table knows nothing of."""
    shards, out = tars(tmp_path, shards=2, each=5), tmp_path / "x.index"
    table = FromTable({"k1": "b", "k3": "a", "k4": "b"})
    with pytest.raises(
        ValueError, match=r"7 records are not in the table \(first: 'k0', 'k2'"
    ) as no:
        build_index(shards, out, label=table)
    assert "give such records a background=, or skip them with missing='skip'" in str(no.value)
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
    ways: list[ReadingOptions] = [{"missing": "skip"}, {"background": "none"}]
    for way in ways:
        with pytest.raises(ValueError, match="1 rows of the table have no record"):
            build_index(shards, out, label=FromTable({"k1": 1, "k7": 2, "x": 3}), **way)
    with pytest.raises(ValueError, match=r"no records: .* or every record is left out"):
        build_index(shards, out, label=FromTable({}), missing="skip")


def test_a_label_table_for_records_without_keys_is_refused(tmp_path: Path) -> None:
    for missing in ("error", "skip"):
        with pytest.raises(ValueError, match="a label table is joined by key, and these records"):
            build_index(
                tfrecords(tmp_path),
                tmp_path / "x.index",
                label=FromTable({"k0": 1}),
                missing=missing,  # type: ignore[arg-type]
            )


def test_loose_files_that_a_label_table_lacks_are_left_out(tmp_path: Path) -> None:
    for n in range(4):
        (tmp_path / f"{n}.png").write_bytes(b"image %d" % n)
    entries = [Entry(str(n), {"image": f"{n}.png"}) for n in range(4)]
    table = FromTable({"1": 7, "3": 5})
    index = build_index(entries, tmp_path / "x.index", label=table, missing="skip")
    with Reader(index) as reader:
        assert reader.read([0, 1]) == {"image": [b"image 1", b"image 3"]}
    assert index.columns["label"].tolist() == [7, 5]
    assert verify(index).ok


def test_labels_come_from_the_folders_in_tar_keys(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("dog/1", {"jpg": b"1"}), ("cat/1", {"jpg": b"2"})])
    index = build_index(tmp_path / "a.tar", tmp_path / "x.index", label=FromFolder())
    assert index.classes == ("cat", "dog")


def test_an_image_beside_the_class_folders_is_to_be_put_into_one(tmp_path: Path) -> None:
    for name in ("a.png", "cat/b.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(b"...")
    with pytest.raises(DataCorruptionError, match="lacks a label") as caught:
        build_index(tmp_path / "photos", tmp_path / "photos.index")
    assert "to do: put a file into a folder for its class, " in str(caught.value)


def test_a_function_may_find_no_label_and_a_background_class_takes_it(tmp_path: Path) -> None:
    samples = [("a", {"xml": b"<name>dog</name>"}), ("b", {"xml": b""})]
    write_tar(tmp_path / "a.tar", samples)

    def named(sample: dict[str, Any]) -> str | None:
        return "dog" if b"dog" in sample["xml"] else None

    path = tmp_path / "x.index"
    with pytest.raises(DataCorruptionError, match="a record lacks a label") as caught:
        build_index(tmp_path / "a.tar", path, label=named)
    assert "have a function return a label, or leave" in str(caught.value)
    index = build_index(tmp_path / "a.tar", path, label=named, background="background")
    assert index.classes == ("background", "dog")
    assert build_index(tmp_path / "a.tar", path, label=named, missing="skip").keys([0]) == ["a"]


def test_the_number_of_classes_is_of_names_or_one_more_than_the_largest_label(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.index"
    shard = cls_tar(tmp_path / "a.tar", "1", "5", "3")
    assert build_index(shard, path, label="cls").num_classes == 6
    assert build_index(shard, path).num_classes == 0
    shard = cls_tar(tmp_path / "a.tar", "cat", "dog")
    index = build_index(shard, path, label="cls", classes=["ant", "cat", "dog"])
    assert index.num_classes == 3


def test_names_are_numbered_by_their_place_in_classes(tmp_path: Path) -> None:
    write_tfrecord(tmp_path / "0.tfrecord", [{"name": "dog"}, {"name": "cat"}])
    path = tmp_path / "x.index"
    shard = tmp_path / "0.tfrecord"
    index = build_index(shard, path, label="name", classes=["dog", "emu", "cat"])
    assert index.classes == ("dog", "emu", "cat")
    assert index.labels.tolist() == [0, 2]
    with pytest.raises(ValueError, match=r"labels are not among classes= \(1: \['cat'\]"):
        build_index(shard, path, label="name", classes=["dog"])


def test_integer_labels_outside_the_classes_are_refused(tmp_path: Path) -> None:
    write_tfrecord(tmp_path / "0.tfrecord", [{"label": n} for n in range(4)])
    with pytest.raises(ValueError, match=r"outside \[0, 2\) of classes= \(2, first: \[2, 3\]"):
        build_index(tmp_path / "0.tfrecord", tmp_path / "x.index", classes=["a", "b"])


def test_names_that_look_like_padded_numbers_stay_names(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("a", {"cls": b"0002"}), ("b", {"cls": b"0010"})])
    index = build_index(tmp_path / "a.tar", tmp_path / "x.index", label="cls")
    assert index.classes == ("0002", "0010")


def test_records_without_a_field_are_an_error_or_left_out_or_empty(tmp_path: Path) -> None:
    samples = [("a", {"jpg": b"1", "txt": b"x"}), ("b", {"jpg": b"2"})]
    shard = write_tar(tmp_path / "a.tar", samples)
    path = tmp_path / "x.index"
    fields = ["jpg", "txt"]
    with pytest.raises(DataCorruptionError, match="lacks the field 'txt'") as caught:
        build_index(shard, path, fields=fields)
    assert (caught.value.record, caught.value.key) == (1, "b")
    assert "let fields be empty with --missing empty, or leave" in str(caught.value)
    index = build_index(shard, path, fields=fields, missing="skip")
    assert index.keys(range(len(index))) == ["a"]
    assert index.options.left_out == 1
    index = build_index(shard, path, fields=fields, missing="empty")
    with Reader(index) as reader:
        assert reader.read([1, 0]) == {"jpg": [b"2", b"1"], "txt": [b"", b"x"]}


def test_a_field_that_no_record_has_is_an_error(tmp_path: Path) -> None:
    samples = [("a", {"jpg": b"1"}), ("b", {"jpg": b"2", "txt": b"x"})]
    shards = [write_tar(tmp_path / "a.tar", samples), write_tar(tmp_path / "b.tar", samples[:1])]
    path, fields = tmp_path / "x.index", {"image": "jpg", "caption": "text;cap"}
    with pytest.raises(KeyError, match=r"no record has the fields \['caption'\]"):
        build_index(shards, path, fields=fields, missing="empty")
    for options in ({"fields": fields}, {"label": "cls"}):
        with pytest.raises(ValueError, match=r"no records: .*--missing skip"):
            build_index(shards, path, missing="skip", **options)
    assert len(build_index(shards, path, fields=["jpg", "txt"], missing="empty")) == 3


def test_a_loose_file_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    for number in range(3):
        (tmp_path / "x" / f"{number}.png").write_bytes(b"...")
    entries = folder(tmp_path)
    (tmp_path / "x" / "1.png").unlink()
    (entry,) = verify(entries, root=tmp_path).bad
    assert entry.shard == f"{tmp_path}/x/1.png"


def test_keys_with_dots_are_told_of_in_few_words(tmp_path: Path) -> None:
    samples = [("img", {f"{n:05}.txt": b"x" for n in range(100)})]
    shard = write_tar(tmp_path / "a.tar", samples)
    for options in ({"label": "cls"}, {"fields": ["txt"]}):
        with pytest.raises(DataCorruptionError) as caught:
            build_index(shard, tmp_path / "x.index", **options)
        assert "a sample's key ends at the first dot of its members' names" in str(caught.value)
        assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    ("options", "lacked"),
    [
        ({"label": "clas"}, "what label='clas' names"),
        ({"label": FromJson("jsn", "a")}, r"what label=FromJson\(field='jsn', key='a'\) .* names"),
        ({"fields": {"image": "jpg;jpeg"}}, r"the field 'image' \(jpg or jpeg\)"),
        ({"key": "name"}, "the bytes feature 'name' of key="),
    ],
)
def test_a_record_that_lacks_what_is_named_is_named_with_its_fields(
    tmp_path: Path, options: dict[str, Any], lacked: str
) -> None:
    shard, path = tmp_path / "a.tfrecord", tmp_path / "x.index"
    plain = {"cls": b"1", "png": b"..."}
    has_all = plain | {"clas": b"1", "jsn": b'{"a": 1}', "jpg": b"", "name": b"k"}
    for samples, bad in (([plain, plain, has_all], 0), ([has_all, plain], 1)):
        write_tfrecord(shard, samples)
        with pytest.raises(DataCorruptionError, match=f"a record lacks {lacked}") as caught:
            build_index(shard, path, **options)
        assert (caught.value.path, caught.value.record) == (str(shard), bad)
        assert caught.value.found == "the fields ['cls', 'png']"
        assert not path.exists()


def test_keys_come_from_a_feature(tmp_path: Path) -> None:
    index = build_index(tfrecords(tmp_path, shards=1), tmp_path / "x.index", key="key")
    assert index.keys([3, 0]) == ["k3", "k0"]
    assert "key" not in index.fields


@pytest.mark.parametrize("kind", ["threads", "spawned processes"])
def test_an_executor_builds_the_same_bytes(tmp_path: Path, kind: str) -> None:
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


def test_the_error_of_one_shard_is_told_while_others_are_still_scanned(
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

    monkeypatch.setattr(build, "_is_small", finish)
    shards = [write_tar(tmp_path / f"{n}.tar", [("a", {"txt": b"."})]) for n in range(2)]
    with ThreadPoolExecutor(2) as executor, pytest.raises(DecodeError, match="no label"):
        build_index(shards, tmp_path / "x.index", label=label, executor=executor)


def test_an_index_is_the_same_bytes_in_another_folder_at_another_time(tmp_path: Path) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        build_index(tars(tmp_path / place), tmp_path / place / "x.index", label="cls")
    assert tree(tmp_path / "one" / "x.index") == tree(tmp_path / "two" / "x.index")


def test_what_a_function_gave_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code is the same, and what it uses is not."""
    shards = tars(tmp_path, shards=2)
    now = {"label": 1}

    def label(sample: dict[str, Any]) -> int:
        return now["label"]

    monkeypatch.setattr(build, "KEEP_FROM", 0)
    flip(shards[1], 0)
    with pytest.raises(DataCorruptionError):
        build_index(shards, tmp_path / "x.index", label=label)
    flip(shards[1], 0)
    assert list((tmp_path / "x.index" / "parts").glob("*.part"))
    now["label"] = 2
    index = build_index(shards, tmp_path / "x.index", label=label)
    assert index.columns["label"].tolist() == [2] * 20


def test_bad_records_are_found_listed_and_left_out(tmp_path: Path) -> None:
    shards = tfrecords(tmp_path, shards=2)
    clean = build_index(shards, tmp_path / "clean.index")
    where = int(clean.table("image")["offset"][13])
    flip(shards[1], where)
    with pytest.raises(DataCorruptionError, match="corrupted data"):
        build_index(shards, tmp_path / "x.index")
    report = verify(shards, root=tmp_path, bad_list=tmp_path / "bad.jsonl")
    assert [(bad.shard, bad.record) for bad in report.bad] == [(shards[1].name, 3)]
    index = build_index(shards, tmp_path / "x.index", exclude=tmp_path / "bad.jsonl")
    assert len(index) == 19
    assert index.options.left_out == 1
    with Reader(index) as reader:
        images = reader.read(range(19))["image"]
    want = [sample["image"] for sample in numbered(0, 20)]
    assert images == want[:13] + want[14:]
    assert verify(index).ok


@pytest.mark.parametrize("place", [0, 4, 9])
@pytest.mark.parametrize("how", ["header", "cut"])
@pytest.mark.parametrize("container", ["tfrecord", "tar"])
def test_the_rest_of_a_shard_that_breaks_off_is_left_out(
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
        (bad,) = verify(source, root=tmp_path, bad_list=listed).bad
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
        assert [(bad.record, bad.rest) for bad in verify(index).bad] == [(0, True)]


def test_excluding_what_is_not_there_is_refused(tmp_path: Path) -> None:
    shards = tfrecords(tmp_path, shards=1)
    with pytest.raises(ValueError, match="names shards that are not indexed"):
        build_index(shards, tmp_path / "x.index", exclude=[("nowhere", 0)])
    with pytest.raises(ValueError, match=r"names 1 record of .*, of which 0 are there"):
        build_index(shards, tmp_path / "x.index", exclude=[(shards[0].name, 10)])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"shard": "a.tar"}', "'record'"),
        ('{"shard": "a.tar", "record": 1, "x": 1}', "'x'"),
        ('{"shard": 7, "record": 1}', "got"),
        ('{"shard": "a.tar", "record": -1}', "got"),
        ('{"shard": "a.tar", "record": "1"}', "got"),
        ('{"shard": "a.tar", "record": 1, "rest": "no"}', "got"),
        ('["a.tar", 1]', "must be a mapping"),
        ("a.tar", "Expecting value"),
        ("\udcff", "Expecting value"),
        ("[" * 200_000, "recursion"),
    ],
)
def test_a_line_of_a_list_that_is_no_bad_record_is_named(
    tmp_path: Path, line: str, message: str
) -> None:
    listed = tmp_path / "bad.jsonl"
    good = '{"shard": "b.tar", "record": 2}\n'
    listed.write_text(good + line, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(
        ValueError, match=rf"bad\.jsonl, line 2: .*{message}.* with twinfeed verify"
    ):
        read_bad_records(listed)
    listed.write_text(f"\n{good} \n\n")
    assert read_bad_records(listed) == [BadRecord("b.tar", 2)]


def test_a_loose_file_whose_number_is_another_one_by_now_is_not_left_out(tmp_path: Path) -> None:
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
    (folder / "1.png").unlink()
    with pytest.raises(ValueError, match="names 'c/3', which is not record 3 of files-00000"):
        build_index(tmp_path / "images", index.path, exclude=listed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"container": "zip"}, "container must be one of 'tar', 'tfrecord', 'files', got 'zip'"),
        ({"missing": "ignore"}, "missing must be one of 'error', 'skip', 'empty', got 'ignore'"),
        ({"lists": "png"}, "lists must be a list of names, got 'png'"),
        ({"example": "no"}, "example must be True or False, got 'no'"),
        ({"join": 1}, "join must be True or False, got 1"),
        ({"max_record_bytes": 0}, "max_record_bytes must be at least 1, got 0"),
        ({"background": 0.5}, "background must be an int64 or a name, got 0.5"),
        ({"container": "files", "key": "name"}, "are for tfrecord, got files"),
        ({"container": "tfrecord", "join": True}, "join= is for tar, got tfrecord"),
    ],
)
def test_a_reading_that_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Reading(**options)


def test_an_index_tells_how_it_was_built(tmp_path: Path) -> None:
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
def test_the_same_content_has_the_same_digests_in_every_container(tmp_path: Path) -> None:
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
    lacking = [{name: v for name, v in samples[0].items() if name != "image"}, *samples[1:]]
    assert digests("tar", lacking)["image"] != digests("tfrecord", samples)["image"]
    assert digests("tar", lacking)["image"] == digests("tfrecord", lacking)["image"]
    assert digests("tar", samples[:6])["label"] != one["label"]


def test_zeros_of_another_type_are_another_content(tmp_path: Path) -> None:
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


def test_a_feature_of_two_kinds_is_told_of_with_both_records(tmp_path: Path) -> None:
    samples = [{"x": 1, "y": b"a"}, {"x": 2, "y": b"b"}, {"x": b"text", "y": b"c"}]
    shard = write_tfrecord(tmp_path / "a.tfrecord", samples)
    with pytest.raises(ValueError, match=r"'x' .* int64_list in record 0 and bytes in record 2"):
        build_index(shard, tmp_path / "x.index")


def test_the_fields_of_all_shards_together_are_bounded(tmp_path: Path) -> None:
    """Each shard stays below the limit; the tables of all would fill the disk."""
    shards = [
        write_tar(tmp_path / f"{n}.tar", [("k", {f"x{n}-{m}": b"" for m in range(100)})])
        for n in range(3)
    ]
    with pytest.raises(ValueError, match="more than 256 different fields"):
        build_index(shards, tmp_path / "x.index")


@pytest.mark.parametrize("text", ["a," + "x" * 200_000, "a,caf\xe9\n"], ids=["long", "latin"])
def test_a_label_table_that_is_none_is_a_value_error_with_its_path(
    tmp_path: Path, text: str
) -> None:
    table = tmp_path / "t.csv"
    table.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"t\.csv is no table"):
        FromTable(table).match(["a"])


def test_the_places_of_names_are_found_once_for_all_shards(
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


def test_arguments_are_checked(tmp_path: Path) -> None:
    shards = tars(tmp_path, shards=1)
    path = tmp_path / "x.index"
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"key": "name"}, ValueError, "are for tfrecord, got tar"),
        ({"fields": "jpg"}, TypeError, "got 'jpg'"),
        ({"fields": {"x": ["png"]}}, TypeError, r"names in the records, .* got 'x' to \['png'\]"),
        ({"fields": [1]}, TypeError, "got 1 to 1"),
        ({"fields": {"": "png"}}, TypeError, "got '' to 'png'"),
        ({"label": 5}, TypeError, r"label must be a field's name, .* or a function, got 5"),
        ({"label": FromFolder}, TypeError, r"FromFolder\(\), .*, got <class"),
        ({"exclude": ["d-000000.tar"]}, TypeError, r"exclude must be .* pairs .*, got 'd-000000"),
        ({"exclude": [7]}, TypeError, "exclude must be .*, got 7"),
        ({"root": tmp_path / "elsewhere"}, ValueError, "must lie below the root"),
        ({"label": lambda sample: 0.5}, DecodeError, "must return an int, a str or None"),
        ({"label": lambda sample: float("nan")}, DecodeError, "found: nan"),
        ({"classes": ["a"]}, ValueError, "has no labels: say with label= where the labels are"),
    ]
    for options, kind, text in bad:
        with pytest.raises(kind, match=text):
            build_index(shards, path, **options)
    with pytest.raises(ValueError, match="shards are named twice"):
        build_index(shards * 2, path)
    (examples,) = tfrecords(tmp_path, shards=1)
    with pytest.raises(
        KeyError, match=r"no record has the fields \['nope'\] of fields= or lists=; .*'image'"
    ):
        build_index(examples, path, lists=["nope"])


def test_a_shard_without_records_is_warned_of(tmp_path: Path) -> None:
    shards = tfrecords(tmp_path, shards=2)
    shards[0].write_bytes(b"")
    with pytest.warns(ShardWarning, match="1 of 2 shards have no records"):
        index = build_index(shards, tmp_path / "x.index")
    assert index.shard_lengths.tolist() == [0, 10]
    assert index.describe(0).startswith("record 0 (d-00001-of-00002.tfrecord, number 0")
    with Reader(index) as reader:
        assert reader.read([0])["key"] == [b"k10"]


def test_nothing_is_warned_of_in_sound_data(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_index(tars(tmp_path), tmp_path / "x.index")


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.tar"):
        build_index([*tars(tmp_path), tmp_path / "gone.tar"], tmp_path / "x.index")


def fails(sample: dict[str, Any]) -> int:
    value: int = {}[sample["__number__"]]
    return value


BAD_LABELS: list[tuple[bytes, Any, str, str]] = [
    (b"", "x", "must hold one integer or one name", "''"),
    (b" \n", "x", "must hold one integer or one name", "''"),
    (b"caf\xe9", "x", "must hold one integer or one name", r"'caf\udce9'"),
    (b"\xff" * 999, "x", "must hold one integer or one name", r"'\udcff\udcff...f\udcff\udcff'"),
    (b"no", FromJson("x"), "field 'x' is not JSON: Expecting value", ""),
    (b"[" * 100_000, FromJson("x"), "field 'x' is not JSON: maximum recursion", ""),
    (b"0.5", FromJson("x"), "must lead to an integer or a name", "0.5"),
    (b"true", FromJson("x"), "must lead to an integer or a name", "True"),
    (b'""', FromJson("x"), "must lead to an integer or a name", "''"),
    (b'{"a": {"b": 99999999999999999999}}', FromJson("x", "a.b"), "a.b", "99999999999999999999"),
    (rb'"\ud800"', FromJson("x"), "must lead to an integer or a name", r"'\ud800'"),
    (b"", lambda sample: 2**80, "must return an int, a str or None", str(2**80)),
    (b"", lambda sample: "\ud800", "must return an int, a str or None", r"'\ud800'"),
    (b"", lambda sample: 0.5, "must return an int, a str or None", "0.5"),
    (b"", fails, "the function of label= failed: KeyError: 1", ""),
]


@pytest.mark.parametrize(("text", "label", "problem", "found"), BAD_LABELS)
@pytest.mark.parametrize("container", ["tar", "files"])
def test_what_is_no_label_is_named_with_its_record(
    tmp_path: Path, container: str, text: bytes, label: Any, problem: str, found: str
) -> None:
    good = b'{"a": {"b": 7}}' if label == FromJson("x", "a.b") else b"7"
    path = shard = write_tar(tmp_path / "a.tar", [("a", {"x": good}), ("b", {"x": text})])
    source: Any = shard
    if container == "files":
        path = tmp_path / "b.x"
        for name, data in (("a", good), ("b", text)):
            (tmp_path / f"{name}.x").write_bytes(data)
        source = [Entry(name, {"x": f"{name}.x"}) for name in "ab"]
    one = (
        (lambda sample: label(sample) if sample["__number__"] else 1) if callable(label) else label
    )
    with pytest.raises(LoaderError) as caught:
        build_index(source, tmp_path / "x.index", label=one)
    error = caught.value
    assert isinstance(error, ValueError)
    assert problem in error.problem
    assert str(error.path).endswith(path.name)
    assert (error.record, error.key) == (1, "b")
    assert (error.found or "") == found
    assert error.advice is not None
    assert isinstance(error, DecodeError) == callable(label)
    if label is fails:
        assert isinstance(error.__cause__, KeyError)


@pytest.mark.parametrize("values", [[1.0], [1, 2], [b"a", b"b"]])
def test_a_feature_that_is_no_label_is_named_with_its_record(tmp_path: Path, values: Any) -> None:
    shard = write_tfrecord(tmp_path / "0.tfrecord", [{"label": 1}, {"label": values}])
    with pytest.raises(DataCorruptionError, match="must hold one integer or one name") as caught:
        build_index(shard, tmp_path / "x.index", label="label")
    assert (caught.value.path, caught.value.record) == (str(shard), 1)
    assert str(values[0]).rstrip("0") in str(caught.value.found)


def test_one_of_a_list_of_labels_is_chosen_by_a_function(tmp_path: Path) -> None:
    """The advice is followed word by word."""
    shard = write_tfrecord(tmp_path / "0.tfrecord", [{"labels": [n % 3, 7]} for n in range(6)])
    with pytest.raises(DataCorruptionError, match="must hold one integer or one name") as caught:
        build_index(shard, tmp_path / "x.index", label="labels")
    label = str(caught.value.advice).rpartition("label=")[2].partition(", or")[0]
    index = build_index(shard, tmp_path / "x.index", label=eval(label))
    assert index.labels.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("label", ["json", FromJson("json"), FromJson("json", "a")])
def test_a_json_object_is_no_label_but_leads_to_one(tmp_path: Path, label: Any) -> None:
    shard = write_tar(tmp_path / "a.tar", [("a", {"json": b'{"a": {"b": "ant"}}'})])
    with pytest.raises(DataCorruptionError, match="must ") as caught:
        build_index(shard, tmp_path / "x.index", label=label)
    assert "name one of its keys with FromJson (--label-json)" in str(caught.value.advice)


@pytest.mark.parametrize("text", ["{", "{ant}", "[1]", '"ant"'])
def test_a_name_that_looks_like_json_stays_a_name(tmp_path: Path, text: str) -> None:
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
def test_the_background_is_of_the_labels_kind(
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


def test_a_background_from_the_command_line_is_a_number_among_numbers(tmp_path: Path) -> None:
    shard = cls_tar(tmp_path / "a.tar", "3", None, "5")
    index = build_index(shard, tmp_path / "x.index", label=FromJson("cls"), background="-1")
    assert index.columns["label"].tolist() == [3, -1, 5]


def test_kinds_that_are_mixed_are_named_with_a_record_of_each(tmp_path: Path) -> None:
    shard = cls_tar(tmp_path / "a.tar", "3", None, "cat")
    path = tmp_path / "x.index"
    with pytest.raises(ValueError, match=r"background=-1 is an integer, .* names \('cat'\)"):
        build_index(shard, path, label="cls", background=-1)
    with pytest.raises(
        ValueError, match=r"integer \(a\.tar, record 0, key 'a0': 0\) and .*2, key 'a2': 'cat'"
    ):
        build_index(
            shard,
            path,
            label=lambda s: [0, None, "cat"][s["__number__"]],
            background=1,
        )
    with pytest.raises(ValueError, match="background='none' is a name, and labels are integers"):
        build_index(shard, path, label=lambda s: s["__number__"] or None, background="none")
    shards = [shard, cls_tar(tmp_path / "b.tar", "x")]
    with pytest.raises(
        ValueError, match=r"integer \(a\.tar, .*: 1\) and a name \(b\.tar, .*: 'x'\)"
    ):
        build_index(shards, path, label=lambda s: "x" if s["__key__"] == "b0" else 1)
    with pytest.raises(ValueError, match=r"integer \(the table, 'a0': 1\) and .* 'a1': 'cat'\)"):
        build_index(shard, path, label=FromTable({"a0": 1, "a1": "cat", "a2": 2}))


@pytest.mark.parametrize("background", [1.5, True, "", 2**63, "\ud800"])
def test_a_background_that_is_no_label_is_refused(tmp_path: Path, background: Any) -> None:
    with pytest.raises(ValueError, match="background must be an int64 or a name, got"):
        build_index(
            cls_tar(tmp_path / "a.tar", "3"),
            tmp_path / "x.index",
            background=background,
        )


@pytest.mark.parametrize("label", ["cls", FromTable({"a": 1}), FromFolder(), len])
def test_a_field_called_label_is_neither_lost_nor_mistaken(tmp_path: Path, label: Any) -> None:
    parts = {"cls": b"1", "label": b"a long text", "png": b"..."}
    shard, path = write_tar(tmp_path / "a.tar", [("a", parts)]), tmp_path / "x.index"
    if isinstance(label, FromFolder):
        write_tar(shard, [("d/a", parts)])
    for fields in (None, ["label", "png"]):
        with pytest.raises(
            ValueError, match=r"a\.tar is called 'label' .*fields=\{'text': 'label'\}"
        ):
            build_index(shard, path, label=label, fields=fields)
    index = build_index(shard, path, label=label, fields={"text": "label"})
    with Reader(index) as reader:
        assert reader.read([0], ["text"])["text"] == [b"a long text"]
    for fields in (None, ["label", "png"], {"label": "label"}):
        index = build_index(shard, path, label="label", fields=fields)
        assert "label" not in index.fields
        assert index.classes == ("a long text",)
    index = build_index(shard, path, label="cls", fields={"label": "cls"})
    assert index.columns["label"].tolist() == [1]


@pytest.mark.parametrize(
    ("classes", "kind", "message"),
    [
        ("cd", TypeError, "a list of names, got 'cd'"),
        ([1, 2], TypeError, r"a list of names, got \[1, 2\]"),
        (["a", "b", "a"], ValueError, r"got \['a'\]"),
        (["a", ""], ValueError, r"got \[''\]"),
    ],
)
def test_classes_are_different_names(tmp_path: Path, classes: Any, kind: Any, message: str) -> None:
    shard = cls_tar(tmp_path / "a.tar", "a")
    with pytest.raises(kind, match=f"classes must be .*{message}"):
        build_index(shard, tmp_path / "x.index", label="cls", classes=classes)


def test_a_table_may_come_from_a_spreadsheet(tmp_path: Path) -> None:
    """With a byte order mark, names in capitals, and more columns, if they are named."""
    file = tmp_path / "t.csv"
    file.write_text("\ufeffLabel,Notes, Key\r\ncat,fat,a\r\n", encoding="utf-8")
    assert FromTable(file).labels == {"a": "cat"}
    file.write_text("\ufeffa,cat\r\n", encoding="utf-8")
    assert FromTable(file).labels == {"a": "cat"}
    file.write_text("a,fat,cat\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"has 3 columns: .* first line, got \['a', 'fat'"):
        FromTable(file)


def test_features_that_differ_in_kind_over_shards_are_named(tmp_path: Path) -> None:
    one = write_tfrecord(tmp_path / "0.tfrecord", [{"caption": [b"a"]}])
    two = write_tfrecord(tmp_path / "1.tfrecord", [{"caption": [7]}])
    with pytest.raises(ValueError, match="'caption' is bytes in some shards and int64_list in"):
        build_index([one, two], tmp_path / "x.index")


def test_too_many_fields_are_taken_for_a_mistake(tmp_path: Path) -> None:
    samples = [("a", {f"v{n}.txt": b"" for n in range(257)})]
    write_tar(tmp_path / "a.tar", samples)
    with pytest.raises(ValueError, match=r"more than 256 different fields .*name those you want"):
        build_index(tmp_path / "a.tar", tmp_path / "x.index")
    assert build_index(tmp_path / "a.tar", tmp_path / "x.index", fields=["v3.txt"])


def test_an_index_is_never_written_among_other_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    shards = tars(tmp_path / "data")
    before = tree(tmp_path)
    for out, text in [
        (tmp_path / "data", "other files (d-000000.tar, d-000001.tar, d-000002.tar); "),
        (shards[0], f"a file; an index needs a folder of its own, such as {shards[0].stem}"),
    ]:
        with pytest.raises(FileExistsError) as caught:
            build_index(shards, out, root=tmp_path)
        assert text in str(caught.value).replace(f"{tmp_path}/data/", "")
    (tmp_path / "data" / MANIFEST).write_text('{"name": "an application"}')
    with pytest.raises(FileExistsError, match=r"such as .*/data/train\.index"):
        build_index(shards, tmp_path / "data")
    (tmp_path / "data" / MANIFEST).unlink()
    assert tree(tmp_path) == before


def test_a_pattern_that_catches_an_index_says_so(tmp_path: Path) -> None:
    tars(tmp_path)
    build_index(tmp_path / "*.tar", tmp_path / "x.index")
    for pattern in (tmp_path / "*", [tmp_path / "x.index", *tmp_path.glob("*.tar")]):
        with pytest.raises(LoaderError, match="a folder, or a file of an index") as caught:
            build_index(pattern, tmp_path / "y.index")
        assert caught.value.path == str(tmp_path / "x.index")
        assert "a pattern of shards alone, such as *.tfrecord or *.tar" in str(caught.value)
    (tmp_path / "more").mkdir()
    with pytest.raises(LoaderError, match="a folder, or a file of an index"):
        build_index(tmp_path / "[dm]*", tmp_path / "y.index")


def test_an_index_within_the_images_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(b"...")
    index = build_index(tmp_path, tmp_path / "x.index")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = build_index(tmp_path, tmp_path / "x.index")
        pack(tmp_path, tmp_path / "out", container="tar")
    assert again.fingerprint == index.fingerprint


def test_an_index_takes_a_folder_with_nothing_but_its_own(tmp_path: Path) -> None:
    shards = tars(tmp_path)
    for name in ("parts", ".hidden", "columns-0123456789abcdef"):
        out = tmp_path / f"{name}.index"
        (out / name).mkdir(parents=True)
        if name.startswith("columns"):
            mark(out / name)  # as an interrupted build does
        build_index(shards, out)
    (out / "notes.txt").write_text("mine")
    assert len(build_index(shards, out)) == 30


@pytest.mark.parametrize("name", ["parts", "columns-2024", "columns-0123456789abcdef"])
def test_a_build_takes_and_deletes_no_folder_of_anybody_else(tmp_path: Path, name: str) -> None:
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


def test_nothing_is_written_to_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be a local folder of that name."""
    shards = [str(shard) for shard in tfrecords(tmp_path)]
    monkeypatch.chdir(tmp_path)
    for url in ("s3://bucket/x", "memory://x", Path("s3://bucket/x")):
        for write in (
            lambda url=url: pack([{"a": 1}], url),
            lambda url=url: verify(shards, bad_list=url, root=tmp_path),
        ):
            with pytest.raises(ValueError, match="is a URL: write to a local folder, and upload"):
                write()
    assert sorted(path.name for path in tmp_path.iterdir()) == [Path(each).name for each in shards]
