"""Labels of an index: from fields, files, folders, tables and functions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.shards import tars, write_tar, write_tfrecord

from twinfeed.loaders import (
    DataCorruptionError,
    FromExample,
    FromFile,
    FromFolder,
    FromJson,
    FromTable,
    Reader,
    ShardWarning,
    build_index,
    pack,
    verify,
)
from twinfeed.loaders.building import _merge
from twinfeed.loaders.formats.example import encode
from twinfeed.loaders.formats.files import Entry
from twinfeed.loaders.formats.tfrecord import TFRecordWriter


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


def test_record_not_in_label_table_is_skipped_or_background(
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
    ("class_02.tar", "class_10.tar"): (r"class_(\d+)", (), [2, 10]),
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
        DataCorruptionError, match=r"lacks a label: label=FromFile.* \(--label-file\)"
    ):
        build_index(shards, tmp_path / "x.index", label=other)
    index = build_index(shards, tmp_path / "x.index", label=other, background=3)
    assert set(index.labels) == {3}


@pytest.mark.parametrize("pattern", [r"\d+", r"(\d)(\d)", "(", "", None, b"(a)", re.compile("(a)")])
def test_from_file_pattern_must_have_one_group(pattern: Any) -> None:
    with pytest.raises(ValueError, match=r"^pattern must be a regular expression with one group"):
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


def test_class_numbers_are_looked_up_once_for_all_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dictionary of all names for each shard took 20 seconds at 100,000 classes."""
    found, numbers = [], _merge.assign_classes
    monkeypatch.setattr(
        _merge,
        "assign_classes",
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
        (["3", None, "5"], "none", None, "background='none'"),
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
        (tmp_path / "t.csv").write_text("key,label\n" + "".join(rows))
        options["label"] = FromTable(tmp_path / "t.csv")
    if way == "function":
        options["label"] = lambda sample: sample["cls"].decode() if "cls" in sample else None
    if labels is None:
        with pytest.raises(ValueError, match=f"2 of 3 labels are integers, .* not: {classes}"):
            build_index(shards, tmp_path / "x.index", **options)
        return
    index = build_index(shards, tmp_path / "x.index", **options)
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
    file.write_text("\ufeffLabel,Notes, Key,,\r\ncat,fat,a,,\r\n", encoding="utf-8")
    assert FromTable(file).labels == {"a": "cat"}
    with pytest.raises(ValueError, match=r"t\.csv: 1 rows have no record, as \['a'"):
        FromTable(file).check(["b"])
    file.write_text("a,cat\n")
    with pytest.raises(ValueError, match=r"t\.csv must begin with names of columns, key and label"):
        _ = FromTable(file).labels


def from_origin(origin: str, root: Path, texts: tuple[str, ...], **options: Any) -> Any:
    """An index of a record for each text, which is its label and comes from this origin."""
    root.mkdir()
    shard, out = root / "x.tar", root / "x.index"
    if origin.startswith("pack"):
        samples = [{"txt": b"a", "label": text} for text in texts]
        split: Any = {"seed": 0, "split": {"data": 1.0}} if "split" in origin else {}
        container: Any = origin.split()[1]
        return pack(samples, root / "out", container=container, **split)["data"]
    if origin == "folder":
        for n, text in enumerate(texts):
            file = root / "images" / text / f"{n:03}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"image")
        return build_index(root / "images", out, **options)
    if origin in ("tfrecord", "example"):
        shard = write_tfrecord(root / "x.tfrecord", [{"target": text} for text in texts])
        label: Any = "target" if origin == "tfrecord" else FromExample("target")
        return build_index(shard, out, label=label, example=origin == "tfrecord", **options)
    members = [{"cls": t.encode(), "json": json.dumps({"id": t}).encode()} for t in texts]
    write_tar(shard, [(f"{n:03}", parts) for n, parts in enumerate(members)])
    rows = ["key,label", *(f'{n:03},"{text}"' for n, text in enumerate(texts))]
    (root / "t.csv").write_text("\n".join(rows))
    sources = {"member": "cls", "json": FromJson("json", "id"), "csv": FromTable(root / "t.csv")}
    label = sources.get(origin, lambda sample: sample["cls"].decode())
    return build_index(shard, out, label=label, **options)


ORIGINS = ["member", "tfrecord", "example", "csv", "json", "folder", "function"]
ORIGINS += ["pack tar", "pack tfrecord", "pack tar split"]
RULE: list[tuple[tuple[str, ...], Any, Any]] = [  # texts, classes=, and the sorted labels or error
    (("2", "10", "-1", "10"), None, [-1, 2, 10, 10]),
    (("0.0", "11.0", "2."), None, [0, 2, 11]),
    (("7", "7.0", "8"), None, [7, 7, 8]),
    (("007", "010"), None, [7, 10]),
    (("7", "8", "007"), None, "two labels are one integer: .*'0*7'; .*'0*7'\n"),
    (("7", "8", "07.0"), None, "two labels are one integer: .*'7'; .*'07.0'|'07.0'; .*'7'"),
    (("1", "2", "unknown"), None, "2 of 3 .* are integers, .*'unknown'; .*'1'\n.*classes='names'"),
    (("1", "2", "3,"), None, "2 of 3 labels are integers, and this is not: .*'3,'"),
    (("1", "\ufeff2", "3"), None, "2 of 3 labels are integers, and this is not: .*ufeff2'"),
    (("1", str(2**63)), None, f"1 of 2 labels are integers, .*'{2**63}'"),
    (("1", "9007199254740994.0"), None, "1 of 2 labels are integers, .*'9007199254740994.0'"),
    (("a", "b", "7"), None, "1 of 3 labels are integers, .*'[ab]'; an integer: .*'7'\n"),
    (("a", "b", "-"), None, ("-", "a", "b")),
    (("2", "10", "007", "7"), "names", ("007", "10", "2", "7")),
    (("1", "2", "x"), "names", ("1", "2", "x")),
    (("1", "2"), (), [1, 2]),
    (("a", "1", "b"), (), "labels are not integers .2, first: .*'a'.: .* classes=.. all"),
    (("0", "1", "2"), ("ant", "bee", "cat"), [0, 1, 2]),
    (("0", "1", "1.0"), ("1", "0"), "not among the 2 names of classes= .*'1.0'"),
    (("ant", "1", "bat"), ("ant", "bee"), "not among .*'bat'"),
]


@pytest.mark.parametrize("origin", ORIGINS)
def test_text_is_a_number_or_a_name_by_one_rule(tmp_path: Path, origin: str) -> None:
    """All integers are numbers, and none are names. Both are an error that names one of each."""
    for number, (texts, classes, expected) in enumerate(RULE):
        root = tmp_path / str(number)
        if "pack" in origin and classes is not None:
            continue
        if isinstance(expected, str):
            with pytest.raises(ValueError, match=expected) as caught:
                from_origin(origin, root, texts, classes=classes)
            place = "record [0-2]|x.tfrecord" if "pack" in origin or "fr" in origin else "key|table"
            assert origin == "example" or re.search(place, str(caught.value)), caught.value
            continue
        index = from_origin(origin, root, texts, classes=classes)
        if isinstance(expected, tuple):
            assert index.classes == expected
            assert sorted(index.classes[label] for label in index.labels) == sorted(texts)
        else:
            assert sorted(index.labels.tolist()) == expected
            assert index.classes == (classes or ())


@pytest.mark.parametrize("origin", [name for name in ORIGINS if "pack" not in name])
def test_white_space_around_a_text_does_not_count(tmp_path: Path, origin: str) -> None:
    """`pack` refuses it in the labels that it gets, and packs a folder as it is indexed."""
    names = from_origin(origin, tmp_path / "names", ("cat", "cat ", "\tdog"))
    if origin == "folder":
        names = pack(tmp_path / "names/images", tmp_path / "packed")["data"]
    assert (names.classes, sorted(names.labels)) == (("cat", "dog"), [0, 0, 1])
    numbers = from_origin(origin, tmp_path / "numbers", (" 7", "7\n", "8"))
    assert sorted(numbers.labels) == [7, 7, 8]


def test_culprit_is_named_with_its_shard_and_record(tmp_path: Path) -> None:
    """In the second shard; by its number in the shard, also if records before it are left out."""
    write_tfrecord(tmp_path / "0.tfrecord", [{"y": "1"}, {"y": "2"}])
    write_tfrecord(tmp_path / "1.tfrecord", [{"x": [1]}, {"y": "3"}, {"y": "?"}])
    shards, out = tmp_path / "*.tfrecord", tmp_path / "x.index"
    with pytest.raises(ValueError, match=r"not: 1\.tfrecord, record 2: '\?'"):
        build_index(shards, out, label="y", missing="skip", fields=[])
    with pytest.raises(ValueError, match=r"integers .*1\.tfrecord, record 2: '\?'"):
        build_index(shards, out, label="y", missing="skip", fields=[], classes=())
    write_tfrecord(tmp_path / "1.tfrecord", [{"y": "3"}, {"y": "?"}])
    with pytest.raises(ValueError, match=r"not: 1\.tfrecord, record 1: '\?'"):
        build_index(shards, out, label="y")


@pytest.mark.parametrize(
    ("value", "label"),
    [(7.0, 7), (np.float32(7), 7), (np.float32(2**24), None), (2.0**53, None), (7.5, None)],
)
def test_float_without_a_fraction_is_an_integer(tmp_path: Path, value: Any, label: Any) -> None:
    """Of a function, a table and `pack`; and so small that no other integer becomes this float."""
    shard = write_tar(tmp_path / "a.tar", [("a", {"txt": b"a"})])
    sources: list[Any] = [lambda _: value, FromTable({"a": value})]
    calls = [lambda s=s: build_index(shard, tmp_path / "x.index", label=s) for s in sources]
    calls.append(lambda: pack([{"txt": b"a", "label": value}], tmp_path / "out")["data"])
    for call in calls:
        if label is None:
            with pytest.raises((ValueError, TypeError), match="label"):
                call()
        else:
            assert call().labels.tolist() == [label]


FOLDERS = {
    0: ["cats", "cats", "dogs"],
    1: ["kittens", "old", "puppies"],
    -1: ["kittens", "old", "puppies"],
    -2: ["cats", "cats", "dogs"],
    2: None,
}


@pytest.mark.parametrize("container", ["files", "tar", "tfrecord"])
@pytest.mark.parametrize("level", FOLDERS)
def test_folder_is_the_same_in_every_container(tmp_path: Path, container: str, level: int) -> None:
    """The first below the root by default, and with level=-1 the innermost."""
    names, out = ("cats/kittens/1", "cats/old/2", "dogs/puppies/3"), tmp_path / "x.index"
    label = FromFolder(level) if level else FromFolder()
    for name in names:
        image, shard = tmp_path / "images" / f"{name}.png", tmp_path / f"{name}.tfrecord"
        for path in (image, shard):
            path.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(b"image")
        write_tfrecord(shard, [{"x": b"image"}])
    tar = write_tar(tmp_path / "x.tar", [(name, {"png": b"image"}) for name in names])
    records = [tmp_path / f"{name}.tfrecord" for name in names]
    calls: dict[str, Any] = {
        "files": lambda: build_index(tmp_path / "images", out, label=label),
        "tar": lambda: build_index(tar, out, label=label),
        "tfrecord": lambda: build_index(records, out, label=label),
    }
    if FOLDERS[level] is None:
        with pytest.raises(DataCorruptionError, match=r"label=FromFolder\(level=2\) \(--label-fo"):
            calls[container]()
        return
    index = calls[container]()
    assert [index.classes[label] for label in index.labels] == FOLDERS[level]


def test_tar_of_one_outer_folder_has_its_classes_at_the_next_level(tmp_path: Path) -> None:
    """As `tar cf x.tar images` makes it: each sample's first folder is the same."""
    names = ("images/cats/1", "images/dogs/2")
    tar, out = write_tar(tmp_path / "x.tar", [(name, {"png": b"a"}) for name in names]), tmp_path
    assert build_index(tar, out / "x.index", label=FromFolder()).classes == ("images",)
    index = build_index(tar, out / "x.index", label=FromFolder(level=1))
    assert index.classes == ("cats", "dogs")


def test_label_of_an_entry_comes_before_its_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(b"image")
    entries = [Entry("a/1", {"image": "a/1.png"}, "dog")]
    out = tmp_path / "x.index"
    assert build_index(entries, out).classes == ("dog",)
    assert build_index(entries, out, label=FromFolder(level=-1)).classes == ("a",)


@pytest.mark.parametrize("level", [0.5, "1", True, None])
def test_level_of_a_folder_is_an_integer(level: Any) -> None:
    with pytest.raises(TypeError, match="level must be an integer"):
        FromFolder(level=level)


def test_example_may_be_a_member_of_a_tar(tmp_path: Path) -> None:
    members = [("a", {"pb": encode({"y": 3})}), ("b", {"pb": encode({"y": 5})})]
    label = FromExample("y", field="pb")
    index = build_index(write_tar(tmp_path / "a.tar", members), tmp_path / "x.index", label=label)
    assert index.labels.tolist() == [3, 5]


def test_label_of_an_example_that_is_read_whole(tmp_path: Path) -> None:
    """An integer or a text; what is no Example, or lacks the feature, is an error at its place."""
    path, out = tmp_path / "a.tfrecord", tmp_path / "x.index"
    label = FromExample("target")
    many = list(range(500))  # which are scanned as chunks
    for values, expected in (
        ([3, 5], [3, 5]),
        (["b", "a"], [1, 0]),
        ([[3.0], [5.0]], [3, 5]),
        (many, many),
    ):
        write_tfrecord(path, [{"target": value, "x": b"1"} for value in values])
        index = build_index(path, out, label=label, example=False)
        assert (index.labels.tolist(), list(index.fields)) == (expected, ["data"])
        assert (index.options.label_from, index.options.label) == ("example", "target")
        with pytest.raises(DataCorruptionError, match=r"gives none[^$]*example=False"):
            build_index(path, out, label=label)
    write_tfrecord(path, [{"target": 3}, {"x": b"1"}])
    with pytest.raises(
        DataCorruptionError, match=r"lacks a label: label=FromExample.*\(--label-ex"
    ):
        build_index(path, out, label=label, example=False)
    assert len(build_index(path, out, label=label, example=False, missing="skip")) == 1
    with pytest.raises(DataCorruptionError, match=r"FromExample\('target'\)"):
        build_index(path, out, label="target", example=False)
    write_tfrecord(path, [{"target": [3, 4]}])
    with pytest.raises(DataCorruptionError, match="gives a value that is not a label"):
        build_index(path, out, label=label, example=False)
    with TFRecordWriter(path) as writer:
        writer.write(b"\x0a\xff\xff")
    with pytest.raises(DataCorruptionError, match="'data' is not an Example: not a v") as caught:
        build_index(path, out, label=label, example=False)
    assert (caught.value.record, caught.value.path) == (0, str(path))
