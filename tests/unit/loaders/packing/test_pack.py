"""Packing: what goes in comes out, in the order, the number and the size asked for."""

from __future__ import annotations

import gzip
import re
import shutil
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.refusals import Call, Refused, check_refused
from support.shards import numbered, tree, write_tfrecord

from twinfeed.loaders import (
    Feed,
    Index,
    Reader,
    ShardWarning,
    UnsafeContentError,
    build_index,
    open_index,
    pack,
    verify,
)
from twinfeed.loaders.formats.files import Entry
from twinfeed.samplers import ExactOnceBatchSampler

CONTAINERS = ("tfrecord", "tar")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Eleven classes named as numbers, so that sorting them as text matters."""
    root = tmp_path / "images"
    for n in range(44):
        path = root / f"{n % 11}" / f"{n:02d}.{'jpg' if n % 2 else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"image {n}".encode() * (n + 1))
    return root


def contents(index: Index, *fields: str) -> list[tuple[Any, ...]]:
    """The content of each record."""
    with Reader(index) as reader:
        got = reader.read(range(len(index)), fields or None)
    return list(zip(index.keys(range(len(index))), *got.values(), strict=True))


@pytest.mark.parametrize("container", CONTAINERS)
def test_folder_is_packed_whole_into_splits(tmp_path: Path, images: Path, container: Any) -> None:
    split = {"train": 31, "eval": 13}
    packed = pack(images, tmp_path / "out", container=container, split=split, seed=3)
    assert {name: len(index) for name, index in packed.items()} == split
    seen = Counter()
    for index in packed.values():
        assert index.classes == ()
        assert list(index.fields) == ["image"]
        for (key, image), label in zip(contents(index), index.labels.tolist(), strict=True):
            number = int(key.rpartition("/")[2])
            assert image == f"image {number}".encode() * (number + 1)
            assert label == number % 11 == int(key.partition("/")[0])
            seen[number] += 1
        assert verify(index).ok
        assert open_index(index.path).fingerprint == index.fingerprint
    assert seen == Counter(range(44))


def test_both_containers_hold_the_same_records_in_the_same_order(
    tmp_path: Path, images: Path
) -> None:
    one, two = (pack(images, tmp_path / c, container=c, seed=5)["data"] for c in CONTAINERS)
    assert contents(one) == contents(two)
    assert one.labels.tolist() == two.labels.tolist()
    assert contents(one) != contents(pack(images, tmp_path / "s", seed=6)["data"])


def test_hidden_folders_and_indexes_are_not_classes(tmp_path: Path, images: Path) -> None:
    (images / ".hidden").mkdir()
    pack([{"x": 1}], tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "data.index", images / "old.index")
    index = pack(images, tmp_path / "out", seed=0)["data"]
    assert sorted({*index.labels.tolist()}) == list(range(11))


def test_images_without_class_folders_are_packed(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"...")
    assert not pack(tmp_path, tmp_path / "out")["data"].has_labels


def test_image_files_of_unknown_content_are_packed(tmp_path: Path, images: Path) -> None:
    bad = images / "3" / "14.png"
    (images / "3" / "14.ppm").write_bytes(b"P3\n1 1\n255\n1 2 3\n")  # text, and an image
    bad.write_bytes(bytes(9))  # nobody knows what this is
    assert len(pack(images, tmp_path / "out")["data"]) == 45


@pytest.mark.parametrize("container", CONTAINERS)
def test_packing_twice_writes_same_bytes(tmp_path: Path, images: Path, container: Any) -> None:
    for name in ("one", "two"):
        pack(images, tmp_path / name, container=container, seed=1, shards=3)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_shard_count_and_size_options_are_followed(tmp_path: Path) -> None:
    samples = numbered(0, 100, size=1000)
    for options, lengths in [
        ({}, [100]),
        ({"shards": 6}, [16, 17, 17, 16, 17, 17]),
        ({"shard_records": 30}, [30, 30, 30, 10]),
        ({"shard_bytes": 40_000}, [38, 38, 24]),
        ({"shards": 3, "shard_records": 20}, [20, 13, 20, 13, 20, 14]),
    ]:
        index = pack(samples, tmp_path / str(options), **options)["data"]  # type: ignore[arg-type]
        assert index.shard_lengths.tolist() == lengths, options
    again = pack(index, tmp_path / "again", shard_bytes=25_000)["data"]
    assert again.shard_lengths.tolist() == [20] * 5
    assert again.shard_paths[3] == "data-00003-of-00005.tfrecord"


def test_split_fractions_are_rounded_to_whole_records(tmp_path: Path) -> None:
    packed = pack(numbered(0, 10), tmp_path, split={"a": 0.25, "b": 0.25, "c": 0.5}, seed=0)
    assert [len(index) for index in packed.values()] == [2, 3, 5]


def test_iterable_is_written_in_order_or_shuffled(tmp_path: Path) -> None:
    def words() -> Iterator[dict[str, Any]]:
        for n in range(50):
            yield {"__key__": f"w{n}", "word": f"word{n}", "label": f"class{n % 3}"}

    plain = pack(words(), tmp_path / "plain")["data"]
    assert [word for _, word in contents(plain)] == [b"word%d" % n for n in range(50)]
    assert plain.classes == ("class0", "class1", "class2")
    packed = pack(words(), tmp_path / "split", split={"a": 20, "b": 30}, seed=0, shards=2)
    both = contents(packed["a"]) + contents(packed["b"])
    assert both != contents(plain)
    assert sorted(both) == sorted(contents(plain))
    assert packed["a"].classes == plain.classes


class BeginsAgain:
    """An iterator that goes on after its end."""

    number = 0

    def __iter__(self) -> BeginsAgain:
        return self

    def __next__(self) -> dict[str, int]:
        if self.number == 3:
            self.number = 0
            raise StopIteration
        self.number += 1
        return {"x": self.number}


@pytest.mark.parametrize("options", [{}, {"shard_records": 2}, {"seed": 0}])
def test_an_iterable_is_packed_up_to_its_first_end(tmp_path: Path, options: Any) -> None:
    assert sorted(pack(BeginsAgain(), tmp_path, **options)["data"].columns["x"]) == [1, 2, 3]


def test_tfrecord_to_tar_and_back_keeps_every_field(tmp_path: Path) -> None:
    samples = [
        {"__key__": f"k{n}", "image": b"\xff\xd8\xff%d" % n, "note": f"n{n}", "label": n % 3}
        for n in range(20)
    ]
    first = pack(samples, tmp_path / "a")["data"]
    second = pack(first, tmp_path / "b", container="tar")["data"]
    third = pack(second, tmp_path / "c")["data"]
    assert contents(first) == contents(second) == contents(third)
    for other in (second, third):
        assert other.labels.tolist() == first.labels.tolist()
    assert b"k0.jpg" in (tmp_path / "b" / "data-00000-of-00001.tar").read_bytes()


def test_one_record_tfrecords_are_repacked(tmp_path: Path) -> None:
    for sample in numbered(0, 30):
        pack([sample], tmp_path / "many" / sample["key"])
    index = build_index(
        sorted((tmp_path / "many").glob("*/*.tfrecord")), tmp_path / "many" / "x.index"
    )
    assert len(index.shards) == 30
    again = pack(index, tmp_path / "few", shards=2, seed=0)["data"]
    assert len(again.shards) == 2
    with Reader(again) as reader:
        images = reader.read(range(30), ["image"])["image"]
    assert sorted(images) == sorted(sample["image"] for sample in numbered(0, 30))


def test_pairs_of_image_and_annotation_stay_together(tmp_path: Path) -> None:
    for n in range(5):
        (tmp_path / f"{n}.jpg").write_bytes(b"image%d" % n)
        (tmp_path / f"{n}.xml").write_bytes(b"<n>%d</n>" % n)
    entries = [Entry(str(n), {"image": f"{n}.jpg", "annotation": f"{n}.xml"}) for n in range(5)]
    for container in CONTAINERS:
        out = tmp_path / container
        listed = build_index(entries, tmp_path / "x.index")
        index = pack(listed, out, container=container, seed=0)["data"]
        for key, annotation, image in contents(index, "annotation", "image"):
            assert (annotation, image) == (b"<n>%s</n>" % key.encode(), b"image" + key.encode())


def test_names_that_differ_only_by_extension_or_dots_stay_apart(tmp_path: Path) -> None:
    root = tmp_path / "images"
    (root / "c").mkdir(parents=True)
    for name in ("a.jpg", "a.png", "b.1.jpg", "b.2.jpg"):
        (root / "c" / name).write_bytes(name.encode())
    index = pack(root, tmp_path / "out", container="tar")["data"]
    assert index.keys(range(4)) == ["c/a_jpg", "c/a_png", "c/b_1", "c/b_2"]
    listed = build_index(tmp_path / "images", tmp_path / "images.index")
    again = pack(listed, tmp_path / "again", container="tar")["data"]
    assert again.keys(range(4)) == index.keys(range(4))
    assert pack(listed, tmp_path / "same")["data"].keys(range(4)) == listed.keys(range(4))


def test_field_missing_from_some_records_reads_as_empty(tmp_path: Path) -> None:
    samples = [{"image": b"a", "note": "x"}, {"image": b"b"}]
    for container in CONTAINERS:
        with pytest.warns(ShardWarning, match="2 records of 'data' lack .* empty: .*'note' by 1"):
            index = pack(samples, tmp_path / container, container=container)["data"]
        with Reader(index) as reader:
            assert reader.read([0, 1], ["note"]) == {"note": [b"x", None]}
        assert Feed(index, ExactOnceBatchSampler(2, batch_size=2))[0, 0]["note"] == [b"x", b""]
        with pytest.warns(ShardWarning, match="'note' by 1"):
            again = pack(index, tmp_path / f"{container} again")["data"]
        assert again.fields["note"].missing == 1


def test_concurrent_packs_into_one_folder_are_independent(tmp_path: Path) -> None:
    samples = [{"x": bytes(50)}] * 6
    with ProcessPoolExecutor(4) as pool:
        for number in range(20):
            out = tmp_path / f"{number}"
            packs = [pool.submit(pack, samples, out, split={f"s{n}": 6}, seed=0) for n in range(4)]
            for one in packs:
                one.result()
            assert {path.name for path in out.glob("*.index")} == {f"s{n}.index" for n in range(4)}
            assert not list(out.glob(".*"))


def test_numbers_and_arrays_keep_their_kind(tmp_path: Path) -> None:
    samples = [{"box": np.array([0.5, n], np.float32), "id": n, "flag": True} for n in range(3)]
    index = pack(samples, tmp_path / "a")["data"]
    assert index.columns["box"].tolist() == [[0.5, 0], [0.5, 1], [0.5, 2]]
    assert index.columns["id"].tolist() == [0, 1, 2]
    tar = pack(index, tmp_path / "b", container="tar")["data"]
    with Reader(tar) as reader:
        assert reader.read([2]) == {"box": [b"[0.5, 2.0]"], "flag": [b"1"], "id": [b"2"]}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("label", [np.uint8(7), np.array(7), 7])
def test_a_label_may_be_any_integer(tmp_path: Path, container: Any, label: Any) -> None:
    index = pack([{"label": label}], tmp_path, container=container)["data"]
    assert index.labels.tolist() == [7]


def test_floats_are_rounded_in_tfrecord_but_not_in_tar(tmp_path: Path) -> None:
    index = pack([{"x": 0.1}, {"x": float("inf")}], tmp_path)["data"]
    assert index.columns["x"].tolist() == [np.float32(0.1), float("inf")]
    tar = pack([{"x": 0.1}], tmp_path / "tar", container="tar")["data"]
    with Reader(tar) as reader:
        assert reader.read([0]) == {"x": [b"0.1"]}


@pytest.mark.filterwarnings("ignore:fields that some")
def test_value_that_tar_cannot_hold_is_refused_with_advice(tmp_path: Path) -> None:
    long = [bytes(1000), bytes(1000)]
    for name, sample, text in [
        ("a", {"pair": long}, "field 'pair' must hold bytes, str or numbers of up to 64 bits"),
        ("b", {"cls": 3}, "the fields 'label' and 'cls' would both be the tar member 'cls'"),
    ]:
        samples = [{"label": 1}, {"label": 1} | sample]
        index = pack(samples, tmp_path / name)["data"]
        with pytest.raises((TypeError, ValueError)) as caught:
            pack(index, tmp_path / "refused", container="tar")
        assert str(caught.value).startswith(f"record 1: {text}")
        assert "TFRecord, or build an index first with fields= (--field)" in str(caught.value)
        assert len(str(caught.value)) < 300
        shards = [index.path.parent / name for name in index.shard_paths.tolist()]
        fields = {"other": "cls"} if "cls" in sample else {}
        again = build_index(
            shards,
            tmp_path / name / "x.index",
            fields=fields,
            label="label",
            missing="empty",
        )
        assert len(pack(again, tmp_path / f"{name} again", container="tar")["data"]) == 2


@pytest.mark.parametrize(
    ("samples", "error"),
    [
        (
            [{"image": b"\xff\xd8\xff", "png": b"1"}, {"image": b"\x89PNG\r\n\x1a\n"}],
            "member 'png'",
        ),
        ([{"A": b"1"}, {"a": b"2"}], "the fields 'A' and 'a' would both be the tar member 'a'"),
        ([{"a/b": b"1"}, {"a.b": b"2"}], "both be the tar member 'a.b'"),
        ([{"a": b"1", "b": b"2"}, {"a;b": b"3"}], "must not contain ';', got 'a;b'"),
    ],
)
def test_name_in_a_tar_that_is_not_of_one_field_is_refused(
    tmp_path: Path, samples: list[dict[str, bytes]], error: str
) -> None:
    """Else a record that lacks a field gets the bytes of another."""
    with pytest.raises(ValueError, match=f"record 1: .*{error}"):
        pack(samples, tmp_path, container="tar")


def test_symlink_out_of_the_folder_is_not_packed(tmp_path: Path) -> None:
    root = tmp_path / "images"
    (root / "c").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(b"S")
    (root / "c" / "a.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(UnsafeContentError, match=r"path leaves its root: 'c/a.png'[^$]*secret.png"):
        pack(root, tmp_path / "out")
    (root / "c" / "a.png").unlink()
    (root / "c" / "b.png").write_bytes(b"B")
    (tmp_path / "link").symlink_to(root)
    assert len(pack(tmp_path / "link", tmp_path / "out")["data"]) == 1  # a folder that is named


def test_folder_path_may_be_a_string(tmp_path: Path) -> None:
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "1.png").write_bytes(b"...")
    index = pack(str(tmp_path / "images"), tmp_path / "out")["data"]
    assert (len(index), index.classes) == (1, ("cat",))


def test_concurrent_packs_of_same_names_keep_the_first(tmp_path: Path) -> None:
    def samples() -> Iterator[dict[str, bytes]]:
        yield {"word": b"slow"}
        pack([{"word": b"quick"}], tmp_path)

    with pytest.raises(FileExistsError, match="already holds files of these names \\(2"):
        pack(samples(), tmp_path)
    with Reader(open_index(tmp_path / "data.index")) as reader:
        assert reader.read([0])["word"] == [b"quick"]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.filterwarnings("ignore:fields that some")
def test_records_of_one_key_fit_one_tfrecord_or_two_tars(tmp_path: Path) -> None:
    samples = [{"__key__": "k", f"x{n}": n} for n in range(2)]
    assert len(pack(samples, tmp_path / "plain")["data"]) == 2
    index = pack(samples, tmp_path / "out", container="tar", shard_records=1)["data"]
    assert index.keys([0, 1]) == ["k", "k"]


@pytest.mark.parametrize("container", CONTAINERS)
def test_bytes_like_values_are_packed_as_bytes(tmp_path: Path, container: Any) -> None:
    samples = [{"x": bytearray(b"ab")}, {"x": memoryview(b"ab")}]
    with Reader(pack(samples, tmp_path, container=container)["data"]) as reader:
        assert reader.read([0, 1]) == {"x": [b"ab", b"ab"]}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.filterwarnings("ignore:fields that some")
def test_repacking_keeps_classes_and_their_order(
    tmp_path: Path, images: Path, container: Any
) -> None:
    """In the order that an index has given them; numbers that look like names stay numbers."""
    folder = pack(images, tmp_path / "folder", container=container, shards=2)["data"]
    shards = [folder.path.parent / name for name in folder.shard_paths.tolist()]
    label = "cls" if container == "tar" else "label"
    names = list(map(str, range(10, -1, -1)))
    custom = build_index(
        shards,
        folder.path.parent / "x.index",
        label=label,
        classes=names,
        fields=["image"],
        missing="empty",
    )
    for index in (folder, custom):
        again = pack(index, tmp_path / f"{index.path.name}-again", container=container)["data"]
        assert again.classes == index.classes
        assert again.labels.tolist() == index.labels.tolist()
    assert custom.classes == tuple(names)
    plain = pack([{"label": 10, "x": 1}, {"label": 2, "x": 1}], tmp_path / "n", container=container)
    assert plain["data"].classes == ()


def test_path_of_index_or_shard_is_packed(tmp_path: Path) -> None:
    index = pack(numbered(0, 4), tmp_path / "a")["data"]
    assert len(pack(index.path, tmp_path / "b", container="tar")["data"]) == 4
    shard = tmp_path / "b" / "data-00000-of-00001.tar"
    assert len(pack(shard, tmp_path / "c", container="tar")["data"]) == 4


@pytest.mark.filterwarnings("ignore:fields that some")
def test_a_field_of_two_kinds_may_lie_in_a_tar(tmp_path: Path) -> None:
    samples: list[dict[str, Any]] = [{"a": 1}, {"a": 2.5}, {"a": b"1"}]
    assert len(pack(samples, tmp_path, container="tar")["data"]) == 3


def packed(source: Any, out: str = "out", **options: Any) -> Call:
    """A call that packs a source: samples, a place in the world, or what is made of that place."""

    def call(world: Path) -> object:
        made = world / source if isinstance(source, str) else source
        return pack(made(world) if callable(made) else made, world / out, **options)

    return call


def named(label: Any) -> list[dict[str, Any]]:
    return [{"__key__": "a", "label": "cat"}, {"__key__": "b", "label": label}]


TEN: Any = numbered(0, 10)
TAR: Any = {"container": "tar"}
SEED: Any = {"seed": 0}
HALVES: Any = {"split": {"a": 1, "b": 1}} | SEED
A_CLASS = r"record 1 \(key 'b'\): label must be a name or an integer that fits int64, got "
BAD_UTF_8 = "a\udcff"
# What is wrong, the class of the error, and a word that names the record or what to do.
REFUSED: Refused = [
    # Sources
    (packed([]), ValueError, "nothing to pack"),
    (packed(iter([])), ValueError, "nothing to pack"),
    (packed([], **HALVES), ValueError, "nothing to pack: the source is empty"),
    (packed(None), TypeError, "an iterable of samples, got None"),
    (packed({"a": 1}), TypeError, "an iterable of samples, got {'a': 1}"),
    (packed("none"), FileNotFoundError, "no image .* below"),
    (packed("beside"), ValueError, "lacks a label.*key: a"),
    # Where to
    (packed(TEN, "full"), FileExistsError, r"holds files of these names \(2.*remove them"),
    (packed(TEN, "a.gz"), FileExistsError, "a.gz"),
    *(
        (lambda _, url=url: pack(TEN, url), ValueError, "is a URL: write to a local folder, and up")
        for url in ("memory://x", Path("s3://bucket/x"))
    ),
    # Options
    *(
        (packed(TEN, **options), kind, word)
        for options, kind, word in (
            ({"container": "zip"}, ValueError, "container must be"),
            ({"shards": 0}, ValueError, "shards must be at least 1, got 0"),
            ({"shards": True}, TypeError, "shards must be an integer, got True"),
            ({"shards": 11}, ValueError, "10 records of 'data' cannot fill shards=11"),
            ({"shard_bytes": "1M"}, TypeError, "shard_bytes must be an integer, got '1M'"),
            ({"seed": 1.5}, TypeError, "seed must be an integer, got 1.5"),
            ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
            ({"split": {"a": 10}}, ValueError, "needs a seed="),
            ({"split": {"a": 9}} | SEED, ValueError, "must add up to the 10 records.*such as 0.8"),
            ({"split": {"a": 0.5, "b": 0.6}} | SEED, ValueError, "fractions that add up to 1"),
            ({"split": {"../a": 10}} | SEED, ValueError, "must be valid file names"),
            ({"split": {"a": -1, "b": 11}} | SEED, ValueError, "at least 0, got -1 for 'a'"),
            ({"split": {"a": float("nan")}} | SEED, ValueError, "at least 0, got nan"),
            ({"split": ["a"]} | SEED, TypeError, r"such as {'train': 0.8, .*}, got \['a'\]"),
            ({"split": {"a": "1"}} | SEED, TypeError, "must be numbers, got '1' for 'a'"),
            ({"split": np.arange(10**6)} | SEED, TypeError, "0.2}, got array.{,40}$"),
        )
    ),
    # Samples
    (packed([{"x": np.ma.array([1], mask=[1])}]), TypeError, "record 0: field 'x' is masked: fill"),
    (
        packed([{"x": [2**53 + 1, 0.5]}], **TAR),
        TypeError,
        "record 0: float64 cannot hold 90071992547",
    ),
    (packed([{"x": deque([2**53 + 1, 0.5])}], **TAR), TypeError, "record 0: float64 cannot hold"),
    (packed([{"x": np.ma.masked}], **TAR), TypeError, "record 0: field 'x' is masked: fill it"),
    (packed([{"x": 1}, 2]), TypeError, "record 1: a sample must be a dict .* field name, got 2"),
    (packed(np.zeros((2, 2))), TypeError, r"record 0: a sample must be a dict .* got array\("),
    (packed([{"x": 1, 2: 3}]), TypeError, "record 0: a field's name must be a str, got 2"),
    (packed([{"x": 1, "__key__": 5}]), TypeError, r"record 0 \(key 5\): __key__ must be a str"),
    (packed([{"a": 1, "label": 1}, {"a": 1}]), ValueError, "1 of 2 samples have a label"),
    (packed([{"a": 1, "__key__": "k"}, {"a": 1}]), ValueError, "1 of 2 samples have a __key__"),
    (packed([{"key": b"x", "__key__": "k"}]), ValueError, "both __key__ and key"),
    *(
        (packed([{"__key__": "a", "x": "1"}, sample]), ValueError, f"record 1 .*{word}")
        for sample, word in (
            ({"__key__": BAD_UTF_8, "x": "1"}, r"__key__ must fit UTF-8, got 'a\\udcff'"),
            ({"__key__": "b", "x": BAD_UTF_8}, "field 'x' must fit UTF-8, .* pack bytes"),
            ({"__key__": "b", BAD_UTF_8: 1}, "a field's name must fit UTF-8"),
            ({"__key__": "b", "label": b"\xff"}, "label must fit UTF-8"),
        )
    ),
    *(
        (packed([{"x": 1.5}, {"x": 2.5}, {"x": value}], seed=1), ValueError, f"record 2: .*{word}")
        for value, word in (
            (np.uint64(1 << 63), "'x' must fit into int64, got 9223372036854775808"),
            ([-1, 1 << 63], "'x' must fit into int64, got 9223372036854775808"),
            (1e300, r"'x' must fit into float32, got 1e\+300"),
            (np.array([1.0, -1e39]), r"'x' must fit into float32, got -1e\+39"),
        )
    ),
    *(
        (
            packed(samples, **options),
            ValueError,
            f"record 2: field 'a' has {word} in record 0: use values",
        )
        for samples, word in (
            ([{"a": 1}, {"a": True}, {"a": 2.5}], "floats here and integers"),
            ([{"a": [1.0, 2]}, {"b": 0}, {"a": b"1"}], "bytes here and floats"),
            ([{"a": "x"}, {"a": b"y"}, {"a": np.uint8(1)}], "integers here and bytes"),
        )
        for options in ({}, {"seed": 0})
    ),
    (packed([{"a": 1}, {"a": 2.5}], **HALVES), ValueError, "field 'a' has "),  # an index for each
    # Labels
    (packed(named(3)), ValueError, "record 1.*'label' has integers here and bytes in"),
    *(
        (
            packed(named(label), **options),
            TypeError,
            A_CLASS + re.escape(f"{label!r}: if it is not a class"),
        )
        for label in (5.7, float("nan"), None, True, "", [5], np.array([1, 0]), 1 << 63)
        for options in ({}, TAR)
    ),
    *(
        (packed(named(label)), ValueError, "label '.*' begins or ends with white space.* 'cat'")
        for label in ("cat ", "\tcat", b"cat\n")
    ),
    # Tars
    (packed([{"x": [b"a", b"b"]}], **TAR), TypeError, "'x' must hold bytes, .* in a tar, got"),
    (
        packed([{"x": np.longdouble(1)}], **TAR),
        TypeError,
        "'x' must .* numbers of up to 64 bits in",
    ),
    (packed([{"__key__": "..", "txt": b""}] * 2, **TAR), ValueError, "key '__' too"),
    (packed([{"__key__": "a\nb", "txt": b""}], **TAR), ValueError, "is not a valid name"),
    (packed([{"a": 1}, {}], **TAR), ValueError, "record 1.*: it has no field, .* pack to TFRecord"),
    *(
        (
            packed([{"__key__": key, "x": 1} for key in keys], **TAR),
            ValueError,
            "record 0 .*'k' too",
        )
        for keys in ("kk", "kjk")
    ),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of images, packed shards, and a compressed shard."""
    world = tmp_path_factory.mktemp("world")
    files = dict.fromkeys(("beside/c/1.png", "beside/a.png"), b"...")
    for name, data in files.items():
        (world / name).parent.mkdir(parents=True, exist_ok=True)
        (world / name).write_bytes(data)
    (world / "none").mkdir()
    plain = write_tfrecord(world / "plain", [{"a": 1, "label": 2}])
    (world / "a.gz").write_bytes(gzip.compress(plain.read_bytes()))
    pack(TEN, world / "full")
    return world


@pytest.mark.filterwarnings("ignore:files below")
@pytest.mark.filterwarnings("ignore:fields that some")
@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_pack_refuses_bad_arguments(
    world: Path, call: Call, kind: type[Exception], word: str
) -> None:
    check_refused(world, call, kind, word)
